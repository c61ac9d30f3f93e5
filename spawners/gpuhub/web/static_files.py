"""Scripts and style sheets of the pages as files, which a strict `Content-Security-Policy` allows."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from tornado import web

STATIC = Path(__file__).with_name("static")
_YEAR_S = 365 * 86400


@functools.cache
def _find_version() -> str:
    """Return a digest of all files, so that browsers keep them until one changes."""
    digest = hashlib.sha256()
    for file in sorted(file for file in STATIC.iterdir() if file.suffix in {".js", ".css"}):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def find_static_url(base_url: str) -> str:
    """Return the folder of the files as browsers reach it; `base_url` is the hub's."""
    return f"{base_url}gpuhub/static/{_find_version()}/"


class StaticFilesHandler(web.StaticFileHandler):
    """GET: one file, for anybody: they are the same for all."""

    PATH = r"/gpuhub/static/[0-9a-f]{16}/([a-z_]+\.(?:js|css))"

    def get_cache_time(self, path: str, modified: object, mime_type: str) -> int:
        """Return for how long browsers need not ask again, seconds: the address has the version."""
        return _YEAR_S

    def set_extra_headers(self, path: str) -> None:
        """Let browsers and proxies keep the file."""
        self.set_header("Cache-Control", f"public, max-age={_YEAR_S}, immutable")
        self.set_header("X-Content-Type-Options", "nosniff")
