"""`gpuhub node invite` and the removal of guests."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from gpuhub.common.errors import Conflict, InvalidRequest, NotFound, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.base import describe_mistakes
from gpuhub.config.machines.guests import SSH_PORT, SSH_USER, GuestSettings
from gpuhub.config.settings import NodeSettings
from gpuhub.docker.ssh import ssh_files
from gpuhub.ops.console import OperatorConsole
from gpuhub.ops.guests.registry import INVITATION_S, Guest, GuestRegistry, choose_address
from gpuhub.ops.guests.wireguard import HeadInterface, make_key_pair
from gpuhub.ops.provision import cluster_file

#: The guest's interface, and where its program is.
INTERFACE = "gpuhub"
PROGRAM = "/usr/local/sbin/gpuhub-node"
_TIMEOUT_S = 60
_PACKAGES = "iproute2 wireguard-tools curl python3 openssh-server nftables"

# Everything that the friend's machine runs before its own program is there. It is short, so that a person can read it:
# the interface with the invitation's key, and the program over it, which the tunnel authenticates.
_COMMAND = """\
set -eu; umask 077; PATH=/usr/local/sbin:/usr/sbin:/sbin:$PATH; head={head}; link={interface}
missing() {{ echo "$1 is missing: apt-get install {packages}" >&2; exit 1; }}
for need in ip wg curl python3 sshd nft; do command -v $need >/dev/null || missing $need; done
[ ! -e /etc/gpuhub-node ] || {{ echo "this machine is a guest already: gpuhub-node leave" >&2; exit 1; }}
undo() {{ rm -f $key; [ -e /etc/gpuhub-node ] || {{ rm -f {program}; ip link delete $link 2>/dev/null || true; }}; }}
key=$(mktemp); trap undo EXIT
ip link add $link type wireguard 2>/dev/null || wireguard-go $link >/dev/null 2>&1
echo {private} >$key
wg set $link private-key $key peer {head_key} endpoint {endpoint} allowed-ips $head/32 persistent-keepalive 25
rm $key; ip address add {address}/32 dev $link; ip link set $link mtu 1280 up; ip route add $head/32 dev $link
curl -sSf -m {timeout_s} --retry 9 --retry-all-errors --retry-delay 1 http://$head:{port}/gpuhub-node -o {program}
chmod 755 {program}
python3 {program} join --name {name} --head $head --port {port} --address {address} \\
  --head-key {head_key} --endpoint {endpoint}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteRequest:
    """What `gpuhub node invite` was asked for."""

    name: str
    cluster_file: Path


def invite(request: InviteRequest, paths: Paths, console: OperatorConsole, *, now: float | None = None) -> str:
    """Invite a machine: write its node into cluster.toml, and return the command for it.

    A second invitation with the name of a machine that has not joined replaces the first one.

    Raises:
        SettingsError, SetupError: `[guests]` is missing, or a program.
        Conflict: A node has the name.
    """
    cluster = settings.load(request.cluster_file)
    if cluster.guests.endpoint is None:
        raise SetupError(
            f"{request.cluster_file}: guests need to know where the internet reaches this machine: add [guests] with "
            'endpoint = "HOST:51820", and let the router forward this UDP port here'
        )
    registry, now = GuestRegistry(paths), time.time() if now is None else now
    guests = registry.read()
    existing = guests.get(request.name)
    if existing is not None and existing.has_joined:
        raise Conflict(f"{request.name} has joined already: `gpuhub node remove {request.name}` first")
    if existing is None and request.name in {node.name for node in cluster.nodes}:
        raise Conflict(f"there is a node {request.name!r}: choose another name")
    used = [guest.address for guest in guests.values()] + [node.address for node in cluster.nodes]
    address = choose_address(cluster.guests.network, used) if existing is None else existing.address
    node = _build_node(request.name, address)
    text = cluster_file.put_node(request.cluster_file.read_text(encoding="utf-8"), node)
    cluster_file.check_text(text, request.cluster_file)
    private, public = make_key_pair()
    head_key = HeadInterface(paths, cluster.guests).read_public_key()
    registry.put(Guest(name=request.name, address=address, public_key=public, expires_at=now + INVITATION_S))
    if request.name not in {known.name for known in cluster.nodes}:
        cluster_file.replace_file(request.cluster_file, text)
    ends = datetime.fromtimestamp(now + INVITATION_S).astimezone()
    console.write(
        f"{request.name} is in {request.cluster_file}; `sudo make up` makes hub and broker know it.\n"
        "Send this to its owner, over a way that others cannot read. It is valid once, until "
        f"{ends:%Y-%m-%d %H:%M %Z}:\n"
    )
    command = build_command(node, cluster.guests, head_key, private)
    console.write(command)
    return command


def _build_node(name: str, address: str) -> NodeSettings:
    try:
        url = f"ssh://{SSH_USER}@{address}:{SSH_PORT}"
        return NodeSettings(name=name, address=address, docker=url, guest=True)
    except ValidationError as error:
        raise InvalidRequest("\n".join(describe_mistakes(error, NodeSettings))) from None


def build_command(node: NodeSettings, guests: GuestSettings, head_key: str, private: str) -> str:
    """Return the one command that the guest's owner runs; `private` is the invitation's key, which serves once."""
    script = _COMMAND.format(
        interface=INTERFACE,
        program=PROGRAM,
        private=private,
        head_key=head_key,
        endpoint=guests.endpoint,
        head=guests.head_address,
        port=guests.service_port,
        address=node.address,
        name=node.name,
        timeout_s=_TIMEOUT_S,
        packages=_PACKAGES,
    )
    return f"sudo sh -c {shlex.quote(script)}"


def forget_guest(name: str, paths: Paths, file: Path) -> None:
    """Remove a guest from the head node: its way in, what is known of it, and its table in cluster.toml."""
    GuestRegistry(paths).remove(name)
    ssh_files(paths.instance).known_hosts(name).unlink(missing_ok=True)
    try:
        cluster_file.replace_file(file, cluster_file.remove_node(file.read_text(encoding="utf-8"), name))
    except NotFound:
        return


def remove_guest(name: str, paths: Paths, file: Path, console: OperatorConsole, restart: Callable[[], None]) -> None:
    """Take a guest out of the cluster, also one that is away."""
    forget_guest(name, paths, file)
    console.write(
        f"  ✓ {name} has no way in any more: its key is removed from WireGuard within some seconds\n"
        f"  - on that machine, its owner runs `gpuhub-node leave`, which removes everything there"
    )
    if paths.used_cluster_file.exists():
        restart()
    console.write(f"{name} is removed.")
