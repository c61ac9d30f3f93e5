"""The head node's exports follow cluster.toml: with the kernel's server, whose commands are recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.machines.network import NetworkSettings
from gpuhub.config.machines.storage import serve_from
from gpuhub.config.settings import ClusterSettings, StorageSettings
from gpuhub.ops.deploy import file_server
from gpuhub.ops.deploy.file_server import ensure_exports, find_export_problems
from gpuhub.ops.deploy.programs import Supervisor
from tests.support.docker.simulated_nodes import build_cluster


@dataclass(frozen=True)
class Folders(Paths):
    """An instance with its state in another folder."""

    root: Path = Path()

    @property
    def state(self) -> Path:
        return self.root


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose kernel serves, and answers at once."""
    monkeypatch.setattr(file_server, "has_kernel_server", lambda: True)
    monkeypatch.setattr(file_server, "probe_server", lambda _server, _limit: None)
    monkeypatch.setattr(file_server, "find_head_address", lambda _cluster: "127.0.0.1")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/sbin/{name}")


class Head:
    """A head node with its commands recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, Folders(root=folder)
        self.file = folder / "exports.d" / "gpuhub.exports"
        self.commands: list[tuple[str, ...]] = []
        self.scripts: list[str] = []

    def cluster(self, *, serve: bool = True, nodes: int = 3, guard: bool = True) -> ClusterSettings:
        cluster = build_cluster()
        home, data = f"{self.folder}/home/{{username}}", f"{self.folder}/data"
        storage = serve_from(StorageSettings(serve=True, home=home, datasets=data), "127.0.0.1")
        return cluster.model_copy(
            update={
                "nodes": cluster.nodes[:nodes],
                "storage": storage if serve else StorageSettings(),
                "network": NetworkSettings(guard=guard),
            }
        )

    def apply(self, cluster: ClusterSettings) -> list[tuple[str, ...]]:
        """Apply the settings, and return the commands."""
        self.commands.clear()

        def run(command: list[str], text: str) -> None:
            self.commands.append(tuple(command))
            self.scripts.append(text)

        ensure_exports(cluster, self.paths, Supervisor(self.paths), exports_file=self.file, run=run)
        return list(self.commands)


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path)


NFT, EXPORTFS = ("nft", "-f", "-"), ("exportfs", "-ra")


def test_exports_follow_the_nodes(head: Head) -> None:
    """Folders are made once; the server reads its exports again when a node comes or goes, and only then."""
    assert head.apply(head.cluster()) == [NFT, EXPORTFS]
    assert "127.0.1.3(rw" in head.file.read_text()
    assert ((head.folder / "home").is_dir(), (head.folder / "data").is_dir()) == (True, True)
    assert head.apply(head.cluster()) == [NFT]
    assert head.apply(head.cluster(nodes=2)) == [NFT, EXPORTFS]
    assert "127.0.1.3" not in head.file.read_text()
    assert "127.0.1.3" not in head.scripts[-2]


def test_end_of_serving_removes_what_gpuhub_made(head: Head) -> None:
    """Exports and filter go once, users' files stay; a machine that never served runs no command."""
    assert head.apply(head.cluster(serve=False)) == []
    head.apply(head.cluster())
    assert head.apply(head.cluster(serve=False)) == [NFT, EXPORTFS]
    assert head.scripts[-2].splitlines()[-1].startswith("delete table inet gpuhub_")
    assert (head.file.exists(), (head.folder / "home").is_dir()) == (False, True)
    assert head.apply(head.cluster(serve=False)) == []


def test_no_packet_filter_without_guard(head: Head) -> None:
    """As on the nodes; one that was there is removed."""
    assert head.apply(head.cluster(guard=False)) == [EXPORTFS]
    head.apply(head.cluster())
    assert head.apply(head.cluster(guard=False)) == [NFT]


def test_files_of_others_are_not_replaced(head: Head) -> None:
    """The administrator's own exports stay."""
    head.file.parent.mkdir()
    head.file.write_text("/srv *(ro)\n")
    with pytest.raises(SetupError, match="was not written by gpuhub"):
        head.apply(head.cluster())
    assert head.file.read_text() == "/srv *(ro)\n"


def test_doctor_names_missing_exports(head: Head) -> None:
    """Nothing exported, a node that was added by hand, a folder that moved, and other lines."""
    three = head.cluster()

    def problems(cluster: ClusterSettings) -> list[str]:
        return find_export_problems(cluster, head.paths, head.file)

    assert problems(three) == [f"nothing is exported: {head.file} does not exist"]
    head.apply(head.cluster(nodes=2))
    assert problems(three) == ["rig3 may not mount anything"]
    moved = three.storage.model_copy(update={"datasets": "nfs://127.0.0.1/elsewhere"})
    head.apply(three)
    assert problems(three.model_copy(update={"storage": moved})) == ["/elsewhere is not exported"]
    head.file.write_text(head.file.read_text() + "/tmp *(rw)\n")
    assert problems(three) == [f"{head.file} is not as the settings say"]
    assert problems(head.cluster(serve=False)) == []


def test_server_that_does_not_answer_is_an_error(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that starts it."""
    monkeypatch.setattr(file_server, "_READY_S", 0.0)
    monkeypatch.setattr(file_server, "probe_server", lambda _server, _limit: "The file server does not answer")
    with pytest.raises(SetupError, match=r"does not answer\. With the kernel's server: `systemctl enable --now nfs-"):
        head.apply(head.cluster())


def test_machine_without_a_server_is_refused(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts, with both packages."""
    monkeypatch.setattr(file_server, "has_kernel_server", lambda: False)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(SetupError, match=r"no NFS server: .*nfs-kernel-server.*nfs-ganesha-vfs"):
        file_server.build_file_server(head.cluster(), head.paths)
    assert file_server.build_file_server(head.cluster(serve=False), head.paths) == []
