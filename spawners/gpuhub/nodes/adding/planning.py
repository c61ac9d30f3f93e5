"""What adding a machine would come to: its name, its address, its table, and whose host keys it shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gpuhub import settings
from gpuhub.admin.commands import Console
from gpuhub.errors import InvalidRequest, SetupError
from gpuhub.mistakes import describe_mistakes
from gpuhub.nodes.adding import certificates, cluster_file, daemon_tls, hostkeys, steps
from gpuhub.nodes.adding.remote import resolve
from gpuhub.nodes.adding.target import Resolved, Target, build_ssh_url, suggest_name
from gpuhub.paths import Paths
from gpuhub.settings import Cluster, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What was asked for."""

    target: Target
    cluster_file: Path
    name: str | None = None
    address: str | None = None
    tls: bool = False
    yes: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done."""

    node: Node
    #: The settings with the node in them, and their text.
    cluster: Cluster
    text: str
    #: It is in the settings already.
    is_old: bool
    resolved: Resolved
    host_keys: list[hostkeys.HostKey]


def make_plan(wish: Wish, paths: Paths, console: Console) -> Plan:
    """Find out, and have the administrator compare host keys that nobody has seen before.

    Raises:
        GpuhubError: it cannot be added so.
    """
    text = _read(wish.cluster_file)
    cluster = settings.load(wish.cluster_file)
    resolved = resolve(wish.target)
    if resolved.jump is not None:
        raise InvalidRequest(
            f"ssh reaches {wish.target.host} by way of {resolved.jump}: hub and broker need an address that the head "
            "node reaches by itself"
        )
    address = wish.address or steps.find_address(resolved.host)
    old = _find_old(cluster, wish.name, address)
    name = (
        old.name if old is not None else wish.name or suggest_name(wish.target, [node.name for node in cluster.nodes])
    )
    node = _build_node(wish, paths, resolved, name, address)
    fresh = cluster_file.put_node(text, node)
    plan = Plan(
        node=node,
        cluster=cluster_file.check(fresh, wish.cluster_file),
        text=fresh,
        is_old=old is not None,
        resolved=resolved,
        host_keys=hostkeys.scan(resolved.host, resolved.port),
    )
    _compare_host_keys(plan, wish, console)
    return plan


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SetupError(
            f"{file} does not exist, so there is no file to put a node into: copy cluster.example.toml to it, with the "
            "nodes that there are, and see that `sudo make check-cluster` finds it right"
        ) from None


def _find_old(cluster: Cluster, name: str | None, address: str) -> Node | None:
    """The node that is meant, where it is one already.

    Raises:
        InvalidRequest: name and address are of two.
    """
    for node in cluster.nodes:
        if name is not None and (node.name == name) != (node.address == address):
            raise InvalidRequest(
                f"node {node.name} has the address {node.address}, and {name} with {address} is asked for: a name "
                "and an address are one node's. To change one of them: `gpuhub node remove` first"
            )
    return next((node for node in cluster.nodes if node.address == address), None)


def _build_node(wish: Wish, paths: Paths, resolved: Resolved, name: str, address: str) -> Node:
    try:
        if not wish.tls:
            # The address that ssh was tried with; another one for the other nodes changes nothing about it.
            url = build_ssh_url(resolved.user, steps.find_address(resolved.host), resolved.port)
            return Node(name=name, address=address, docker=url)
        host = f"[{address}]" if ":" in address else address
        tls = certificates.client_files(paths, name)
        return Node(name=name, address=address, docker=f"tcp://{host}:{daemon_tls.PORT}", tls=tls)
    except ValidationError as error:
        raise InvalidRequest("\n".join(describe_mistakes(error, Node))) from None


def _compare_host_keys(plan: Plan, wish: Wish, console: Console) -> None:
    host = plan.resolved.host
    known = hostkeys.find_known(host, plan.resolved.port, plan.resolved.known_hosts)
    if hostkeys.is_known(plan.host_keys, known, host):
        return
    shown = "\n".join(f"  {key.kind}  {key.fingerprint}" for key in plan.host_keys)
    console.say(f"{host} was never seen before. Its host keys:\n{shown}")
    if not wish.yes:
        console.confirm(
            "Are they the machine's own (`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there shows one)?"
        )
