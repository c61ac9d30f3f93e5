"""Access to a node while it is added or removed: its address, its Docker daemon, gpuhub's key, and mutual TLS."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.ssh import SshFiles, host_alias
from gpuhub.ops.console import OperatorConsole
from gpuhub.ops.doctor import node_queries
from gpuhub.ops.doctor.node_facts import DockerFacts, GpuFacts, HostFacts
from gpuhub.ops.provision import daemon_tls, ssh_keys
from gpuhub.ops.provision.ssh_keys import HostKey, format_known_hosts
from gpuhub.ops.provision.ssh_session import SshSession
from gpuhub.tls.authority import RENEW_BEFORE, utc_now

#: Longest wait for an answer of the daemon, seconds.
_ANSWER_S = 5.0


def find_address(host: str) -> str:
    """Return the machine's address, IPv4 if it has both.

    Raises:
        SetupError: The name cannot be resolved.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(
            f"the address of {host} cannot be found: {error.strerror or error}; give it with --address"
        ) from None
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    return str(min(addresses, key=lambda address: address.version))


async def query_docker(socket_path: Path, node: NodeSettings, paths: Paths) -> DockerFacts:
    """Return the facts of the daemon behind a socket."""
    local = NodeSettings(name=node.name, address=node.address, docker=f"unix://{socket_path}")
    daemons = DockerClients((local,), instance=paths.instance, run_dir=paths.run)
    try:
        return await node_queries.read_docker_facts(daemons, local.name)
    finally:
        daemons.close()


async def query_other_nodes(
    cluster: ClusterSettings, paths: Paths, name: str
) -> tuple[dict[str, tuple[GpuFacts, ...]], frozenset[str] | None]:
    """Return the GPUs of the other nodes by node, and the members of the Swarm."""
    others = [node for node in cluster.nodes if node.name != name]
    daemons = DockerClients(others, instance=paths.instance, run_dir=paths.run)
    try:
        node_gpus = await asyncio.gather(*(node_queries.read_gpus(daemons, node.name) for node in others))
        gpus = dict(zip((node.name for node in others), node_gpus, strict=True))
        members = await node_queries.read_swarm_members(daemons, cluster) if cluster.nodes[0] in others else None
    finally:
        daemons.close()
    return gpus, members


def authorize_key(session: SshSession, files: SshFiles, instance: str, name: str, host_keys: list[HostKey]) -> None:
    """Authorize gpuhub's key on the node, and store the node's host keys."""
    public = ssh_keys.ensure_key(files, instance)
    session.run(ssh_keys.AUTHORIZED_KEYS_SCRIPT, ssh_keys.build_script_arguments(public, is_authorized=True))
    store_host_keys(files, name, host_keys)


def store_host_keys(files: SshFiles, name: str, host_keys: list[HostKey]) -> None:
    """Store the host keys that the administrator compared."""
    files.folder.mkdir(mode=0o700, exist_ok=True)
    files.known_hosts(name).write_text(format_known_hosts(host_alias(name), host_keys), encoding="ascii")


def revoke_key(session: SshSession, files: SshFiles) -> None:
    """Remove gpuhub's key from the node's authorized keys."""
    if files.public_key.exists():
        public = files.public_key.read_text(encoding="ascii").strip()
        session.run(ssh_keys.AUTHORIZED_KEYS_SCRIPT, ssh_keys.build_script_arguments(public, is_authorized=False))


async def verify_docker(node: NodeSettings, paths: Paths) -> str:
    """Return the version of the node's Docker, reached as hub and broker do.

    Raises:
        SetupError: It does not answer, or accepts clients without a certificate.
    """
    daemons = DockerClients((node,), instance=paths.instance, run_dir=paths.run)
    try:
        version = (await daemons.call(node.name, "version"))["Version"]
    except GpuhubError as error:
        raise SetupError(f"Docker does not answer hub and broker at {node.docker}: {error}") from None
    finally:
        daemons.close()
    if node.tls is not None and accepts_any_client(node.address, node.tls.ca):
        raise SetupError(
            f"the Docker daemon at {node.docker} accepts every client, which makes everyone on the network root there: "
            "it must be started with --tlsverify"
        )
    return str(version)


def accepts_any_client(address: str, authority: Path) -> bool:
    """Return whether the daemon answers a client without a certificate."""
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with (
            socket.create_connection((address, daemon_tls.PORT), _ANSWER_S) as plain,
            context.wrap_socket(plain, server_hostname=address) as secure,
        ):
            secure.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            # With TLS 1.3 a refusal comes with the first response only.
            return secure.recv(64).startswith(b"HTTP/")
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSetupRequest:
    """The machine that gets certificates."""

    node: NodeSettings
    host: HostFacts
    #: Its containers outlive a restart of its daemon.
    live_restore: bool
    #: The administrator is not asked.
    skip_confirmation: bool

    @property
    def needs_sudo(self) -> bool:
        """The administrator logs in as another user than root."""
        return self.host.sudo != "root"


def set_up_tls(session: SshSession, request: TlsSetupRequest, paths: Paths, console: OperatorConsole) -> None:
    """Let the daemon accept TLS connections from gpuhub only; valid certificates are kept.

    Raises:
        SetupError: It does not; the text has the options to set where systemd does not start it.
    """
    node, files = request.node, daemon_tls.find_client_files(paths, request.node.name)
    # Valid certificates that the daemon does not use yet only need a restart by the administrator.
    if not daemon_tls.are_certificates_valid(files, node.address, utc_now(), margin=RENEW_BEFORE):
        certificates = daemon_tls.make_certificates(node.name, node.address, utc_now())
        session.run(daemon_tls.build_files_script(certificates), as_root=request.needs_sudo)
        daemon_tls.store_certificates(files, certificates)
        console.write(f"  ✓ certificates made: the node's in {daemon_tls.FOLDER} there, ours in {files.key.parent}")
        _restart_docker(session, request, console)
    try:
        version = asyncio.run(verify_docker(node, paths))
    except SetupError as error:
        raise SetupError(f"{error}\n{daemon_tls.describe_manual_setup(node.address)}") from None
    console.write(f"  ✓ Docker {version} answers over TLS, only to gpuhub's certificate")


def _restart_docker(session: SshSession, request: TlsSetupRequest, console: OperatorConsole) -> None:
    node, host = request.node, request.host
    if not host.systemd or not host.docker_start:
        raise SetupError(f"systemd does not run Docker there: {daemon_tls.describe_manual_setup(node.address)}")
    text = daemon_tls.build_drop_in(host.docker_start, node.address)
    console.write(f"\n{daemon_tls.DROP_IN} on {node.name}:\n\n{text}")
    if not request.skip_confirmation:
        outcome = "run on" if request.live_restore else "stop"
        console.confirm(f"Write it and restart Docker there (its containers {outcome})?")
    session.run(daemon_tls.build_drop_in_script(text), as_root=request.needs_sudo)
    session.run(daemon_tls.RESTART_SCRIPT, as_root=request.needs_sudo)
