"""A server at an address that the closet's nodes take for the internet."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpuhub_closet import shell

ADDRESS = "198.51.100.9"


@contextmanager
def served(closet: Any, port: int, handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[None]:
    """Serve HTTP at `ADDRESS` until the end of the block."""
    routes = [("ip", "-netns", closet.plan.netns_name(node), "route") for node in closet.plan.nodes]
    shell.run_command(("ip", "address", "replace", f"{ADDRESS}/32", "dev", "lo"))
    try:
        for route in routes:
            shell.run_command((*route, "replace", ADDRESS, "via", str(closet.plan.head)))
        with http.server.ThreadingHTTPServer((ADDRESS, port), handler) as server:
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
