"""`gpuhub doctor`: every node and the head node, looked at and judged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuhub.containers.daemons import Daemons
from gpuhub.errors import GpuhubError, ImageMissing, NodeUnreachable, NotFound
from gpuhub.nodes.doctor import checks, looking, slurm_checks, slurm_looking
from gpuhub.nodes.doctor.facts import DockerFacts, GpuFacts, HostFacts
from gpuhub.nodes.doctor.findings import Finding, failed, warning
from gpuhub.nodes.doctor.head_checks import check_head
from gpuhub.nodes.doctor.heading import look_at_head
from gpuhub.nodes.doctor.slurm_facts import SlurmFacts
from gpuhub.paths import Paths
from gpuhub.settings import Cluster, Node

HEAD = "head node"


async def examine(cluster: Cluster, paths: Paths, wanted: Sequence[str]) -> list[tuple[str, list[Finding]]]:
    """The head node's findings and those of the wanted nodes (all, where none is named), in the settings' order.

    Raises:
        NotFound: there is no such node.
    """
    for name in wanted:
        if name not in {node.name for node in cluster.nodes}:
            raise NotFound(f"there is no node {name!r}; there are {', '.join(node.name for node in cluster.nodes)}")
    docked = cluster.nodes if cluster.has_docker else ()
    daemons = Daemons(docked, instance=paths.instance, run_dir=paths.run)
    try:
        head = asyncio.create_task(asyncio.to_thread(look_at_head, cluster, paths))
        cards, members, slurm = await asyncio.gather(
            asyncio.gather(*(looking.read_gpus(daemons, node.name) for node in docked)),
            _read_members(daemons, cluster),
            _ask_slurm(cluster, paths),
        )
        gpus = dict(zip((node.name for node in docked), cards, strict=True))
        known = _Known(gpus=gpus, members=members, slurm=slurm)
        chosen = [node for node in cluster.nodes if not wanted or node.name in wanted]
        found = await asyncio.gather(*(_examine_node(daemons, cluster, node, known) for node in chosen))
        machines = [] if wanted else [(HEAD, [*check_head(await head), *_check_slurm(cluster, slurm)])]
        await head
        return [*machines, *zip((node.name for node in chosen), found, strict=True)]
    finally:
        daemons.close()


async def _read_members(daemons: Daemons, cluster: Cluster) -> frozenset[str] | None:
    return await looking.read_members(daemons, cluster) if cluster.has_docker else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slurm:
    """The site, and the users' numbers that its nodes must know."""

    facts: SlurmFacts
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What was found of the cluster as a whole."""

    gpus: Mapping[str, tuple[GpuFacts, ...]]
    members: frozenset[str] | None
    slurm: _Slurm | None


async def _ask_slurm(cluster: Cluster, paths: Paths) -> _Slurm | None:
    if cluster.engine == "builtin":
        return None
    return _Slurm(facts=await slurm_looking.look_at_slurm(cluster), numbers=slurm_looking.find_numbers(cluster, paths))


def _check_slurm(cluster: Cluster, slurm: _Slurm | None) -> list[Finding]:
    return [] if slurm is None else list(slurm_checks.check_slurm(slurm.facts, cluster.slurm))


async def _examine_node(
    daemons: Daemons,
    cluster: Cluster,
    node: Node,
    known: _Known,
) -> list[Finding]:
    slurm = known.slurm
    if slurm is not None and not cluster.has_docker:
        return list(slurm_checks.check_slurm_node(node, HostFacts(), slurm.facts, cluster.slurm, {}))
    try:
        docker = await looking.look_at_docker(daemons, node.name)
    except GpuhubError as error:
        return [failed("docker", _without_name(str(error), node.name), _advice(node, error))]
    around = replace(
        await asyncio.to_thread(looking.look_around, cluster, node.address),
        members=known.members,
        guard=await looking.read_guard(daemons, node.name),
        other_gpus={gpu.uuid: name for name, cards in known.gpus.items() if name != node.name for gpu in cards},
    )
    if slurm is not None:
        around = replace(around, accounts=slurm.numbers, slurm=slurm_looking.paths_on_nodes(cluster.slurm, slurm.facts))
    try:
        host = await looking.look_inside(daemons, node.name, looking.words_for(around, docker.root))
    except GpuhubError as error:
        advice = "`sudo make up` sends it" if isinstance(error, ImageMissing) else "`gpuhub doctor` again"
        unseen = warning("inside", f"not looked at: {_without_name(str(error), node.name)}", advice)
        return [*check_answering(docker, around), unseen]
    cards = known.gpus[node.name]
    toolkit = host.toolkit if host.toolkit is not None or not cards else ""
    # From within a container without cards nvidia-smi tells nothing; the GPU agent does.
    host = replace(host, gpus=cards, gpu_error="", toolkit=toolkit)
    found = check_all(docker, host, around)
    if slurm is not None:
        found += slurm_checks.check_slurm_node(node, host, slurm.facts, cluster.slurm, slurm.numbers)
    return found


def check_answering(docker: DockerFacts, around: checks.Around) -> list[Finding]:
    """What the daemon's answers alone tell. Pure."""
    return [*checks.check_docker(docker), checks.check_clock(docker), *checks.check_swarm(docker, around)]


def check_all(docker: DockerFacts, host: HostFacts, around: checks.Around) -> list[Finding]:
    """What the daemon and the machine tell. Pure."""
    return [
        *check_answering(docker, around),
        *checks.check_system(host),
        *checks.check_gpus(host, docker, around),
        *checks.check_reach(host, around),
        *checks.check_network(host, around),
        *checks.check_accounts(host, around),
    ]


def _without_name(text: str, node: str) -> str:
    return text.removeprefix(f"node {node}: ")


def _advice(node: Node, error: GpuhubError) -> str:
    if not isinstance(error, NodeUnreachable):
        return "see Docker's own log there"
    if node.docker.startswith("unix://"):
        return "start Docker on this machine"
    again = f"`gpuhub node add` mends it: the machine's address and user again, and --name {node.name}"
    return f"start the machine, or let its address through the firewall; with another key or certificate, {again}"
