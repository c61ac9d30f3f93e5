"""What adding and removing a node do on the node and with its Docker daemon, step by step."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from pathlib import Path

from gpuhub.containers.daemons import Daemons
from gpuhub.containers.ssh import SshFiles, host_alias
from gpuhub.errors import GpuhubError, SetupError
from gpuhub.nodes.adding import daemon_tls, keys
from gpuhub.nodes.adding.hostkeys import HostKey, format_known_hosts
from gpuhub.nodes.adding.remote import Remote
from gpuhub.nodes.doctor import looking
from gpuhub.nodes.doctor.facts import DockerFacts, GpuFacts
from gpuhub.paths import Paths
from gpuhub.settings import Cluster, Node

_ANSWER_S = 5.0


def find_address(host: str) -> str:
    """The machine's address, IPv4 where it has both.

    Raises:
        SetupError: the name is not known here.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(
            f"the address of {host} cannot be found: {error.strerror or error}; give it with --address"
        ) from None
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    return str(min(addresses, key=lambda address: address.version))


async def look_through(socket_path: Path, node: Node, paths: Paths) -> DockerFacts:
    """What the daemon behind a socket says of itself."""
    there = Node(name=node.name, address=node.address, docker=f"unix://{socket_path}")
    daemons = Daemons((there,), instance=paths.instance, run_dir=paths.run)
    try:
        return await looking.look_at_docker(daemons, there.name)
    finally:
        daemons.close()


async def look_at_others(
    cluster: Cluster, paths: Paths, name: str
) -> tuple[dict[str, tuple[GpuFacts, ...]], frozenset[str] | None]:
    """The GPUs of the other nodes, by node, and the members of the Swarm."""
    others = [node for node in cluster.nodes if node.name != name]
    daemons = Daemons(others, instance=paths.instance, run_dir=paths.run)
    try:
        found = await asyncio.gather(*(looking.read_gpus(daemons, node.name) for node in others))
        gpus = dict(zip((node.name for node in others), found, strict=True))
        members = await looking.read_members(daemons, cluster) if cluster.nodes[0] in others else None
    finally:
        daemons.close()
    return gpus, members


def let_key_in(remote: Remote, files: SshFiles, instance: str, name: str, host_keys: list[HostKey]) -> None:
    """Allow gpuhub's key on the node, and remember the node's own."""
    public = keys.ensure_key(files, instance)
    remote.run(keys.CHANGE_SCRIPT, keys.build_words(public, wanted=True))
    remember(files, name, host_keys)


def remember(files: SshFiles, name: str, host_keys: list[HostKey]) -> None:
    """Keep the host keys that were compared."""
    files.folder.mkdir(mode=0o700, exist_ok=True)
    files.known_hosts(name).write_text(format_known_hosts(host_alias(name), host_keys), encoding="ascii")


def take_key_out(remote: Remote, files: SshFiles) -> None:
    """Allow it no longer; a key that was never made is allowed nowhere."""
    if files.public_key.exists():
        public = files.public_key.read_text(encoding="ascii").strip()
        remote.run(keys.CHANGE_SCRIPT, keys.build_words(public, wanted=False))


async def verify(node: Node, paths: Paths) -> str:
    """The version of the node's Docker, spoken to as hub and broker do.

    Raises:
        SetupError: it does not answer, or lets in whoever asks.
    """
    daemons = Daemons((node,), instance=paths.instance, run_dir=paths.run)
    try:
        version = (await daemons.call(node.name, "version"))["Version"]
    except GpuhubError as error:
        raise SetupError(f"Docker does not answer at {node.docker} as hub and broker ask it: {error}") from None
    finally:
        daemons.close()
    if node.tls is not None and lets_anybody_in(node.address, node.tls.ca):
        raise SetupError(
            f"the Docker daemon at {node.docker} lets anybody in, which is root to everybody on the network: it "
            "must be started with --tlsverify"
        )
    return str(version)


def lets_anybody_in(address: str, authority: Path) -> bool:
    """Whether the daemon answers who shows no certificate."""
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with (
            socket.create_connection((address, daemon_tls.PORT), _ANSWER_S) as plain,
            context.wrap_socket(plain, server_hostname=address) as secure,
        ):
            secure.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            # In TLS 1.3 the refusal comes with the first answer only.
            return secure.recv(64).startswith(b"HTTP/")
    except OSError:
        return False
