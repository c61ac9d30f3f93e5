"""An index of Python packages with one package."""

from __future__ import annotations

import http.server
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.closet import internet

PACKAGE = "tinything"
PORT = 8099
URL = f"http://{internet.ADDRESS}:{PORT}/simple/"


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
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with internet.served(closet, PORT, handler):
        yield
