"""The file server that `gpuhub up` starts where the kernel has none: supervised, and reloaded when nodes change."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuhub.common.paths import Paths
from gpuhub.config.machines.network import NetworkSettings
from gpuhub.config.machines.storage import serve_from
from gpuhub.config.settings import ClusterSettings, StorageSettings
from gpuhub.ops.deploy import file_server
from gpuhub.ops.deploy.file_server import FILE_SERVER, build_file_server, ensure_exports, find_export_problems
from gpuhub.ops.deploy.programs import Supervisor
from gpuhub.storage.probe import NfsServer, probe_server
from tests.support.docker.simulated_nodes import build_cluster, wait_until


@dataclass(frozen=True)
class Folders(Paths):
    """An instance with all of its folders in one."""

    root: Path = Path()

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def log(self) -> Path:
        return self.root / "log"


@pytest.fixture
def paths(tmp_path: Path) -> Folders:
    folders = Folders(root=tmp_path)
    for folder in (folders.state, folders.run, folders.log):
        folder.mkdir()
    return folders


@pytest.fixture
def supervisor(paths: Folders) -> Iterator[Supervisor]:
    running = Supervisor(paths)
    yield running
    running.shutdown()


def build(tmp_path: Path, port: int, *, nodes: int) -> ClusterSettings:
    cluster = build_cluster()
    home = f"{tmp_path}/home/{{username}}"
    storage = StorageSettings(serve=True, home=home, nfs_options=f"nfsvers=4.2,hard,port={port}")
    return cluster.model_copy(
        update={
            "nodes": cluster.nodes[:nodes],
            "storage": serve_from(storage, "127.0.0.1"),
            # The filter is tested in network namespaces.
            "network": NetworkSettings(guard=False),
        }
    )


def test_server_follows_the_settings(
    paths: Folders, supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers after the start, continues when a node is added, and ends when the head node serves no more."""
    monkeypatch.setattr(file_server, "has_kernel_server", lambda: False)
    monkeypatch.setattr(file_server, "find_head_address", lambda _cluster: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    two, three = (build(tmp_path, port, nodes=count) for count in (2, 3))
    supervisor.start(build_file_server(two, paths))
    ensure_exports(two, paths, supervisor)
    server = NfsServer(host="127.0.0.1", port=port, version=4)
    assert probe_server(server, 5.0) is None
    wait_until(lambda: supervisor.state(FILE_SERVER) == "RUNNING", "the server runs")
    pid = supervisor.pid(FILE_SERVER)
    assert find_export_problems(two, paths) == []
    assert find_export_problems(three, paths) == ["rig3 may not mount anything"]
    assert supervisor.start(build_file_server(three, paths)) == set()
    ensure_exports(three, paths, supervisor)
    assert (supervisor.pid(FILE_SERVER), supervisor.state(FILE_SERVER)) == (pid, "RUNNING")
    assert find_export_problems(three, paths) == []
    none = three.model_copy(update={"storage": StorageSettings()})
    supervisor.start(build_file_server(none, paths))
    ensure_exports(none, paths, supervisor)
    assert FILE_SERVER not in supervisor.states()
    assert (tmp_path / "home").is_dir()
