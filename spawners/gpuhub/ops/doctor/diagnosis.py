"""`gpuhub doctor`: reads the facts of every node, of the head node and of the room, and checks them.

The checks of a scheduling backend are found by entry point under the backend's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import entry_points
from typing import Protocol

from gpuhub.backends.plugin import find_capabilities
from gpuhub.broker_api.schemas import NodeView
from gpuhub.common.errors import GpuhubError, ImageMissing, InvalidRequest, NodeUnreachable, NotFound
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker import esp_probe
from gpuhub.docker.client import DockerClients
from gpuhub.ops.doctor.findings import Finding, failed, warning
from gpuhub.ops.doctor.head_node import check_head, read_head_facts
from gpuhub.ops.doctor.home_checks import HomeFacts, check_homes, read_home_facts
from gpuhub.ops.doctor.node_facts import DockerFacts, GpuReport, HostFacts
from gpuhub.ops.doctor.nodes import (
    disk_checks,
    link_checks,
    network_checks,
    node_checks,
    node_queries,
    sleeping_nodes,
    storage_checks,
)
from gpuhub.ops.doctor.nodes.node_checks import NodeEnvironment
from gpuhub.ops.doctor.room.room_checks import check_room
from gpuhub.ops.doctor.room.room_temperature import PastReading, check_temperature
from gpuhub.ops.doctor.service_checks import check_services, read_services
from gpuhub.ops.doctor.version_checks import (
    NodeVersions,
    check_cuda,
    check_suspension,
    collect_versions,
    compare_versions,
)
from gpuhub.ops.images.wheels import find_torch_cuda

#: Each entry point is a `BackendReader`; a backend without one has nothing to check.
ENTRY_POINTS = "gpuhub.backend_checks"
HEAD = "head node"
#: Name under which the room is listed among the nodes; it has a space, which no node's name has.
ROOM = "the room"
#: Where Docker keeps its data on the head node, unless a node's daemon there says otherwise.
_DOCKER_ROOT = "/var/lib/docker"


class BackendChecks(Protocol):
    """Facts about a backend's site, and the checks of them."""

    def check_site(self) -> Iterable[Finding]:
        """Check the site as the head node sees it."""

    def extend_environment(self, environment: NodeEnvironment) -> NodeEnvironment:
        """Add what the probe of a node must check for the backend."""

    def check_node(self, node: NodeSettings, host: HostFacts) -> Iterable[Finding]:
        """Check a node; `host` has no facts where the node has no Docker daemon to probe it with."""


BackendReader = Callable[[ClusterSettings, Paths], Awaitable[BackendChecks]]


async def read_backend(cluster: ClusterSettings, paths: Paths) -> BackendChecks | None:
    """Read the facts about the cluster's backend; None where it has nothing to check."""
    for entry_point in entry_points(group=ENTRY_POINTS, name=cluster.engine):
        reader: BackendReader = entry_point.load()
        return await reader(cluster, paths)
    return None


async def diagnose(cluster: ClusterSettings, paths: Paths, names: Sequence[str]) -> list[tuple[str, list[Finding]]]:
    """Return the findings of each named node in the settings' order; without names, also of the head node and the room.

    Raises:
        NotFound: No node has such a name.
    """
    for name in names:
        if name not in {node.name for node in cluster.nodes}:
            raise NotFound(f"there is no node {name!r}; there are {', '.join(node.name for node in cluster.nodes)}")
        if cluster.node(name).guest:
            raise InvalidRequest(f"{name} is a guest: there, `gpuhub-node status` shows its state")
    cluster = cluster.without_guests()
    docker_nodes = cluster.nodes if find_capabilities(cluster).containers else ()
    daemons = DockerClients(docker_nodes, instance=paths.instance, run_dir=paths.run)
    try:
        head = asyncio.create_task(asyncio.to_thread(read_head_facts, cluster, paths))
        histories = asyncio.create_task(_read_histories(daemons, [] if names else docker_nodes))
        power_nodes, reports, daemon_ids, members, backend = await asyncio.gather(
            sleeping_nodes.read_power_nodes(cluster, paths),
            asyncio.gather(*(node_queries.read_gpu_report(daemons, node.name) for node in docker_nodes)),
            node_queries.read_daemon_ids(daemons, [node.name for node in docker_nodes]),
            _read_members(daemons, cluster),
            read_backend(cluster, paths),
        )
        facts = _ClusterFacts(
            image_cuda=await asyncio.to_thread(find_torch_cuda, paths.images / "wheels"),
            gpu_reports=dict(zip((node.name for node in docker_nodes), reports, strict=True)),
            is_running=bool((await head).programs),
            daemon_ids=daemon_ids,
            swarm_members=members,
            backend=backend,
            power_nodes=power_nodes,
        )
        chosen = [node for node in cluster.nodes if not names or node.name in names]
        diagnoses = await asyncio.gather(*(_diagnose_node(daemons, cluster, paths, node, facts) for node in chosen))
        by_node = dict(zip((node.name for node in chosen), diagnoses, strict=True))
        site_findings = () if backend is None else backend.check_site()
        machines = []
        if not names:
            homes = await _read_homes(daemons, cluster, paths, docker_nodes)
            services = await read_services(paths) if cluster.services and facts.is_running else []
            findings = [*check_head(await head), *check_homes(homes), *check_services(services), *site_findings]
            machines.append((HEAD, findings))
            machines.append((ROOM, [*check_room(cluster, facts.gpu_reports), *check_temperature(await histories)]))
        return [*machines, *add_differences(by_node)]
    finally:
        daemons.close()


async def _read_histories(daemons: DockerClients, nodes: Sequence[NodeSettings]) -> dict[str, list[PastReading]]:
    histories = await asyncio.gather(*(node_queries.read_agent_history(daemons, node.name) for node in nodes))
    return dict(zip((node.name for node in nodes), histories, strict=True))


async def _read_homes(
    daemons: DockerClients, cluster: ClusterSettings, paths: Paths, docker_nodes: Sequence[NodeSettings]
) -> HomeFacts | None:
    docker_root = _DOCKER_ROOT
    local = next(filter(is_local, docker_nodes), None)
    if local is not None:
        with suppress(GpuhubError):
            docker_root = (await node_queries.read_docker_facts(daemons, local.name)).root
    return await read_home_facts(cluster.storage, {"the broker": str(paths.state), "Docker": docker_root})


def is_local(node: NodeSettings) -> bool:
    """Return whether a node's Docker daemon is the head node's own."""
    return node.docker.startswith("unix://")


async def _read_members(daemons: DockerClients, cluster: ClusterSettings) -> dict[str, str] | None:
    return await node_queries.read_swarm_members(daemons, cluster) if find_capabilities(cluster).containers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterFacts:
    """Facts about the cluster as a whole."""

    #: The CUDA version of the image's torch; None where unknown, or without CUDA.
    image_cuda: str | None
    #: Node → the report of its GPU agent.
    gpu_reports: Mapping[str, GpuReport]
    #: Whether gpuhub runs, and with it an agent on each node.
    is_running: bool
    #: Node → the id of its Docker daemon; nodes that do not answer are not in it.
    daemon_ids: Mapping[str, str]
    swarm_members: Mapping[str, str] | None
    backend: BackendChecks | None
    #: The nodes that may sleep as the broker shows them; none while it does not run.
    power_nodes: Mapping[str, NodeView] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDiagnosis:
    """The findings about a node, and its versions for the comparison with the other nodes."""

    findings: list[Finding]
    versions: NodeVersions = field(default_factory=NodeVersions)


def add_differences(diagnoses: Mapping[str, NodeDiagnosis]) -> list[tuple[str, list[Finding]]]:
    """Return each node's findings, with those about versions that differ from the other nodes'."""
    differences = compare_versions({name: diagnosis.versions for name, diagnosis in diagnoses.items()})
    return [(name, [*diagnosis.findings, *differences.get(name, ())]) for name, diagnosis in diagnoses.items()]


async def _diagnose_node(
    daemons: DockerClients,
    cluster: ClusterSettings,
    paths: Paths,
    node: NodeSettings,
    facts: _ClusterFacts,
) -> NodeDiagnosis:
    backend = facts.backend
    if not find_capabilities(cluster).containers:
        return NodeDiagnosis(findings=[] if backend is None else list(backend.check_node(node, HostFacts())))
    view = facts.power_nodes.get(node.name)
    sleep = None if view is None else sleeping_nodes.check_sleep(view)
    if sleep is not None:
        return NodeDiagnosis(findings=[sleep])
    try:
        docker = await node_queries.read_docker_facts(daemons, node.name)
    except GpuhubError as error:
        finding = failed("docker", _without_name(str(error), node.name), _advise(node, error))
        return NodeDiagnosis(findings=[finding])
    environment = replace(
        await asyncio.to_thread(node_queries.read_environment, cluster, paths, node.address),
        data_address=node.data_address or "",
        data_interface=(node.data_interface or "") if cluster.has_data_network else "",
        swarm_members=facts.swarm_members,
        firewall_status=await node_queries.read_firewall_status(daemons, node.name),
        image_dates=await node_queries.read_image_dates(daemons, cluster, node.name),
        other_gpus={
            gpu.uuid: name for name, report in facts.gpu_reports.items() if name != node.name for gpu in report.gpus
        },
        other_daemons={daemon_id: name for name, daemon_id in facts.daemon_ids.items() if name != node.name},
    )
    if cluster.has_encrypted_overlay:
        environment = replace(environment, encryption_error=await _find_encryption_error(daemons, node.name))
    if backend is not None:
        environment = backend.extend_environment(environment)
    arguments = node_queries.build_probe_arguments(environment, docker.root)
    try:
        host = await node_queries.probe_node(daemons, node.name, arguments)
    except GpuhubError as error:
        advice = "`sudo make up` sends it" if isinstance(error, ImageMissing) else "`gpuhub doctor` again"
        not_probed = warning("inside", f"not checked: {_without_name(str(error), node.name)}", advice)
        return NodeDiagnosis(findings=[*check_docker_facts(docker, environment), not_probed])
    host = add_gpu_report(host, facts.gpu_reports[node.name], is_running=facts.is_running)
    versions = collect_versions(docker, host)
    findings = [*check_node(docker, host, environment), *check_cuda(versions.driver, facts.image_cuda)]
    findings += check_suspension(versions.driver) if cluster.moves_gpu_memory else []
    findings += [] if view is None else sleeping_nodes.check_power(view)
    if backend is not None:
        findings += backend.check_node(node, host)
    return NodeDiagnosis(findings=findings, versions=versions)


def add_gpu_report(host: HostFacts, report: GpuReport, *, is_running: bool) -> HostFacts:
    """Add what the GPU agent says: nvidia-smi finds no GPU in the container of the probe, which has none."""
    return replace(
        host,
        gpus=report.gpus,
        gpu_error=report.error,
        gpu_advice=report.advice,
        failed_gpus=report.failed_gpus,
        gpu_warnings=report.gpu_warnings,
        is_unread=not (report.has_agent or is_running),
        toolkit="" if host.toolkit is None and report.has_agent else host.toolkit,
    )


async def _find_encryption_error(daemons: DockerClients, node: str) -> str | None:
    try:
        return await esp_probe.find_error(daemons, node)
    except GpuhubError as error:
        return f"not checked: {_without_name(str(error), node)}"


def check_docker_facts(docker: DockerFacts, environment: node_checks.NodeEnvironment) -> list[Finding]:
    """Check the facts that the daemon reported."""
    return [
        *node_checks.check_docker(docker),
        *node_checks.check_identity(docker, environment),
        node_checks.check_clock(docker),
        *network_checks.check_swarm(docker, environment),
        *disk_checks.check_images(environment, datetime.now(UTC).date()),
    ]


def check_node(docker: DockerFacts, host: HostFacts, environment: node_checks.NodeEnvironment) -> list[Finding]:
    """Check the facts of the daemon and of the machine."""
    return [
        *check_docker_facts(docker, environment),
        *node_checks.check_system(host),
        *disk_checks.check_disks(docker.root, host, environment),
        *node_checks.check_gpus(host, docker, environment),
        *network_checks.check_reach(host, environment),
        *storage_checks.check_nfs_client(host, environment),
        *network_checks.check_network(host, environment),
        *link_checks.check_link(host.link),
        *link_checks.check_data_link(host, environment.data_address),
        *link_checks.describe_data_network(environment.data_interface),
        *node_checks.check_accounts(host, environment),
    ]


def _without_name(text: str, node: str) -> str:
    return text.removeprefix(f"node {node}: ")


def _advise(node: NodeSettings, error: GpuhubError) -> str:
    if not isinstance(error, NodeUnreachable):
        return "see Docker's log there"
    if is_local(node):
        return "start Docker on this machine"
    repair = f"`gpuhub node add` repairs it: with the machine's user and address, and --name {node.name}"
    return f"start the machine, or let its address through the firewall; with another key or certificate, {repair}"
