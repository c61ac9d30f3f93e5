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

from gpuhub.common import secrets
from gpuhub.common.errors import NodeUnreachable
from gpuhub.config import settings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.probe_container import LABEL_DOCTOR
from gpuhub.docker.ssh import ssh_files
from gpuhub.docker.swarm import membership
from gpuhub.ops.provision import cluster_file, node_access
from gpuhub.tls.authority import utc_now
from gpuhub_closet import docker_daemons as daemons
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import ClosetNode
from tests.support.closet import practice_closet
from tests.support.closet.practice_closet import INSTANCE, Closet
from tests.support.closet.ssh_machines import Machine, make_key, ssh_agent, wait
from tests.support.product import join_columns

GPUHUB = str(Path(sys.executable).with_name("gpuhub"))


class Head:
    """The administrator at the head node, with a cluster.toml of two nodes."""

    def __init__(self, closet: Closet, folder: Path, agent_socket: str) -> None:
        self.paths = closet.paths
        self.file = folder / "cluster.toml"
        # The file names no GPUs of nodes: one profile needs rig3's.
        lines = [line for line in closet.cluster_file.read_text().splitlines() if not line.startswith("gpus = ")]
        self.file.write_text(cluster_file.remove_node("\n".join(lines) + "\n", "rig3"))
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

    def daemons(self) -> DockerClients:
        return DockerClients(settings.load(self.file).nodes, instance=INSTANCE, run_dir=self.paths.run)

    def version(self, node: str) -> str:
        nodes = self.daemons()
        try:
            return str(asyncio.run(nodes.call(node, "version"))["Version"])
        finally:
            nodes.close()

    def members(self, manager: str = "rig1") -> set[str]:
        """Return the names of the nodes in a node's Swarm."""
        nodes = self.daemons()
        try:
            listed = asyncio.run(nodes.call(manager, "nodes"))
        finally:
            nodes.close()
        return {each["Description"]["Hostname"] for each in listed}


def leave_swarm(closet: Closet) -> None:
    """Make every node leave its Swarm."""
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


def test_machine_is_added_and_removed_over_ssh(head: Head, rig3: Machine):
    """Changes are shown before they are made, a second run repairs, and removal leaves only a copy of the file."""
    before, keys = head.file.read_text(), rig3.authorized_keys.read_text()
    shown = head.gpuhub("node", "add", rig3.url, "--yes", "--dry-run", "--name", "rig3")
    assert "✓ rights root may use Docker's socket" in join_columns(shown)
    assert "mtu 1500 bytes over eth0; users' networks get 1450" in join_columns(shown)
    assert f'docker = "{rig3.url}"' in shown
    assert "table inet" in shown  # the firewall
    assert (head.file.read_text(), rig3.authorized_keys.read_text()) == (before, keys)
    assert "there is no terminal to confirm it" in head.gpuhub("node", "add", rig3.url, status=1)

    head.gpuhub("node", "add", rig3.url, "--yes", "--name", "rig3")
    assert settings.load(head.file).node("rig3").docker == rig3.url
    assert head.version("rig3") == head.version("rig1")
    assert head.members() == {"rig1", "rig3"}
    added = head.file.read_text(), rig3.authorized_keys.read_text()

    (rig3.authorized_keys).write_text(keys)
    with pytest.raises(NodeUnreachable, match="Permission denied"):
        head.version("rig3")
    again = head.gpuhub("node", "add", rig3.url, "--yes")
    assert "✓ swarm member of gpuhub's" in join_columns(again)
    assert (head.file.read_text(), rig3.authorized_keys.read_text()) == added

    refused = head.gpuhub("node", "remove", "rig1", "--yes", status=1)
    assert re.search("rig1 stays: .* rig2 is not in the Swarm", refused)
    gone = head.gpuhub("node", "remove", "rig3", "--yes")
    assert "rig3 is removed." in gone
    assert (head.file.read_text(), rig3.authorized_keys.read_text()) == (before, keys)
    assert head.members() == {"rig1"}
    assert not ssh_files(INSTANCE).known_hosts("rig3").exists()


def test_the_node_that_managed_the_swarm_alone_is_removed(head: Head):
    """Another takes over first, so that users' networks remain."""
    nodes = head.daemons()
    try:
        asyncio.run(membership.ensure_swarm(nodes, settings.load(head.file)))
    finally:
        nodes.close()
    before = head.members()
    assert "rig1 is removed." in head.gpuhub("node", "remove", "rig1", "--yes")
    assert [node.name for node in settings.load(head.file).nodes] == ["rig2"]
    assert (before, head.members("rig2")) == ({"rig1", "rig2"}, {"rig2"})


def test_sudo_uses_the_callers_ssh_keys(head: Head, rig3: Machine, agent: tuple[Path, str]):
    """The caller's own SSH keys are used, because root on the head node needs no login anywhere."""
    head.environment["SUDO_USER"] = "nobody"
    assert "refused the login" in head.gpuhub("node", "add", rig3.url, "--yes", "--dry-run", status=1)
    with ssh_agent(agent[0], "nobody") as agent_socket:
        head.environment["SSH_AUTH_SOCK"] = agent_socket
        shown = head.gpuhub("node", "add", rig3.url, "--yes", "--dry-run", "--name", "rig3")
    assert "✓ ssh root on" in join_columns(shown)


def test_the_key_reaches_dockers_socket_and_nothing_else(head: Head, rig3: Machine, tmp_path: Path):
    """The key allows no command, no file transfer, no other socket and no port in either direction."""
    head.gpuhub("node", "add", rig3.url, "--yes", "--name", "rig3")
    files = ssh_files(INSTANCE)
    ssh = ["ssh", "-F", "none", "-o", "BatchMode=yes", *files.options("rig3")]
    destination = ["--", rig3.address]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*ssh, *words], check=False, capture_output=True, text=True, timeout=20)

    assert run(*destination, "id").returncode == 1
    assert run(*destination, "id").stdout == ""
    sftp = ["sftp", "-F", "none", "-b", "/dev/null", *files.options("rig3"), rig3.address]
    assert subprocess.run(sftp, check=False, capture_output=True, timeout=20).returncode == 255
    refused = run("-N", "-o", "ExitOnForwardFailure=yes", "-R", "18765:127.0.0.1:22", *destination)
    assert "remote port forwarding failed" in refused.stderr

    ways = {
        "docker": "/var/run/docker.sock",
        "other": str(node_paths(head.paths, "rig3").socket),
        "port": f"{rig3.address}:22",
    }
    places = [word for name, goal in ways.items() for word in ("-L", f"{tmp_path / name}:{goal}")]
    with subprocess.Popen([*ssh, "-N", *places, *destination], stderr=subprocess.DEVNULL) as forwarding:
        try:
            wait(lambda: all((tmp_path / name).exists() for name in ways), "the tunnel")
            assert ping_docker(tmp_path / "docker").startswith(b"HTTP/1.0 200")
            assert ping_docker(tmp_path / "other") == b""
            assert ping_docker(tmp_path / "port") == b""
        finally:
            forwarding.kill()
    assert f"connect to path {ways['other']}, but the request was denied" in rig3.log
    assert f"connect to host {rig3.address} port 22, but the request was denied" in rig3.log


def ping_docker(socket_file: Path) -> bytes:
    """Return the response to a ping of Docker's API on a socket; empty when the socket is closed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(socket_file))
        try:
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return connection.recv(64)
        except OSError:
            return b""


def test_another_host_key_is_refused(
    head: Head, closet: Closet, agent: tuple[Path, str], rig3: Machine, tmp_path: Path
):
    """A machine with another host key gets nothing from hub and broker or from `node add`."""
    head.gpuhub("node", "add", rig3.url, "--yes", "--name", "rig3")
    impostor = rig3.folder / "impostor_key"
    make_key(impostor)
    known_hosts = ssh_files(INSTANCE).known_hosts("rig3")
    right = known_hosts.read_text()
    wrong = f"gpuhub-rig3 {impostor.with_suffix('.pub').read_text()}"
    known_hosts.write_text(wrong)
    with pytest.raises(NodeUnreachable, match="Host key verification failed"):
        head.version("rig3")
    assert head.version("rig2")
    known_hosts.write_text(right)
    assert head.version("rig3")


def test_doctor_inspects_every_node(head: Head, closet: Closet, rig3: Machine, tiny_image: str):
    """The doctor inspects nodes in a short-lived container, also over a key that allows no command."""
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
            values = {each["check"]: each["value"] for each in machines["rig3"]}
            assert values["mtu"] == "1500 bytes over eth0; users' networks get 1450"
            assert "Linux" in values["system"]
            assert values["swarm"] == "member of gpuhub's Swarm"
            assert (
                values["nodes"] == f"a manager of the Swarm can be reached at {closet.plan.node('rig1').address}:2377"
            )
            # The columns are as wide as their contents.
            output = " ".join(head.gpuhub("doctor", status=1).split())
            assert re.search(r"the room ✓ heat .* not counted: GPUs of rig1, rig2, rig3 whose limits", output)
            assert "! services gpuhub does not run" in output
            assert "✗ swarm inactive" in output  # rig2 was never set up
            assert re.search(r"checks failed on .*rig2", output)
            assert [
                client.containers.list(all=True, ignore_removed=True, filters={"label": LABEL_DOCTOR})
                for client in clients
            ] == [
                [],
                [],
                [],
            ]
        finally:
            for client in clients:
                client.images.remove("gpuhub/base:latest")


def stop_dockerd(closet: Closet, node: ClosetNode) -> None:
    """Stop Docker only; the node's SSH server keeps running."""

    def running() -> list[int]:
        return [
            pid for pid, name in daemons.find_processes(closet.plan, node).items() if name in {"dockerd", "containerd"}
        ]

    for pid in running():
        with suppress(ProcessLookupError):  # containerd ends with dockerd
            os.kill(pid, signal.SIGTERM)
    wait(lambda: not running(), "dockerd's end")


@contextmanager
def dockerd_with_flags(closet: Closet, node: ClosetNode, flags: list[str]) -> Iterator[None]:
    """Run the node's dockerd with further flags, and restore it afterwards."""
    stop_dockerd(closet, node)
    command = ["setsid", "--fork", *daemons.build_foreground_command(closet.plan, node, closet.paths), *flags]
    with node_paths(closet.paths, node).log.open("ab") as log:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        daemons.wait_ready(closet.plan, closet.paths)
        yield
    finally:
        stop_dockerd(closet, node)
        practice_closet.start_daemon(closet.plan, node, closet.paths)
        daemons.wait_ready(closet.plan, closet.paths)


def test_a_daemon_over_mutual_tls(head: Head, closet: Closet, rig3: Machine):
    """Without systemd the flags for dockerd are printed; then it accepts only our certificate."""
    node = closet.plan.node("rig3")
    add = ("node", "add", rig3.url, "--tls", "--yes", "--name", "rig3")
    output = head.gpuhub(*add, status=1)
    assert "systemd does not run Docker there" in output
    flags = re.search(r"-H tcp://\S+ --tlsverify .*", output)
    assert flags is not None
    here = rig3.folder / "etc/gpuhub/docker"
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in here.iterdir()} == dict.fromkeys(
        ("ca.pem", "server.pem", "server-key.pem"), 0o600
    )
    with dockerd_with_flags(closet, node, flags[0].replace("/etc/gpuhub/docker", str(here)).split()):
        assert "answers over TLS, only to gpuhub's certificate" in head.gpuhub(*add)
        added = settings.load(head.file).node("rig3")
        assert added.docker == f"tcp://{node.address}:2376"
        assert added.tls is not None
        assert head.version("rig3") == head.version("rig1")
        assert head.members() == {"rig1", "rig3"}
        with pytest.raises(requests.exceptions.RequestException, match=r"(?i)certificate|reset by peer|broken pipe"):
            requests.get(f"https://{node.address}:2376/_ping", verify=str(added.tls.ca), timeout=10)
        # A node's own certificate is not accepted as a client's by any daemon, its own included.
        pair = str(here / "server.pem"), str(here / "server-key.pem")
        with pytest.raises(requests.exceptions.RequestException, match=r"(?i)certificate|reset by peer|broken pipe"):
            requests.get(f"https://{node.address}:2376/_ping", verify=str(added.tls.ca), cert=pair, timeout=10)
        check_foreign_certificates(head, added.tls, str(node.address))
        assert "the certificates were removed" in head.gpuhub("node", "remove", "rig3", "--yes", "--ssh", rig3.url)
    assert not here.exists()
    assert not added.tls.ca.exists()


def check_foreign_certificates(head: Head, tls: settings.DockerTlsFiles, address: str) -> None:
    """Check for C4 that a certificate of another authority, on either side, is refused and names the node."""
    originals = {file: file.read_bytes() for file in (tls.ca, tls.cert, tls.key)}
    other = node_access.make_certificates("rig3", address, utc_now())
    tls.ca.write_bytes(other.authority)
    with pytest.raises(NodeUnreachable, match=r"node rig3: unauthenticated: .* not of the authority in tls\.ca"):
        head.version("rig3")
    tls.ca.write_bytes(originals[tls.ca])
    tls.cert.write_bytes(other.client)
    tls.key.write_bytes(other.client_key)
    with pytest.raises(NodeUnreachable, match=r"node rig3: unauthenticated: its Docker daemon .*not accept tls\.cert"):
        head.version("rig3")
    output = head.gpuhub("doctor", "rig3", "rig1", status=1)
    assert "✗ docker unauthenticated: its Docker daemon" in output
    assert "checks failed on rig3" in output
    assert head.version("rig1") == head.version("rig2")
    for file, content in originals.items():
        file.write_bytes(content)


def test_an_expired_certificate_is_named(head: Head, closet: Closet, rig3: Machine):
    """Hub and broker name the node and its expired certificate, and use the other nodes (C4)."""
    node = closet.plan.node("rig3")
    files = node_access.find_client_files(head.paths, "rig3")
    secrets.ensure_secrets(head.paths)
    old = node_access.make_certificates("rig3", str(node.address), utc_now() - timedelta(days=3), timedelta(days=1))
    node_access.store_certificates(files, old)
    here = rig3.folder / "etc/gpuhub/docker"
    here.mkdir(parents=True)
    for name, content in (("ca", old.authority), ("server", old.server), ("server-key", old.server_key)):
        (here / f"{name}.pem").write_bytes(content)
    node_settings = settings.NodeSettings(
        name="rig3", address=str(node.address), docker=f"tcp://{node.address}:2376", tls=files
    )
    head.file.write_text(cluster_file.put_node(head.file.read_text(), node_settings))
    flags = node_access.build_dockerd_flags(str(node.address)).replace("/etc/gpuhub/docker", str(here)).split()
    with dockerd_with_flags(closet, node, flags):
        with pytest.raises(
            NodeUnreachable, match=r"node rig3: unauthenticated: .* has expired: `gpuhub node add --tls`"
        ):
            head.version("rig3")
        assert head.version("rig1") == head.version("rig2")
