"""`gpuhub node add`: look, show, ask, and only then change something; done again, it mends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from gpuhub import secrets
from gpuhub.admin.commands import Console
from gpuhub.containers import swarm
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.ssh import ssh_files
from gpuhub.errors import GpuhubError, SetupError
from gpuhub.nodes.adding import cluster_file, steps
from gpuhub.nodes.adding.firewall import describe_firewall
from gpuhub.nodes.adding.planning import Plan, Wish, make_plan
from gpuhub.nodes.adding.remote import Remote
from gpuhub.nodes.adding.securing import Secured, secure
from gpuhub.nodes.doctor import checks, looking
from gpuhub.nodes.doctor.examining import check_answering
from gpuhub.nodes.doctor.facts import DockerFacts, HostFacts, parse_probe, probe_script
from gpuhub.nodes.doctor.findings import Finding, failed, format_findings, has_failed, ok
from gpuhub.paths import Paths


def add(wish: Wish, paths: Paths, console: Console, bring_up: Callable[[], None] | None) -> None:
    """Add the machine, or mend the node that it is already; `bring_up` is called at the end where it is wished.

    Raises:
        GpuhubError: with what to do; nothing is changed unless the text says so.
    """
    plan = make_plan(wish, paths, console)
    with Remote(wish.target, plan.host_keys) as remote:
        docker, host = _look(remote, wish, plan, paths, console)
        _show(plan, paths, console)
        if wish.dry_run:
            console.say("Nothing was changed: that is what --dry-run is for.")
            return
        if not wish.yes:
            console.confirm(f"Mend {plan.node.name}?" if plan.is_old else f"Add {plan.node.name}?")
        secrets.ensure_secrets(paths)
        if wish.tls:
            live_restore = docker is not None and docker.live_restore
            machine = Secured(node=plan.node, host=host, live_restore=live_restore, yes=wish.yes)
            # For logging in when it leaves.
            steps.remember(ssh_files(paths.instance), plan.node.name, plan.host_keys)
            secure(remote, machine, paths, console)
        else:
            _let_in(remote, plan, paths, console)
    asyncio.run(_join(plan, paths, console))
    if wish.cluster_file.read_text(encoding="utf-8") != plan.text:
        before = cluster_file.write(wish.cluster_file, plan.text)
        console.say(f"  ✓ {wish.cluster_file} has the node now; what it was before is in {before.name}")
    if bring_up is not None:
        bring_up()
    else:
        console.say(f"`sudo make up` sends images to {plan.node.name}, and has hub and broker use it.")
    if len(plan.cluster.nodes) == 2 and not plan.is_old:
        console.say(
            "From two nodes on, networks span nodes and everything speaks TLS: notebooks that run now must be stopped "
            "and started again to launch on GPUs."
        )


def _look(
    remote: Remote, wish: Wish, plan: Plan, paths: Paths, console: Console
) -> tuple[DockerFacts | None, HostFacts]:
    """Everything that can be known before anything is changed."""
    console.say(f"{plan.node.name} ({plan.node.address}):")
    gpus, members = asyncio.run(steps.look_at_others(plan.cluster, paths, plan.node.name))
    around = replace(
        looking.look_around(plan.cluster, plan.node.address, is_new=not plan.is_old),
        members=members,
        other_gpus={gpu.uuid: name for name, cards in gpus.items() for gpu in cards},
    )
    docker, trouble = _ask_docker(remote, plan, paths)
    root = "/var/lib/docker" if docker is None else docker.root
    host = parse_probe(remote.run(probe_script(), looking.words_for(around, root)))
    findings: list[Finding] = [
        ok("ssh", f"{host.user} on {plan.resolved.host}, port {plan.resolved.port}"),
        *checks.check_login(host, needs_sudo=wish.tls, is_tls=wish.tls),
        *_check_manager(plan),
    ]
    if docker is not None:
        findings += check_answering(docker, around)
    elif host.socket == "usable" or wish.tls:
        findings.append(failed("docker", trouble, "have Docker run there, and sshd allow forwarding of sockets"))
    findings += [
        *checks.check_system(host),
        *checks.check_gpus(host, docker, around),
        *checks.check_reach(host, around),
        *checks.check_network(host, around),
        *checks.check_accounts(host, around),
    ]
    console.say(format_findings(findings, console.width))
    if has_failed(findings):
        raise SetupError(f"{plan.node.name} was not added, and nothing was changed: mend what failed, and try again")
    return docker, host


def _ask_docker(remote: Remote, plan: Plan, paths: Paths) -> tuple[DockerFacts | None, str]:
    try:
        return asyncio.run(steps.look_through(remote.bring_docker(), plan.node, paths)), ""
    except GpuhubError as error:
        return None, str(error)


def _check_manager(plan: Plan) -> list[Finding]:
    first = swarm.manager(plan.cluster)
    if not plan.cluster.has_overlay or not _is_loopback(first.address):
        return []
    return [
        failed(
            "first node",
            f"{first.name} has the address {first.address}, where no other node reaches it",
            f"give {first.name} its address on the nodes' network in cluster.toml",
        )
    ]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _show(plan: Plan, paths: Paths, console: Console) -> None:
    console.say("\nIn cluster.toml:\n")
    console.say(cluster_file.format_node(plan.node))
    console.say("\nThe packet filter that the broker keeps on it:\n")
    console.say(describe_firewall(plan.cluster, plan.node, paths))


def _let_in(remote: Remote, plan: Plan, paths: Paths, console: Console) -> None:
    files, name = ssh_files(paths.instance), plan.node.name
    steps.let_key_in(remote, files, paths.instance, name, plan.host_keys)
    try:
        version = asyncio.run(steps.verify(plan.node, paths))
    except SetupError as error:
        if not plan.is_old:
            steps.take_key_out(remote, files)
            files.known_hosts(name).unlink(missing_ok=True)
        raise SetupError(
            f"{error}. The key was taken out again. sshd there must allow AuthorizedKeysFile .ssh/authorized_keys, "
            "PubkeyAuthentication and AllowStreamLocalForwarding"
        ) from None
    console.say(f"  ✓ Docker {version} answers to gpuhub's own key, which can do nothing else there")


async def _join(plan: Plan, paths: Paths, console: Console) -> None:
    if not plan.cluster.has_overlay:
        return
    daemons = Daemons(plan.cluster.nodes, instance=paths.instance, run_dir=paths.run)
    try:
        await swarm.ensure_member(daemons, plan.cluster, plan.node)
    finally:
        daemons.close()
    console.say("  ✓ member of the Swarm that keeps users' networks")
