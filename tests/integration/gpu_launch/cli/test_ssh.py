"""OpenSSH's own client and rsync, through `gpu-launch ssh-proxy`, against the sshd of an ordinary user."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpu_launch.cli import main
from tests.support.hub.fake_hub import TOKEN, FakeHub, served
from tests.support.hub.ssh_server import UID, USER, SshServer, served_ssh
from tests.support.product import wait_for

pytestmark = pytest.mark.root


@dataclass(frozen=True)
class Laptop:
    """A laptop with OpenSSH's client and a logged-in gpu-launch."""

    folder: Path
    hub: FakeHub
    server: SshServer

    @property
    def settings(self) -> Path:
        return self.folder / "config/gpu-launch/ssh/gpuhub"

    def environ(self) -> dict[str, str]:
        return os.environ | {
            "HOME": str(self.folder),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "GPUHUB_URL": self.hub.url,
            "GPUHUB_TOKEN": TOKEN,
            "PYTHONPATH": os.pathsep.join([str(Path(main.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        }

    def run(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(words, input=stdin, capture_output=True, env=self.environ(), timeout=60, check=False)

    def ssh(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return self.run("ssh", "-F", str(self.settings / "config"), *words, stdin=stdin)

    def succeed(self, *words: str, stdin: bytes = b"") -> str:
        done = self.ssh(*words, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    """A laptop on which `gpu-launch ssh-config` has run."""
    folder = tmp_path_factory.mktemp("laptop")
    with served_ssh() as server, served(FakeHub(home=server.home)) as hub:
        hub.add_server("", url=server.url)
        hub.add_server("big", url=server.url)
        laptop = Laptop(folder, hub, server)
        done = laptop.run("python", "-m", "gpu_launch.cli.main", "--hub", hub.url, "ssh-config")
        assert done.returncode == 0, done.stderr.decode()
        yield laptop


def test_command_has_its_streams_and_exit_status(laptop: Laptop) -> None:
    """stdin, stdout and stderr are apart, and the exit status is the command's."""
    done = laptop.ssh("gpuhub", "cat; echo problem >&2; exit 7", stdin=b"typed\x00\xff")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"typed\x00\xff", b"problem\n")
    assert laptop.succeed("gpuhub-big", "echo there") == "there\n"


def test_session_is_the_users_without_rights(laptop: Laptop) -> None:
    """It runs as the user, without a capability and without a way to get one."""
    shown = laptop.succeed("gpuhub", "id -un; id -u; id -g; cat /proc/self/status")
    assert shown.splitlines()[:3] == [USER, str(UID), str(UID)]
    status = dict(line.split(":\t", 1) for line in shown.splitlines()[3:] if ":\t" in line)
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Groups"].strip()) == ("1", "")


def test_variables_are_those_of_the_container(laptop: Laptop) -> None:
    """The server's variables arrive unchanged, with all characters but line breaks; the terminal's own stay."""
    shown = laptop.succeed("gpuhub", "printenv ODD GPUHUB_NODE HOME; printenv LINES_2 || echo none; pwd")
    assert shown.splitlines() == [
        'a "b" \\c $HOME # d',
        "rig1",
        str(laptop.server.home),
        "none",
        str(laptop.server.home),
    ]


def test_terminal(laptop: Laptop) -> None:
    """`ssh -tt` gets a terminal with the client's TERM, and a login shell without a command."""
    shown = laptop.succeed("-tt", "gpuhub", stdin=b"tty; echo it is $TERM; exit\n")
    assert "/dev/pts/" in shown
    assert f"it is {os.environ.get('TERM', '')}" in shown


def test_files_by_scp_sftp_and_rsync(laptop: Laptop, tmp_path: Path) -> None:
    """Files arrive whole in both directions, and rsync sends only what changed."""
    data = os.urandom(30_000_000)
    (tmp_path / "data.bin").write_bytes(data)
    config = str(laptop.settings / "config")
    assert laptop.run("scp", "-F", config, str(tmp_path / "data.bin"), "gpuhub:sent.bin").returncode == 0
    sent = laptop.server.home / "sent.bin"
    assert (sent.read_bytes() == data, sent.stat().st_uid) == (True, UID)
    assert laptop.run("scp", "-F", config, "gpuhub:sent.bin", str(tmp_path / "back.bin")).returncode == 0
    assert hashlib.sha256((tmp_path / "back.bin").read_bytes()).digest() == hashlib.sha256(data).digest()
    batch = tmp_path / "batch"
    batch.write_text(f"mkdir by-sftp\nput {tmp_path / 'batch'} by-sftp/batch\nls by-sftp\n")
    listed = laptop.run("sftp", "-F", config, "-b", str(batch), "gpuhub")
    assert b"by-sftp/batch" in listed.stdout, listed.stderr
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "large.bin").write_bytes(data)
    rsync = ("rsync", "-a", "--stats", "-e", f"ssh -F {config}", f"{folder}/", "gpuhub:code/")
    assert laptop.run(*rsync).returncode == 0
    (folder / "train.py").write_text("print(22)\n")
    again = laptop.run(*rsync).stdout.decode()
    assert "Number of regular files transferred: 1\n" in again
    assert (laptop.server.home / "code/train.py").read_text() == "print(22)\n"


def test_local_port_forwarding(laptop: Laptop, tmp_path: Path) -> None:
    """-L reaches a port in the container; -R, which would listen there, is refused."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(connection.recv(100).upper())

        threading.Thread(target=answer, daemon=True).start()
        local = tmp_path / "forwarded"
        command = ["ssh", "-F", str(laptop.settings / "config"), "-N", "-o", "ExitOnForwardFailure=yes"]
        with subprocess.Popen([*command, "-L", f"{local}:127.0.0.1:{port}", "gpuhub"], env=laptop.environ()) as client:
            try:
                wait_for(local.exists, "the port is forwarded")
                with socket.socket(socket.AF_UNIX) as forwarded:
                    forwarded.connect(str(local))
                    forwarded.sendall(b"hello")
                    assert forwarded.recv(100) == b"HELLO"
            finally:
                client.terminate()
    refused = laptop.run(*command, "-R", "0:127.0.0.1:1", "gpuhub")
    assert refused.returncode == 255
    assert b"remote port forwarding failed" in refused.stderr


def test_dynamic_port_forwarding(laptop: Laptop) -> None:
    """-D, with which VS Code reaches its server, connects from the container to the address that the client names."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as reserved:
        port, proxy = listening.getsockname()[1], reserved.getsockname()[1]
        reserved.close()
        command = ["ssh", "-F", str(laptop.settings / "config"), "-D", f"127.0.0.1:{proxy}", "gpuhub", "echo on; cat"]
        with subprocess.Popen(command, env=laptop.environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"on\n"
            with socket.create_connection(("127.0.0.1", proxy), timeout=20) as forwarded:
                # SOCKS 5 (RFC 1928): no authentication, then CONNECT to an IPv4 address.
                forwarded.sendall(b"\x05\x01\x00")
                assert forwarded.recv(2) == b"\x05\x00"
                forwarded.sendall(b"\x05\x01\x00\x01" + socket.inet_aton("127.0.0.1") + port.to_bytes(2))
                assert forwarded.recv(10)[:2] == b"\x05\x00"
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(b"hello")
                    assert forwarded.recv(100) == b"hello"


def test_sshd_ends_with_its_connection(laptop: Laptop) -> None:
    """Nothing is left when the client is killed: no sshd, and no key of the connection."""
    command = ["ssh", "-F", str(laptop.settings / "config"), "gpuhub", "echo begun; exec sleep 1000"]
    with subprocess.Popen(command, env=laptop.environ(), stdout=subprocess.PIPE, stdin=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"begun\n"
        assert _list_programs("sshd")
        client.kill()
    wait_for(lambda: not _list_programs("sshd"), "sshd has ended")
    wait_for(lambda: not _list_own_folders(), "its folder is removed")


def _list_programs(name: str) -> list[str]:
    """Return the command lines of the user's processes of this name."""
    done = subprocess.run(["pgrep", "-u", str(UID), "-fa", name], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if "ssh_server" not in line]


def _list_own_folders() -> list[Path]:
    return [folder for folder in Path("/tmp").glob("gpu-launch-ssh-*") if folder.stat().st_uid == UID]


def test_another_key_and_another_token_are_refused(laptop: Laptop, tmp_path: Path) -> None:
    """sshd accepts the key of the connection alone, no password, no other user; the hub's side wants the token."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    other = laptop.ssh(
        "-o", f"IdentityFile={tmp_path / 'other'}", "-o", "IdentitiesOnly=yes", "-i", "/dev/null", "gpuhub", "id"
    )
    # The settings' own key is offered as well, so that the other one does no harm.
    assert other.returncode == 0
    config = (laptop.settings / "config").read_text()
    moved = tmp_path / "config"
    moved.write_text(config.replace(str(laptop.settings / "id_ed25519"), str(tmp_path / "other")))
    refused = laptop.run("ssh", "-F", str(moved), "gpuhub", "id")
    assert (refused.returncode, refused.stdout) == (255, b"")
    assert b"Permission denied (publickey)" in refused.stderr
    root = laptop.ssh("-l", "root", "gpuhub", "id")
    assert (root.returncode, root.stdout) == (255, b"")
    foreign = subprocess.run(
        ["ssh", "-F", str(laptop.settings / "config"), "gpuhub", "id"],
        env=laptop.environ() | {"GPUHUB_TOKEN": "the-token-of-ben"},
        capture_output=True,
        check=False,
    )
    assert (foreign.returncode, foreign.stdout) == (255, b"")


def test_changed_host_key_is_refused(laptop: Laptop) -> None:
    """The host key of the first connection is pinned: another one ends the connection before SSH begins."""
    pinned = laptop.settings / "known_hosts"
    laptop.succeed("gpuhub", "true")
    key = laptop.server.home / ".gpu_launch/ssh/host_ed25519"
    assert (key.stat().st_mode & 0o777, key.stat().st_uid) == (0o600, UID)
    before = pinned.read_text()
    public = subprocess.run(["ssh-keygen", "-y", "-f", str(key)], capture_output=True, text=True, check=True).stdout
    assert before == f"gpuhub {' '.join(public.split()[:2])}\n"
    pinned.write_text(before.replace("AAAAI", "AAAAJ"))
    refused = laptop.ssh("gpuhub", "true")
    pinned.write_text(before)
    assert refused.returncode == 255
    assert b"The host key of your containers is another one than before" in refused.stderr
    assert laptop.succeed("gpuhub", "echo again") == "again\n"


def test_nothing_of_that_name_runs(laptop: Laptop) -> None:
    """The error says in two lines what is missing and what would work."""
    done = laptop.ssh("gpuhub-nothing", "true")
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith(("gpu-launch:", "Start"))]
    assert lines == [
        "gpu-launch: You have no running instance or job nothing.",
        "Start one: gpu-launch instance start --name nothing --profile PROFILE; what runs: gpu-launch instance list, ps",
    ]
