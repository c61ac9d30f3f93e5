"""JupyterLab's files: copied out of an image, served by the hub, and kept by browsers."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tornado import web
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port

from gpuhub.common.errors import SetupError
from gpuhub.ops.images.lab_assets import KEPT_VERSIONS, STATIC_FOLDER, ensure_lab_assets
from gpuhub.web import lab_assets
from gpuhub.web.lab_assets import LabAssetsHandler

KEY = "efd36b46f3b45eb8"
CORE = "jlab_core.8811dd2733d03721.js"
FONT = "0031b1860ea4ad75.woff"
EXTENSION = "remoteEntry.c8c9eed2cdefdeac.js"
CHUNK = "7.2a0ce575775f5aad.js"
PACKAGE = {"name": "@jupyter-widgets/manager", "jupyterlab": {"_build": {"load": f"static/{EXTENSION}"}}}


class Daemon:
    """A Docker daemon with one image of JupyterLab."""

    def __init__(self, key: str = KEY, **files: bytes) -> None:
        self.id = f"sha256:{key}"
        self.files = {
            f"main.{key}.js": b"main",
            CORE: b"core();" * 1000,
            FONT: b"font" * 1000,
            "style.js": b"s",
        } | files
        self.extensions = {
            "@jupyter-widgets/manager/package.json": json.dumps(PACKAGE).encode(),
            f"@jupyter-widgets/manager/static/{EXTENSION}": b"entry();" * 1000,
            f"@jupyter-widgets/manager/static/{CHUNK}": b"chunk",
        }
        self.containers: set[str] = set()
        self.copied = 0

    def inspect_image(self, _name: str) -> dict[str, Any]:
        return {"Id": self.id}

    def create_container(self, *_arguments: Any, **_options: Any) -> dict[str, str]:
        self.containers.add("c")
        return {"Id": "c"}

    def remove_container(self, name: str, *, force: bool) -> None:
        self.containers.remove(name)

    def get_archive(self, _container: str, path: str) -> tuple[Any, Any]:
        self.copied += path == STATIC_FOLDER
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            folder = tarfile.TarInfo(Path(path).name)
            folder.type = tarfile.DIRTYPE
            folder.mode = 0o755
            archive.addfile(folder)
            files = self.files if path == STATIC_FOLDER else self.extensions
            for name, content in files.items():
                info = tarfile.TarInfo(f"{Path(path).name}/{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        text = buffer.getvalue()
        return iter([text[:700], text[700:]]), {}


def read_url(folder: Path) -> str:
    """Return what a notebook is told of JupyterLab's own files."""
    return lab_assets.build_notebook_variables(folder)["GPUHUB_LAB_URL"]


def read_extensions(folder: Path) -> dict[str, Any]:
    """Return what a notebook is told of the extensions."""
    return json.loads(lab_assets.build_notebook_variables(folder)["GPUHUB_LAB_EXTENSIONS"])


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = web.Application([("/hub" + LabAssetsHandler.PATH, LabAssetsHandler, {"path": str(folder)})])
    server = HTTPServer(app)
    sock, port = bind_unused_port()
    server.add_socket(sock)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield client
    finally:
        server.stop()
        await server.close_all_connections()


def test_files_are_copied_once_for_an_image(tmp_path: Path) -> None:
    """An update of the image with the same JupyterLab keeps the address; no container stays."""
    daemon = Daemon()
    for _ in range(2):
        ensure_lab_assets(daemon, "gpuhub/notebook:1", tmp_path)
    assert daemon.copied == 1
    daemon.id = "sha256:other"
    ensure_lab_assets(daemon, "gpuhub/notebook:2", tmp_path)
    assert daemon.copied == 2
    assert read_url(tmp_path) == f"/hub/gpuhub/lab/{KEY}"
    assert gzip.decompress((tmp_path / KEY / f"{CORE}.gz").read_bytes()) == b"core();" * 1000
    assert not (tmp_path / KEY / f"{FONT}.gz").exists()
    assert daemon.containers == set()
    key = read_extensions(tmp_path)["url"].rpartition("/")[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["current.json", KEY, key])


def test_changed_extension_has_another_address(tmp_path: Path) -> None:
    """Also with the same JupyterLab; notebooks compare the names of the files with those of their image."""
    daemon = Daemon()
    ensure_lab_assets(daemon, "gpuhub/notebook:1", tmp_path)
    first = read_extensions(tmp_path)
    assert first["load"] == {"@jupyter-widgets/manager": f"static/{EXTENSION}"}
    daemon.id = "sha256:other"
    daemon.extensions[f"@jupyter-widgets/manager/static/{CHUNK}"] = b"changed"
    ensure_lab_assets(daemon, "gpuhub/notebook:2", tmp_path)
    assert read_extensions(tmp_path)["url"] != first["url"]
    assert read_url(tmp_path) == f"/hub/gpuhub/lab/{KEY}"


def test_files_of_an_earlier_version_of_gpuhub_are_copied_again(tmp_path: Path) -> None:
    (tmp_path / "current.json").write_text(json.dumps({"image": f"sha256:{KEY}", "key": KEY}))
    assert read_url(tmp_path) == ""
    ensure_lab_assets(Daemon(), "gpuhub/notebook:1", tmp_path)
    assert read_url(tmp_path) == f"/hub/gpuhub/lab/{KEY}"


def test_earlier_versions_are_kept_for_running_notebooks(tmp_path: Path) -> None:
    """The latest few."""
    for number in range(KEPT_VERSIONS + 2):
        ensure_lab_assets(Daemon(f"{number:016x}"), "gpuhub/notebook:1", tmp_path)
    kept = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    extensions = read_extensions(tmp_path)["url"].rpartition("/")[2]
    assert len(kept) == KEPT_VERSIONS + 1
    assert extensions in kept
    assert f"{KEPT_VERSIONS + 1:016x}" in kept


def test_image_without_jupyterlab_is_refused(tmp_path: Path) -> None:
    daemon = Daemon()
    daemon.files = {"main.js": b""}
    with pytest.raises(SetupError, match=r"gpuhub/notebook:1 has 0 files main\.HASH\.js"):
        ensure_lab_assets(daemon, "gpuhub/notebook:1", tmp_path)
    assert daemon.containers == set()
    assert read_url(tmp_path) == ""


async def test_browsers_keep_what_never_changes(tmp_path: Path) -> None:
    """Compressed where they accept it; a file without a hash in its name is asked for each time."""
    ensure_lab_assets(Daemon(), "gpuhub/notebook:1", tmp_path)
    url = read_url(tmp_path)
    async with served(tmp_path) as client:
        core = await client.get(f"{url}/{CORE}")
        assert (core.text, core.headers["content-encoding"]) == ("core();" * 1000, "gzip")
        assert int(core.headers["content-length"]) < 200
        assert core.headers["content-type"].startswith("text/javascript")
        assert core.headers["cache-control"] == "public, max-age=31536000, immutable"
        plain = await client.get(f"{url}/{CORE}", headers={"Accept-Encoding": "identity"})
        assert (plain.text, plain.headers.get("content-encoding")) == ("core();" * 1000, None)
        assert plain.headers["vary"] == core.headers["vary"] == "Accept-Encoding"
        style = await client.get(f"{url}/style.js")
        assert style.headers["cache-control"] == "no-cache"
        entry = await client.get(f"{read_extensions(tmp_path)['url']}/@jupyter-widgets/manager/static/{EXTENSION}")
        assert (entry.text, entry.headers["content-encoding"]) == ("entry();" * 1000, "gzip")
        assert entry.headers["cache-control"] == core.headers["cache-control"]


@pytest.mark.parametrize(
    "path", ["current.json", f"{KEY}/../current.json", f"{KEY}/%2e%2e/current.json", f"{KEY}/none.js"]
)
async def test_nothing_else_is_served(tmp_path: Path, path: str) -> None:
    ensure_lab_assets(Daemon(), "gpuhub/notebook:1", tmp_path)
    async with served(tmp_path) as client:
        assert (await client.get(f"/hub/gpuhub/lab/{path}")).status_code == 404


def test_first_files_are_those_that_the_version_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list may be of another JupyterLab; compressed copies have no address of their own."""
    names = tmp_path / "names.txt"
    names.write_text(f"{CORE}\n{CHUNK}\nold.0000000000000000.js\n")
    monkeypatch.setattr(lab_assets, "FIRST_FILES", names)
    folder = tmp_path / "lab"
    assert lab_assets.list_first_urls(folder) == []
    ensure_lab_assets(Daemon(), "gpuhub/notebook:1", folder)
    extension = f"{read_extensions(folder)['url']}/@jupyter-widgets/manager/static"
    assert lab_assets.list_first_urls(folder) == [
        f"{extension}/{EXTENSION}",
        f"/hub/gpuhub/lab/{KEY}/{CORE}?v=8811dd2733d03721",
        f"{extension}/{CHUNK}?v=2a0ce575775f5aad",
    ]
    assert json.loads((folder / "current.json").read_text())["key"] == KEY
