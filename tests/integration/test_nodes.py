"""`gpuhub node add` and `remove` against real SSH servers and Docker daemons, and `gpuhub doctor` on what they make."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import requests

from gpuhub import secrets, settings
from gpuhub.closet import daemons
from gpuhub.closet.places import node_places
from gpuhub.closet.plan import ClosetNode
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.ssh import ssh_files
from gpuhub.errors import NodeUnreachable
from gpuhub.nodes.adding import certificates, cluster_file, daemon_tls
from gpuhub.nodes.doctor.looking import LABEL_DOCTOR
from gpuhub.trust.authority import utc_now
from tests.integration.conftest import INSTANCE, Closet
from tests.support.machines import Machine, make_key, ssh_agent, wait

GPUHUB = str(Path(sys.executable).with_name("gpuhub"))


class Head:
    """The owner at the head node, with a cluster.toml of two nodes."""

    def __init__(self, closet: Closet, folder: Path, agent_socket: str) -> None:
        self.paths = closet.paths
        self.file = folder / "cluster.toml"
        # Without what each node is expected to have: rig3's card is what one profile asks for.
        lines = [line for line in closet.cluster_file.read_text().splitlines() if not line.startswith("gpus = ")]
        self.file.write_text(cluster_file.take_node("\n".join(lines) + "\n", "rig3"))
        self.environment = {key: value for key, value in os.environ.items() if key != "SUDO_USER"}
        self.environment["SSH_AUTH_SOCK"] = agent_socket

    def gpuhub(self, *words: str, status: int = 0) -> str:
        command = [GPUHUB, *words, "--instance", INSTANCE, "--cluster-file", str(self.file)]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env=self.environment,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == status, f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def daemons(self) -> Daemons:
        return Daemons(settings.load(self.file).nodes, instance=INSTANCE, run_dir=self.paths.run)

    def version(self, node: str) -> str:
        nodes = self.daemons()
        try:
            return str(asyncio.run(nodes.call(node, "version"))["Version"])
        finally:
            nodes.close()

    def members(self) -> set[str]:
        """The nodes in the Swarm of rig1, by their address."""
        nodes = self.daemons()
        try:
            found = asyncio.run(nodes.call("rig1", "nodes"))
        finally:
            nodes.close()
        return {f"rig{int(each['Status']['Addr'].rsplit('.', 1)[1]) - 10}" for each in found}


def leave_swarm(closet: Closet) -> None:
    """No node belongs to any Swarm, whatever a test before has made."""
    for node in reversed(closet.plan.nodes):
        with closing(closet.client(node)) as client:
            client.swarm.leave(force=True)


@pytest.fixture
def head(closet: Closet, agent: tuple[Path, str], tmp_path: Path) -> Iterator[Head]:
    leave_swarm(closet)
    head = Head(closet, tmp_path, agent[1])
    yield head
    leave_swarm(closet)
    shutil.rmtree(ssh_files(INSTANCE).folder, ignore_errors=True)
    shutil.rmtree(closet.paths.secrets / "docker", ignore_errors=True)


def test_a_machine_is_added_and_removed_over_ssh(head: Head, rig3: Machine):
    """Shown first, changed only then; again it mends; and nothing of it is left afterwards but a copy of the file."""
    before, keys = head.file.read_text(), rig3.authorized_keys.read_text()
    shown = head.gpuhub("node", "add", rig3.url, "--yes", "--dry-run", "--name", "rig3")
    assert "✓ rights  root may use Docker's socket" in shown
    assert "mtu     1500 bytes over eth0; users' networks get 1450" in shown
    assert f'docker = "{rig3.url}"' in shown
    assert "table inet" in shown  # the packet filter
    assert (head.file.read_text(), rig3.authorized_keys.read_text()) == (before, keys)
    assert "nobody is there to confirm it" in head.gpuhub("node", "add", rig3.url, status=1)

    head.gpuhub("node", "add", rig3.url, "--yes", "--name", "rig3")
    assert settings.load(head.file).node("rig3").docker == rig3.url
    assert head.version("rig3") == head.version("rig1")
    assert head.members() == {"rig1", "rig3"}
    added = head.file.read_text(), rig3.authorized_keys.read_text()

    (rig3.authorized_keys).write_text(keys)
    with pytest.raises(NodeUnreachable, match="Permission denied"):
        head.version("rig3")
    again = head.gpuhub("node", "add", rig3.url, "--yes")
    assert "✓ swarm   member of gpuhub's" in again
    assert (head.file.read_text(), rig3.authorized_keys.read_text()) == added

    assert "the first node and keeps the Swarm" in head.gpuhub("node", "remove", "rig1", "--yes", status=1)
    gone = head.gpuhub("node", "remove", "rig3", "--yes")
    assert "rig3 is out." in gone
    assert (head.file.read_text(), rig3.authorized_keys.read_text()) == (before, keys)
    assert head.members() == {"rig1"}
    assert not ssh_files(INSTANCE).known_hosts("rig3").exists()


def test_under_sudo_the_callers_own_keys_count(head: Head, rig3: Machine, agent: tuple[Path, str]):
    """Root on the head node needs no login anywhere."""
    head.environment["SUDO_USER"] = "nobody"
    assert "does not let you in" in head.gpuhub("node", "add", rig3.url, "--yes", "--dry-run", status=1)
    with ssh_agent(agent[0], "nobody") as place:
        head.environment["SSH_AUTH_SOCK"] = place
        shown = head.gpuhub("node", "add", rig3.url, "--yes", "--dry-run", "--name", "rig3")
    assert "✓ ssh     root on" in shown


def test_the_key_reaches_dockers_socket_and_nothing_else(head: Head, rig3: Machine, tmp_path: Path):
    """No command, no file transfer, no other socket, no port in either direction."""
    head.gpuhub("node", "add", rig3.url, "--yes", "--name", "rig3")
    files = ssh_files(INSTANCE)
    ssh = ["ssh", "-F", "none", "-o", "BatchMode=yes", *files.options("rig3")]
    there = ["--", rig3.address]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*ssh, *words], check=False, capture_output=True, text=True, timeout=20)

    assert run(*there, "id").returncode == 1
    assert run(*there, "id").stdout == ""
    sftp = ["sftp", "-F", "none", "-b", "/dev/null", *files.options("rig3"), rig3.address]
    assert subprocess.run(sftp, check=False, capture_output=True, timeout=20).returncode == 255
    refused = run("-N", "-o", "ExitOnForwardFailure=yes", "-R", "18765:127.0.0.1:22", *there)
    assert "remote port forwarding failed" in refused.stderr

    ways = {
        "docker": "/var/run/docker.sock",
        "other": str(node_places(head.paths, "rig3").socket),
        "port": f"{rig3.address}:22",
    }
    places = [word for name, goal in ways.items() for word in ("-L", f"{tmp_path / name}:{goal}")]
    with subprocess.Popen([*ssh, "-N", *places, *there], stderr=subprocess.DEVNULL) as forwarding:
        try:
            wait(lambda: all((tmp_path / name).exists() for name in ways), "the tunnel")
            assert ask(tmp_path / "docker").startswith(b"HTTP/1.0 200")
            assert ask(tmp_path / "other") == b""
            assert ask(tmp_path / "port") == b""
        finally:
            forwarding.kill()
    assert f"connect to path {ways['other']}, but the request was denied" in rig3.log
    assert f"connect to host {rig3.address} port 22, but the request was denied" in rig3.log


def ask(place: Path) -> bytes:
    """What answers Docker's ping behind a socket; nothing where it is shut."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(place))
        try:
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return connection.recv(64)
        except OSError:
            return b""


def test_another_host_key_is_refused(
    head: Head, closet: Closet, agent: tuple[Path, str], rig3: Machine, tmp_path: Path
):
    """Whoever stands in a node's place gets nothing: neither from hub and broker nor from `node add`."""
    head.gpuhub("node", "add", rig3.url, "--yes", "--name", "rig3")
    impostor = rig3.folder / "impostor_key"
    make_key(impostor)
    known = ssh_files(INSTANCE).known_hosts("rig3")
    right = known.read_text()
    wrong = f"gpuhub-rig3 {impostor.with_suffix('.pub').read_text()}"
    known.write_text(wrong)
    with pytest.raises(NodeUnreachable, match="Host key verification failed"):
        head.version("rig3")
    assert head.version("rig2")
    known.write_text(right)
    assert head.version("rig3")


def test_doctor_looks_into_every_node(head: Head, closet: Closet, rig3: Machine, tiny_image: str):
    """Over a key that runs no command, too: in a short-lived container, which is gone afterwards."""
    head.gpuhub("node", "add", rig3.url, "--yes", "--name", "rig3")
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(closet.client(node))) for node in closet.plan.nodes]
        for client in clients:
            client.images.get(tiny_image).tag("gpuhub/base", "latest")
        try:
            machines = {
                each["machine"]: each["findings"] for each in json.loads(head.gpuhub("doctor", "rig3", "--json"))
            }
            assert [each for each in machines["rig3"] if each["level"] == "failed"] == []
            found = {each["check"]: each["value"] for each in machines["rig3"]}
            assert found["mtu"] == "1500 bytes over eth0; users' networks get 1450"
            assert "Linux" in found["system"]
            assert found["swarm"] == "member of gpuhub's"
            assert found["nodes"] == f"the first node can be reached at {closet.plan.node('rig1').address}:2377"
            # The columns are as wide as what stands in them.
            told = " ".join(head.gpuhub("doctor", status=1).split())
            assert "! services gpuhub does not run" in told
            assert "✗ swarm inactive" in told  # rig2 was never brought up
            assert "something failed on rig2" in told
            assert [client.containers.list(all=True, filters={"label": LABEL_DOCTOR}) for client in clients] == [
                [],
                [],
                [],
            ]
        finally:
            for client in clients:
                client.images.remove("gpuhub/base:latest")


def stop_dockerd(closet: Closet, node: ClosetNode) -> None:
    """Docker alone: the node's SSH server goes on."""

    def running() -> list[int]:
        return [pid for pid, name in daemons.processes(closet.plan, node).items() if name in {"dockerd", "containerd"}]

    for pid in running():
        with suppress(ProcessLookupError):  # containerd ends with dockerd
            os.kill(pid, signal.SIGTERM)
    wait(lambda: not running(), "dockerd's end")


@contextmanager
def started_with(closet: Closet, node: ClosetNode, flags: list[str]) -> Iterator[None]:
    """The node's dockerd with further options; as it always is afterwards."""
    stop_dockerd(closet, node)
    command = ["setsid", "--fork", *daemons.dockerd_command(closet.plan, node, closet.paths), *flags]
    with node_places(closet.paths, node).log.open("ab") as log:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        daemons.wait_ready(closet.plan, closet.paths)
        yield
    finally:
        stop_dockerd(closet, node)
        daemons.start(closet.plan, node, closet.paths)
        daemons.wait_ready(closet.plan, closet.paths)


def test_a_daemon_over_mutual_tls(head: Head, closet: Closet, rig3: Machine):
    """Without systemd it is said what to start dockerd with; then it lets our certificate in, and nobody without."""
    node = closet.plan.node("rig3")
    add = ("node", "add", rig3.url, "--tls", "--yes", "--name", "rig3")
    told = head.gpuhub(*add, status=1)
    assert "systemd does not run Docker there" in told
    flags = re.search(r"-H tcp://\S+ --tlsverify .*", told)
    assert flags is not None
    here = rig3.folder / "etc/gpuhub/docker"
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in here.iterdir()} == dict.fromkeys(
        ("ca.pem", "server.pem", "server-key.pem"), 0o600
    )
    with started_with(closet, node, flags[0].replace("/etc/gpuhub/docker", str(here)).split()):
        assert "answers over TLS, and nobody without our certificate" in head.gpuhub(*add)
        added = settings.load(head.file).node("rig3")
        assert added.docker == f"tcp://{node.address}:2376"
        assert added.tls is not None
        assert head.version("rig3") == head.version("rig1")
        assert head.members() == {"rig1", "rig3"}
        with pytest.raises(requests.exceptions.RequestException, match=r"(?i)certificate|reset by peer|broken pipe"):
            requests.get(f"https://{node.address}:2376/_ping", verify=str(added.tls.ca), timeout=10)
        # A node's own certificate opens no other daemon, not even its own.
        pair = str(here / "server.pem"), str(here / "server-key.pem")
        with pytest.raises(requests.exceptions.RequestException, match=r"(?i)certificate|reset by peer|broken pipe"):
            requests.get(f"https://{node.address}:2376/_ping", verify=str(added.tls.ca), cert=pair, timeout=10)
        check_strangers(head, added.tls, str(node.address))
        assert "the certificates were taken away" in head.gpuhub("node", "remove", "rig3", "--yes", "--ssh", rig3.url)
    assert not here.exists()
    assert not added.tls.ca.exists()


def check_strangers(head: Head, tls: settings.Tls, address: str) -> None:
    """C4: a certificate of another authority, on either side: the node is named, and the others serve."""
    ours = {file: file.read_bytes() for file in (tls.ca, tls.cert, tls.key)}
    other = certificates.make("rig3", address, utc_now())
    tls.ca.write_bytes(other.authority)
    with pytest.raises(NodeUnreachable, match=r"node rig3: unauthenticated: .* not of the authority in tls\.ca"):
        head.version("rig3")
    tls.ca.write_bytes(ours[tls.ca])
    tls.cert.write_bytes(other.client)
    tls.key.write_bytes(other.client_key)
    with pytest.raises(NodeUnreachable, match=r"node rig3: unauthenticated: its Docker daemon .*not accept tls\.cert"):
        head.version("rig3")
    told = head.gpuhub("doctor", "rig3", "rig1", status=1)
    assert "✗ docker unauthenticated: its Docker daemon" in told
    assert "something failed on rig3" in told
    assert head.version("rig1") == head.version("rig2")
    for file, content in ours.items():
        file.write_bytes(content)


def test_an_expired_certificate_is_named(head: Head, closet: Closet, rig3: Machine):
    """C4: hub and broker say which node and why; the others serve."""
    node = closet.plan.node("rig3")
    files = certificates.client_files(head.paths, "rig3")
    secrets.ensure_secrets(head.paths)
    old = certificates.make("rig3", str(node.address), utc_now() - timedelta(days=3), timedelta(days=1))
    certificates.store(files, old)
    here = rig3.folder / "etc/gpuhub/docker"
    here.mkdir(parents=True)
    for name, content in (("ca", old.authority), ("server", old.server), ("server-key", old.server_key)):
        (here / f"{name}.pem").write_bytes(content)
    there = settings.Node(name="rig3", address=str(node.address), docker=f"tcp://{node.address}:2376", tls=files)
    head.file.write_text(cluster_file.put_node(head.file.read_text(), there))
    flags = daemon_tls.flags(str(node.address)).replace("/etc/gpuhub/docker", str(here)).split()
    with started_with(closet, node, flags):
        with pytest.raises(
            NodeUnreachable, match=r"node rig3: unauthenticated: .* has expired: `gpuhub node add --tls`"
        ):
            head.version("rig3")
        assert head.version("rig1") == head.version("rig2")
