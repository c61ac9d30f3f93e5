"""The head node's file server for nodes in network namespaces: who may mount, users' numbers, root, and locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhub.storage.exports import Export, ExportList, format_firewall, format_ganesha_config
from tests.support import nfs_client
from tests.support.network_namespaces import Machines, machines

PORT = 2049
ADA, BEN = 20001, 20002


@pytest.fixture(scope="module")
def network() -> Iterator[Machines]:
    """A head node (0), two nodes, and a machine (3) that is none."""
    with machines("ghserve", "10.89.0", 4) as made:
        yield made


class FileServer:
    """nfs-ganesha on the head node, with gpuhub's configuration and packet filter."""

    def __init__(self, network: Machines, folder: Path) -> None:
        self._network, self._folder = network, folder
        self.home, self.datasets = folder / "home", folder / "datasets"
        for each in (self.home, self.datasets):
            each.mkdir()
        self.write_settings([1, 2])
        command = ("ganesha.nfsd", "-F", "-f", str(folder / "ganesha.conf"), "-L", str(folder / "log"))
        self.process = subprocess.Popen(network.enter(0, *command, "-p", str(folder / "pid")))

    def write_settings(self, nodes: list[int], *, filters: bool = True) -> None:
        """Export to these machines, and let only them through the packet filter."""
        exports = ExportList(
            exports=(
                Export(folder=str(self.home), is_writable=True),
                Export(folder=str(self.datasets), is_writable=False),
            ),
            clients=tuple(self._network.address(number) for number in nodes),
            port=PORT,
        )
        config = format_ganesha_config(exports, state=self._folder, bind=self._network.address(0))
        (self._folder / "ganesha.conf").write_text(config)
        rules = (
            format_firewall(exports, "ghtest")
            if filters
            else format_firewall(ExportList(exports=(), clients=(), port=PORT), "ghtest")
        )
        subprocess.run(self._network.enter(0, "nft", "-f", "-"), input=rules.encode(), check=True, timeout=30)

    def client(self, machine: int, uid: int, folder: Path, *words: str) -> list[str]:
        """Return the command of a client on a machine."""
        url = f"nfs://{self._network.address(0)}{folder}?version=4&uid={uid}&gid={uid}"
        return self._network.enter(machine, sys.executable, nfs_client.__file__, url, *words)

    def call(self, machine: int, uid: int, folder: Path, *words: str) -> str:
        """Return the word that a client prints."""
        done = subprocess.run(
            self.client(machine, uid, folder, *words), capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout.strip() or done.stderr

    def await_answer(self, machine: int, folder: Path, *, word: str) -> None:
        end = time.monotonic() + 60
        while (answer := self.call(machine, ADA, folder, "read", "/ready")) != word:
            assert time.monotonic() < end, f"{answer}\n{(self._folder / 'log').read_text()[-2000:]}"


@pytest.fixture(scope="module")
def server(network: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileServer]:
    running = FileServer(network, tmp_path_factory.mktemp("served"))
    (running.datasets / "ready").write_text("data")
    (running.home / "ready").write_text("")
    try:
        running.await_answer(1, running.datasets, word="ok")
        yield running
    finally:
        running.process.terminate()
        running.process.wait(30)


def make_home(server: FileServer, name: str, uid: int) -> Path:
    home = server.home / name
    home.mkdir(mode=0o700, exist_ok=True)
    os.chown(home, uid, uid)
    return home


def test_files_belong_to_their_users(server: FileServer) -> None:
    """The numbers of the containers' users count, on both nodes; nobody else reads a home."""
    home = make_home(server, "ada", ADA)
    assert server.call(1, ADA, server.home, "write", "/ada/notes", "mine") == "ok"
    status = (home / "notes").stat()
    assert (status.st_uid, status.st_gid, (home / "notes").read_text()) == (ADA, ADA, "mine")
    assert server.call(2, ADA, server.home, "read", "/ada/notes") == "ok"
    assert server.call(2, BEN, server.home, "read", "/ada/notes") == "EACCES"


def test_root_of_a_node_has_no_rights(server: FileServer) -> None:
    """root_squash: it reads no home, and can remove nothing."""
    home = make_home(server, "ada", ADA)
    (home / "key").write_text("secret")
    assert server.call(1, 0, server.home, "read", "/ada/key") == "EACCES"
    assert server.call(1, 0, server.home, "remove", "/ada/key") == "EACCES"
    assert server.call(1, 0, server.home, "write", "/rooted", "x") == "EACCES"
    assert (home / "key").read_text() == "secret"


def test_datasets_are_read_only(server: FileServer) -> None:
    """For every user, whatever the modes are."""
    server.datasets.chmod(0o777)
    assert server.call(1, ADA, server.datasets, "write", "/mine", "x") == "EROFS"
    assert server.call(2, ADA, server.datasets, "read", "/ready") == "ok"


def test_lock_of_one_node_holds_on_the_other(server: FileServer) -> None:
    """Until its holder dies and its lease has ended."""
    home = make_home(server, "ada", ADA)
    assert server.call(1, ADA, server.home, "write", "/ada/journal", "x") == "ok"
    command = server.client(1, ADA, server.home, "lock", "/ada/journal")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        # What libnfs makes of NFS4ERR_DENIED, which it does not know.
        assert server.call(2, ADA, server.home, "try", "/ada/journal") == "ERANGE"
        holder.kill()
    end = time.monotonic() + 120
    while (answer := server.call(2, ADA, server.home, "try", "/ada/journal")) != "locked":
        assert (answer, time.monotonic() < end) == ("ERANGE", True)
    assert (home / "journal").read_text() == "x"


def test_only_nodes_may_mount_and_a_new_node_may(server: FileServer, network: Machines) -> None:
    """A stranger is refused by the exports alone, and not even connected by the packet filter."""
    server.write_settings([1, 2], filters=False)
    assert server.call(3, ADA, server.home, "read", "/ready") not in {"ok", ""}
    server.write_settings([1, 2])
    connect = f"import socket; socket.create_connection(({network.address(0)!r}, {PORT}), 1)"
    command = network.enter(3, sys.executable, "-c", connect)
    assert b"TimeoutError" in subprocess.run(command, capture_output=True, check=False, timeout=30).stderr
    server.write_settings([1, 2, 3])
    server.process.send_signal(signal.SIGHUP)
    server.await_answer(3, server.home, word="ok")
    assert server.call(1, ADA, server.home, "read", "/ready") == "ok"
