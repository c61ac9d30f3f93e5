"""The wheel of gpu-launch that the hub serves, built by pip and installed by pip over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from tornado import web

from gpuhub.ops.images.build_plan import read_tree
from gpuhub.ops.images.wheels import ensure_laptop_wheel
from gpuhub.web.handlers import LaptopWheelHandler

SOURCE = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the wheel of this clone."""
    made = tmp_path_factory.mktemp("laptop") / "laptop-wheel"
    ensure_laptop_wheel(SOURCE, made, lambda _step: None)
    yield made


def test_the_wheel_has_the_version_and_command_of_this_clone(folder: Path) -> None:
    """The wheel is the complete distribution of extensions/."""
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"gpu_launch-{version('gpu-launch')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        sources = {f"gpu_launch/{name}" for name in read_tree(SOURCE / "extensions" / "gpu_launch")}
        assert "gpu_launch/recipes/files/finetune.yaml" in sources
        assert sources - set(archive.namelist()) == set()
        (points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "gpu-launch = gpu_launch.cli.main:main" in archive.read(points).decode()


def test_wheel_is_rebuilt_only_if_the_sources_change(folder: Path, tmp_path: Path) -> None:
    """A second start of the hub builds nothing; a change of the sources does."""
    (wheel,) = folder.glob("*.whl")
    built_at = wheel.stat().st_mtime_ns
    assert ensure_laptop_wheel(SOURCE, folder, lambda _step: None).stat().st_mtime_ns == built_at
    (folder / "sources.sha256").write_text("of older sources")
    assert ensure_laptop_wheel(SOURCE, folder, lambda _step: None).stat().st_mtime_ns > built_at
    assert sorted(file.name for file in folder.iterdir()) == [wheel.name, "sources.sha256"]


def status_of(port: int, path: str) -> int:
    """Return the status of a GET, with the path sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


async def test_pip_installs_the_wheel_from_the_hub(folder: Path, tmp_path: Path) -> None:
    """No session or token is needed, and nothing else in the folder is served."""
    app = web.Application([(LaptopWheelHandler.PATH, LaptopWheelHandler, {"path": str(folder)})])
    server = app.listen(0, address="127.0.0.1")
    port = next(iter(server._sockets.values())).getsockname()[1]
    site = tmp_path / "site"
    try:
        url = f"http://127.0.0.1:{port}/gpuhub/gpu_launch-{version('gpu-launch')}-py3-none-any.whl"
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, url]
        done = await asyncio.to_thread(subprocess.run, pip, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert await asyncio.to_thread((site / "gpu_launch" / "cli" / "main.py").exists)
        for other in ("sources.sha256", "gpu_launch-0.0.1-py3-none-any.whl", "../laptop-wheel/sources.sha256"):
            assert await asyncio.to_thread(status_of, port, f"/gpuhub/{other}") == 404, other
    finally:
        server.stop()
