"""`gpuhub node add`: checks a machine, shows the changes, asks, and adds it; run again, it repairs the node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from gpuhub.common import secrets
from gpuhub.common.errors import GpuhubError, InvalidRequest, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.base import describe_mistakes
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker import ssh
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.firewall_container import build_node_policy
from gpuhub.docker.ssh import ssh_files
from gpuhub.docker.swarm import membership
from gpuhub.firewall.rules import describe_rules
from gpuhub.ops.console import OperatorConsole
from gpuhub.ops.doctor.diagnosis import check_docker_facts
from gpuhub.ops.doctor.findings import Finding, failed, format_findings, has_failed, ok
from gpuhub.ops.doctor.node_facts import DockerFacts, HostFacts, parse_probe, read_probe_script
from gpuhub.ops.doctor.nodes import network_checks, node_checks, node_queries
from gpuhub.ops.provision import cluster_file, node_access
from gpuhub.ops.provision.node_access import TlsSetupRequest, set_up_tls
from gpuhub.ops.provision.ssh_session import (
    ResolvedTarget,
    SshSession,
    SshTarget,
    build_ssh_url,
    resolve_direct_target,
    suggest_name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """The arguments and options of `gpuhub node add`."""

    target: SshTarget
    cluster_file: Path
    name: str | None = None
    address: str | None = None
    tls: bool = False
    data_interface: str | None = None
    yes: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPlan:
    """The changes that add the node."""

    node: NodeSettings
    #: The settings with the node in them.
    cluster: ClusterSettings
    #: The text of the file, still without the node.
    text: str
    #: The node is in the settings already.
    is_known: bool
    resolved: ResolvedTarget
    #: The host keys that were known or confirmed.
    host_keys: list[ssh.HostKey]


def add_node(
    request: JoinRequest, paths: Paths, console: OperatorConsole, start_services: Callable[[], None] | None
) -> None:
    """Add the machine, or repair the node if it is one already.

    Args:
        start_services: Called at the end; None to leave the services as they are.

    Raises:
        GpuhubError: With the remedy; nothing is changed unless the text names it.
    """
    plan = build_join_plan(request, paths, console)
    with SshSession(request.target, plan.host_keys) as session:
        docker, host = _check_machine(session, request, plan, paths, console)
        _show_changes(plan, paths, console)
        if request.dry_run:
            console.write("Nothing was changed, because of --dry-run.")
            return
        if not request.yes:
            console.confirm(f"Repair {plan.node.name}?" if plan.is_known else f"Add {plan.node.name}?")
        if _read_settings(request.cluster_file) != plan.text:
            raise SetupError(f"{request.cluster_file} was changed in the meantime: run the command again")
        secrets.ensure_secrets(paths)
        if request.tls:
            live_restore = docker is not None and docker.live_restore
            tls_request = TlsSetupRequest(
                node=plan.node, host=host, live_restore=live_restore, skip_confirmation=request.yes
            )
            # `gpuhub node remove` logs in with them.
            node_access.store_host_keys(ssh_files(paths.instance), plan.node.name, plan.host_keys)
            set_up_tls(session, tls_request, paths, console)
        else:
            _authorize(session, plan, paths, console)
    asyncio.run(_join_swarm(plan, paths, console))
    # Not the text of the plan: another node may have been added since.
    text = _read_settings(request.cluster_file)
    new_text = cluster_file.put_node(text, plan.node)
    if new_text != text:
        cluster_file.check_text(new_text, request.cluster_file)
        before = cluster_file.replace_file(request.cluster_file, new_text)
        console.write(f"  ✓ {request.cluster_file} has the node now; the previous file is {before.name}")
    if start_services is not None:
        start_services()
    else:
        console.write(f"`sudo make up` sends images to {plan.node.name}, and lets hub and broker use it.")
    if len(plan.cluster.nodes) == 2 and not plan.is_known:
        console.write(
            "From two nodes on, networks span nodes and everything speaks TLS: notebooks that run now must be stopped "
            "and started again to launch on GPUs."
        )


def _check_machine(
    session: SshSession, request: JoinRequest, plan: JoinPlan, paths: Paths, console: OperatorConsole
) -> tuple[DockerFacts | None, HostFacts]:
    """Check everything that can be checked before a change, and return the facts of its Docker and of itself."""
    console.write(f"{plan.node.name} ({plan.node.address}):")
    gpus, daemon_ids, members = asyncio.run(node_access.query_other_nodes(plan.cluster, paths, plan.node.name))
    environment = replace(
        node_queries.read_environment(plan.cluster, paths, plan.node.address, is_new=not plan.is_known),
        swarm_members=members,
        other_gpus={gpu.uuid: name for name, node_gpus in gpus.items() for gpu in node_gpus},
        other_daemons={daemon_id: name for name, daemon_id in daemon_ids.items()},
    )
    docker, problem = _query_docker(session, plan, paths)
    root = "/var/lib/docker" if docker is None else docker.root
    host = parse_probe(session.run(read_probe_script(), node_queries.build_probe_arguments(environment, root)))
    findings: list[Finding] = [
        ok("ssh", f"{host.user} on {plan.resolved.host}, port {plan.resolved.port}"),
        *node_checks.check_login(host, needs_sudo=request.tls, is_tls=request.tls),
        *_check_managers(plan),
    ]
    if docker is not None:
        findings += check_docker_facts(docker, environment)
    elif host.socket == "usable" or request.tls:
        findings.append(failed("docker", problem, "start Docker there, and let sshd allow forwarding of sockets"))
    findings += [
        *node_checks.check_system(host),
        *node_checks.check_gpus(host, docker, environment),
        *network_checks.check_reach(host, environment),
        *network_checks.check_network(host, environment),
        *node_checks.check_accounts(host, environment),
    ]
    console.write(format_findings(findings, console.width))
    if has_failed(findings):
        raise SetupError(f"{plan.node.name} was not added, and nothing was changed: repair what failed, and try again")
    return docker, host


def _query_docker(session: SshSession, plan: JoinPlan, paths: Paths) -> tuple[DockerFacts | None, str]:
    try:
        return asyncio.run(node_access.query_docker(session.forward_docker_socket(), plan.node, paths)), ""
    except GpuhubError as error:
        return None, str(error)


def _check_managers(plan: JoinPlan) -> list[Finding]:
    return [
        failed(
            "nodes",
            f"{node.name} has the address {node.address}, which no other node can reach",
            f"give {node.name} its address on the nodes' network in cluster.toml",
        )
        for node in plan.cluster.swarm_managers
        if plan.cluster.has_overlay and _is_loopback(node.address)
    ]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _show_changes(plan: JoinPlan, paths: Paths, console: OperatorConsole) -> None:
    console.write("\nIn cluster.toml:\n")
    console.write(cluster_file.format_node(plan.node))
    console.write("\nThe packet filter that the broker keeps on it:\n")
    console.write(describe_firewall(plan.cluster, plan.node, paths))


def _authorize(session: SshSession, plan: JoinPlan, paths: Paths, console: OperatorConsole) -> None:
    files, name = ssh_files(paths.instance), plan.node.name
    node_access.authorize_key(session, files, paths.instance, name, plan.host_keys)
    try:
        version = asyncio.run(node_access.verify_docker(plan.node, paths))
    except SetupError as error:
        removed = ""
        if not plan.is_known:
            node_access.revoke_key(session, files)
            files.known_hosts(name).unlink(missing_ok=True)
            removed = " The key was removed again."
        raise SetupError(
            f"{error}.{removed} sshd there must allow AuthorizedKeysFile .ssh/authorized_keys, "
            "PubkeyAuthentication and AllowStreamLocalForwarding"
        ) from None
    console.write(f"  ✓ Docker {version} answers to gpuhub's own key, which allows nothing else there")


async def _join_swarm(plan: JoinPlan, paths: Paths, console: OperatorConsole) -> None:
    if not plan.cluster.has_overlay:
        return
    daemons = DockerClients(plan.cluster.nodes, instance=paths.instance, run_dir=paths.run)
    try:
        warning = await membership.ensure_member(daemons, plan.cluster, plan.node)
    finally:
        daemons.close()
    console.write("  ✓ member of the Swarm that keeps users' networks")
    if warning is not None:
        console.write(f"  ! {warning}")


def build_join_plan(request: JoinRequest, paths: Paths, console: OperatorConsole) -> JoinPlan:
    """Build the plan, and let the administrator compare host keys that are new.

    Raises:
        GpuhubError: The machine cannot be added with these arguments.
    """
    text = _read_settings(request.cluster_file)
    cluster = settings.load(request.cluster_file)
    resolved = resolve_direct_target(request.target)
    address = request.address or node_access.find_address(resolved.host)
    existing = _find_existing_node(cluster, request.name, address)
    name = (
        existing.name
        if existing is not None
        else request.name or suggest_name(request.target, [node.name for node in cluster.nodes])
    )
    node = _build_node(request, paths, resolved, name, address)
    return JoinPlan(
        node=node,
        cluster=cluster_file.check_text(cluster_file.put_node(text, node), request.cluster_file),
        text=text,
        is_known=existing is not None,
        resolved=resolved,
        host_keys=verify_host_keys(resolved, ssh_files(paths.instance), name, console, is_confirmed=request.yes),
    )


def _read_settings(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SetupError(
            f"{file} does not exist, so no node can be added to it: copy cluster.example.toml to it, with the "
            "existing nodes, and check it with `sudo make check-cluster`"
        ) from None


def _find_existing_node(cluster: ClusterSettings, name: str | None, address: str) -> NodeSettings | None:
    """Return the node with this name and address; None if there is none yet.

    Raises:
        InvalidRequest: Name and address belong to different nodes.
    """
    for node in cluster.nodes:
        if name is not None and (node.name == name) != (node.address == address):
            raise InvalidRequest(
                f"node {node.name} has the address {node.address}, and {name} with {address} was requested: a name "
                "and an address belong to one node. To change one of them, `gpuhub node remove` first"
            )
    return next((node for node in cluster.nodes if node.address == address), None)


def _build_node(request: JoinRequest, paths: Paths, resolved: ResolvedTarget, name: str, address: str) -> NodeSettings:
    try:
        if not request.tls:
            # The address that ssh uses; the other nodes may use another one.
            url = build_ssh_url(resolved.user, node_access.find_address(resolved.host), resolved.port)
            return NodeSettings(name=name, address=address, docker=url, data_interface=request.data_interface)
        host = f"[{address}]" if ":" in address else address
        tls = node_access.find_client_files(paths, name)
        return NodeSettings(
            name=name,
            address=address,
            docker=f"tcp://{host}:{node_access.DOCKER_TLS_PORT}",
            tls=tls,
            data_interface=request.data_interface,
        )
    except ValidationError as error:
        raise InvalidRequest("\n".join(describe_mistakes(error, NodeSettings))) from None


def verify_host_keys(
    resolved: ResolvedTarget, files: ssh.SshFiles, name: str, console: OperatorConsole, *, is_confirmed: bool
) -> list[ssh.HostKey]:
    """Return the machine's keys that ssh or gpuhub knows; of a new machine one key, which the administrator compares.

    Keys of other kinds are left out, since nothing shows that they are the same machine's.

    Raises:
        SetupError: The machine shows other keys than the known ones, or no SSH server answers.
    """
    host = resolved.host
    shown = ssh.scan_host_keys(host, resolved.port)
    known_keys = files.read_host_keys(name) + ssh.find_known_keys(host, resolved.port, resolved.known_hosts)
    trusted_keys = ssh.select_known_keys(shown, known_keys, host, files.known_hosts(name))
    if not trusted_keys:
        key = ssh.choose_key(shown)
        console.write(f"{host} is new to ssh. Its host key:\n  {key.kind}  {key.fingerprint}")
        if not is_confirmed:
            console.confirm(
                "Is this a key of the machine (`for key in /etc/ssh/ssh_host_*_key.pub; do ssh-keygen -lf $key; done` "
                "there shows all of them)?"
            )
        trusted_keys = [key]
    unknown = ", ".join(f"{key.kind} {key.fingerprint}" for key in shown if key not in trusted_keys)
    if unknown:
        console.write(f"Host keys that {host} also shows, and that were not compared, are not trusted: {unknown}")
    return trusted_keys


def describe_firewall(cluster: ClusterSettings, node: NodeSettings, paths: Paths) -> str:
    """Return the rules that the broker sets there, or would set with `network.guard`."""
    return describe_rules(cluster, node, build_node_policy(cluster, paths.instance, node.name))
