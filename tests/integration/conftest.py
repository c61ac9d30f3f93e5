"""The practice closet that integration tests share: three nodes with real Docker daemons, instance `ghtest`."""

from __future__ import annotations

import _ctypes
import _ssl
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import docker
import pynvml
import pytest

from gpuhub.closet import cluster_file, lifecycle
from gpuhub.closet.places import node_places
from gpuhub.closet.plan import ClosetNode, Plan, practice_plan
from gpuhub.paths import Paths
from tests.support.local_cluster import PYTHON, LocalBroker, Notebook
from tests.support.machines import Machine, make_key, ssh_agent, ssh_machine

INSTANCE = os.environ.get("GPUHUB_TEST_INSTANCE", "ghtest")
TINY_PROGRAMS = ("dash", "cat", "ls", "grep", "sleep", "id", "hostname")
_UNNEEDED = ("test", "idlelib", "ensurepip", "tkinter", "lib2to3", "pydoc_data", "dist-packages", "__pycache__")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the closet are in a lane of their own, see tests/run."""
    for item in items:
        if "closet" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.closet)


@dataclass(frozen=True, slots=True)
class Closet:
    """A running closet."""

    plan: Plan
    paths: Paths
    #: An ordinary cluster.toml for it.
    cluster_file: Path

    def client(self, node: ClosetNode | str) -> docker.DockerClient:
        """A new Docker client of a node; close it after use."""
        return docker.DockerClient(base_url=node_places(self.paths, node).docker_url, version="auto", timeout=60)


@pytest.fixture(scope="session")
def interpreter() -> str:
    """What runs notebooks and workers on this machine itself."""
    probe = subprocess.run([PYTHON, "-c", "import torch, gpu_launch"], check=False, capture_output=True, text=True)
    assert probe.returncode == 0, f"{PYTHON} lacks torch or gpu_launch; set GPU_LAUNCH_TEST_PYTHON.\n{probe.stderr}"
    return PYTHON


@pytest.fixture
def notebook(tmp_path: Path, interpreter: str) -> Iterator[Notebook]:
    """A home with a broker of its own, and no containers."""
    broker = LocalBroker(tmp_path)
    yield Notebook(broker)
    broker.close()


@pytest.fixture(params=["forked", "torchrun"])
def either(notebook: Notebook, request: pytest.FixtureRequest) -> Notebook:
    """A notebook whose ranks are started one way or the other: what a script sees is the same."""
    notebook.is_cold = request.param == "torchrun"
    return notebook


@pytest.fixture(scope="session")
def closet() -> Iterator[Closet]:
    """Three nodes, up for the whole session; nothing but images may be left of them afterwards."""
    plan, paths = practice_plan(INSTANCE), Paths(INSTANCE)
    lifecycle.ensure_down(plan, paths)
    lifecycle.ensure_up(plan, paths)
    try:
        yield Closet(plan, paths, cluster_file.write_cluster_file(plan, paths))
    finally:
        lifecycle.ensure_down(plan, paths)
    assert lifecycle.leftovers(plan, paths) == []


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The administrator's key, and an agent that holds it."""
    key = tmp_path_factory.mktemp("admin") / "id"
    make_key(key)
    with ssh_agent(key) as place:
        yield key, place


@pytest.fixture
def rig3(closet: Closet, agent: tuple[Path, str], tmp_path: Path) -> Iterator[Machine]:
    """The third node, reached over SSH."""
    node = closet.plan.node("rig3")
    folder = node_places(closet.paths, node).run
    with ssh_machine(closet.plan.netns(node), str(node.address), folder, tmp_path / "rig3", agent[0]) as machine:
        yield machine


@pytest.fixture(scope="session")
def tiny_image(closet: Closet) -> str:
    """A small image on every node, made of this machine's own files: a shell, Python and NVIDIA's package for it."""
    name = f"{INSTANCE}/tiny:{sysconfig.get_python_version()}-tls"
    content = b""
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            if not client.images.list(name):
                content = content or tiny_root()
                client.api.import_image_from_data(content, repository=name.split(":")[0], tag=name.split(":")[1])
    return name


def tiny_root() -> bytes:
    """The root file system of the tiny image as a tar archive."""
    standard = Path(sysconfig.get_path("stdlib"))
    python = Path(sys.executable).resolve()
    programs = [python, *(Path("/usr/bin") / name for name in TINY_PROGRAMS)]
    binaries = [*programs, Path(_ctypes.__file__), Path(_ssl.__file__)]
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", dereference=True) as tar:
        for name, target in {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}.items():
            _add_link(tar, name, target)
        for folder in ("dev", "etc", "proc", "sys", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for file in sorted({*programs, *_libraries(binaries)}):
            tar.add(file, arcname=_under_usr(file))
        tar.add(standard, arcname=_under_usr(standard), filter=_needed)
        tar.add(pynvml.__file__, arcname=f"{_under_usr(standard)}/pynvml.py")
        _add_link(tar, "usr/bin/sh", "dash")
        if python.name != "python3":
            _add_link(tar, "usr/bin/python3", python.name)
    return output.getvalue()


def _libraries(binaries: list[Path]) -> set[Path]:
    listed = subprocess.run(["ldd", *map(str, binaries)], check=False, capture_output=True, text=True).stdout
    words = (word for line in listed.splitlines() if not line.endswith(":") for word in line.split())
    return {Path(word) for word in words if word.startswith("/")}


def _under_usr(path: Path) -> str:
    text = os.fspath(path).lstrip("/")
    return text if text.startswith("usr/") else f"usr/{text}"


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = entry.name.split("/")
    return None if any(part in _UNNEEDED or part.startswith("config-") for part in parts) else entry


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)
