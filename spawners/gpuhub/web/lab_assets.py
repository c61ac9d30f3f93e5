"""JupyterLab's files for browsers, which the hub serves once for all users: compressed, and kept by browsers.

`ops/images/lab_assets` copies them out of the notebook image. While a notebook starts, the waiting page has the browser
fetch those that JupyterLab needs first; the notebook's own server then names the hub's address for all of them.
"""

from __future__ import annotations

import json
import mimetypes
import re
from functools import cache
from pathlib import Path

from tornado import web

#: In the folder of the files: the image that they were copied from, and their key.
CURRENT_FILE = "current.json"
#: The file that JupyterLab's page loads; it names all others by their content, so its hash is the key of all.
MAIN_FILE = re.compile(r"main\.([0-9a-f]{16})\.js")
#: Names that JupyterLab's build made from the content; such a file never changes.
_HASHED = re.compile(r"(?:.+\.)?[0-9a-f]{16}\.[a-z0-9]+")
_YEAR_S = 365 * 24 * 3600
#: Names of the scripts that JupyterLab loads until it is usable, one on a line; of the version in the image's lock.
FIRST_FILES = Path(__file__).with_name("lab_first_files.txt")


def find_url(folder: Path) -> str:
    """Return the path at the hub below which browsers find the current files; empty where there are none.

    Args:
        folder: The folder of all versions.
    """
    try:
        key = json.loads((folder / CURRENT_FILE).read_text(encoding="utf-8"))["key"]
    except FileNotFoundError:
        return ""
    return f"/hub/gpuhub/lab/{key}"


def list_first_urls(folder: Path) -> list[str]:
    """Return the paths at the hub of the files that JupyterLab loads at its start, as it asks for them."""
    url = find_url(folder)
    names = _find_first_files(folder / url.rpartition("/")[2]) if url else ()
    return [f"{url}/{name}?v={name.split('.')[-2]}" for name in names]


@cache
def _find_first_files(folder: Path) -> tuple[str, ...]:
    wanted = set(FIRST_FILES.read_text(encoding="utf-8").split())
    return tuple(sorted(file.name for file in folder.iterdir() if file.name in wanted))


class LabAssetsHandler(web.StaticFileHandler):
    """GET: one file, for anybody: they are JupyterLab's own."""

    PATH = r"/gpuhub/lab/([0-9a-f]{16}/[A-Za-z0-9._-]+)"

    def parse_url_path(self, url_path: str) -> str:
        """Return the path of the compressed file if there is one that the browser accepts, else of the file itself."""
        self.set_header("Vary", "Accept-Encoding")
        accepted = self.request.headers.get("Accept-Encoding", "").split(",")
        is_accepted = any(part.partition(";")[0].strip() == "gzip" for part in accepted)
        if not is_accepted or not Path(self.root, f"{url_path}.gz").is_file():
            return url_path
        self.set_header("Content-Encoding", "gzip")
        return f"{url_path}.gz"

    def get_content_type(self) -> str:
        """Return the type of the file, whether or not it is sent compressed."""
        kind, _ = mimetypes.guess_type(self.path.removesuffix(".gz"))
        return kind or "application/octet-stream"

    def get_cache_time(self, path: str, modified: object, mime_type: str) -> int:
        """Return for how long browsers need not ask again, seconds."""
        return _YEAR_S if _HASHED.fullmatch(path.rpartition("/")[2].removesuffix(".gz")) else 0

    def set_extra_headers(self, path: str) -> None:
        """Let browsers and proxies keep what never changes, and ask for the rest."""
        is_fixed = self.get_cache_time(path, None, "") > 0
        self.set_header("Cache-Control", f"public, max-age={_YEAR_S}, immutable" if is_fixed else "no-cache")
        self.set_header("X-Content-Type-Options", "nosniff")
