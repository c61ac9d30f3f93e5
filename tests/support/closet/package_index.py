"""An index of Python packages with one package, at an address that the closet's nodes take for the internet."""

from __future__ import annotations

import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gpuhub_closet import shell

PACKAGE = "tinything"
ADDRESS = "198.51.100.9"
PORT = 8099
URL = f"http://{ADDRESS}:{PORT}/simple/"


def build_wheel(name: str) -> bytes:
    """Return a package with one module, which has a VALUE."""
    buffer, info = io.BytesIO(), f"{name}-1.0.dist-info"
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{name}.py", "VALUE = 1\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


@contextmanager
def served_index(closet: Any, folder: Path) -> Iterator[None]:
    """Serve the index from a new folder below `folder`, until the end of the block."""
    page = folder / "simple" / PACKAGE
    page.mkdir(parents=True)
    file = f"{PACKAGE}-1.0-py3-none-any.whl"
    (page / file).write_bytes(build_wheel(PACKAGE))
    (page / "index.html").write_text(f'<!DOCTYPE html><html><body><a href="{file}">{file}</a></body></html>')
    routes = [("ip", "-netns", closet.plan.netns_name(node), "route") for node in closet.plan.nodes]
    shell.run_command(("ip", "address", "replace", f"{ADDRESS}/32", "dev", "lo"))
    try:
        for route in routes:
            shell.run_command((*route, "replace", ADDRESS, "via", str(closet.plan.head)))
        handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
        with http.server.ThreadingHTTPServer((ADDRESS, PORT), handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield
            finally:
                server.shutdown()
                thread.join()
    finally:
        for route in routes:
            shell.is_successful((*route, "delete", ADDRESS))
        shell.is_successful(("ip", "address", "delete", f"{ADDRESS}/32", "dev", "lo"))
