"""JupyterLab's files for browsers, which the hub serves once for all users: compressed, and kept by browsers.

`ops/images/lab_assets` copies them, and those of JupyterLab's extensions, out of the notebook image. While a notebook
starts, the waiting page has the browser fetch those that JupyterLab needs first; the notebook's own server then names
the hub's address for all of them.
"""

from __future__ import annotations

import json
import mimetypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tornado import web

#: File in the folder of JupyterLab's files: the current `LabAssets`.
CURRENT_FILE = "current.json"
#: The file that JupyterLab's page loads; it names all others by their content, so its hash is the key of all.
MAIN_FILE = re.compile(r"main\.([0-9a-f]{16})\.js")
#: Names that JupyterLab's build made from the content; such a file never changes.
_HASHED = re.compile(r"(?:.+\.)?[0-9a-f]{16,20}\.[a-z0-9]+")
#: Variables of notebooks; the notebook image's jupyter_server_config.py and gpu_launch.notebook_server read them.
URL_VARIABLE = "GPUHUB_LAB_URL"
EXTENSIONS_VARIABLE = "GPUHUB_LAB_EXTENSIONS"
_YEAR_S = 365 * 24 * 3600
#: Names of the scripts that JupyterLab loads until it is usable, one on a line; of the versions in the image's locks.
#: The first file of each extension is left out: all of them are loaded.
FIRST_FILES = Path(__file__).with_name("lab_first_files.txt")


@dataclass(frozen=True, kw_only=True)
class LabAssets:
    """The files of one image, in two folders named by keys."""

    #: The image's id.
    image: str | None
    #: JupyterLab's own files.
    key: str
    extensions_key: str
    #: The path of the file that JupyterLab loads first, by the extension's name; it contains a hash of the content.
    extensions: dict[str, str]

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of both folders."""
        return self.key, self.extensions_key


def read_current(folder: Path) -> LabAssets | None:
    """Return what was copied last; None where nothing was, or by another version of gpuhub.

    Args:
        folder: The folder of all versions.
    """
    try:
        return LabAssets(**json.loads((folder / CURRENT_FILE).read_text(encoding="utf-8")))
    except (FileNotFoundError, TypeError):
        return None


def build_notebook_variables(folder: Path) -> dict[str, str]:
    """Return the variables that tell a notebook's server where browsers find files that its own image has too."""
    current = read_current(folder)
    if current is None:
        return {URL_VARIABLE: "", EXTENSIONS_VARIABLE: ""}
    extensions = {"url": _build_url(current.extensions_key), "load": current.extensions}
    return {URL_VARIABLE: _build_url(current.key), EXTENSIONS_VARIABLE: json.dumps(extensions)}


def list_first_urls(folder: Path) -> list[str]:
    """Return the paths at the hub of the files that JupyterLab loads at its start, as it asks for them."""
    current = read_current(folder)
    if current is None:
        return []
    url = _build_url(current.extensions_key)
    return [f"{url}/{name}/{path}" for name, path in current.extensions.items()] + [
        f"{_build_url(key)}/{path}?v={path.split('.')[-2]}"
        for key in current.keys
        for path in _find_first_files(folder / key)
    ]


def _build_url(key: str) -> str:
    return f"/hub/gpuhub/lab/{key}"


@cache
def _find_first_files(folder: Path) -> tuple[str, ...]:
    wanted = set(FIRST_FILES.read_text(encoding="utf-8").split())
    return tuple(sorted(str(file.relative_to(folder)) for file in folder.rglob("*.js") if file.name in wanted))


class LabAssetsHandler(web.StaticFileHandler):
    """GET: one file, for anybody: they are JupyterLab's own."""

    PATH = r"/gpuhub/lab/([0-9a-f]{16}(?:/[A-Za-z0-9@._-]+)+)"

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
