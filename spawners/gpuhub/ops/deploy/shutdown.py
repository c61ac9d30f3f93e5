"""`gpuhub down`: stops and removes everything that `gpuhub up` started; data stays."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from gpuhub.backends.plugin import BackendPlugin, find_plugin
from gpuhub.broker.db.stopped_nodes import StoppedNodes, keep_broker_stopped, record_stopped_nodes
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.container_lifecycle import remove_instance_objects, remove_nfs_volumes
from gpuhub.docker.containers.firewall_container import remove_firewall
from gpuhub.docker.services.service_container import list_services, remove_service
from gpuhub.docker.swarm import membership
from gpuhub.nodes.daemon_identity import describe_shared_identities
from gpuhub.ops.console import StepReport
from gpuhub.ops.deploy import programs
from gpuhub.ops.deploy.cluster_choice import find_provider
from gpuhub.ops.deploy.programs import Supervisor

#: Maximum wait until Swarm has ended the tasks of removed containers, after a node's link broke; seconds.
SWARM_TASKS_DEADLINE_S = 30.0
_SWARM_TASKS_POLL_S = 0.5


def stop_hub(paths: Paths, report: StepReport, *, purge: bool = False) -> None:
    """Stop the instance and leave no process, namespace, container, network or mount of it.

    `purge` removes the images that are kept for the next start as well; homes, the database and secrets always stay.

    Raises:
        SetupError: Something is still there; each thing, and each node that could not be cleaned, is named.
    """
    supervisor = Supervisor(paths)
    if supervisor.is_running():
        with report.step("JupyterHub, broker and proxy"):
            # The hub first: it would take the notebooks that are removed below for crashed ones.
            for name in (programs.HUB, programs.BROKER, programs.PROXY):
                supervisor.stop(name)
    uncleaned: list[str] = []
    if paths.used_cluster_file.exists():
        cluster = settings.load(paths.used_cluster_file)
        backend = find_plugin(cluster)
        if backend.capabilities(cluster).containers:
            uncleaned = _clean_nodes(paths, cluster, report)
        if backend.capabilities(cluster).external_jobs:
            _cancel_jobs(paths, cluster, backend, report)
    provider = find_provider()
    with report.step("Processes and namespaces"):
        supervisor.shutdown()
        if provider is not None:
            provider.ensure_down(paths, purge=purge)
        shutil.rmtree(paths.run, ignore_errors=True)
        if purge:
            shutil.rmtree(paths.images, ignore_errors=True)
    leftovers = [] if provider is None else provider.find_leftovers(paths)
    if leftovers:
        raise SetupError("\n".join(["still there after `gpuhub down`:", *leftovers]))
    if uncleaned:
        nodes = ", ".join(uncleaned)
        raise SetupError(
            f"this machine is stopped, but containers, networks or packet filters may still be on {nodes}. Once they "
            "answer, `sudo make up` and then `sudo make down` remove them.\n"
            f"Not cleaned: {nodes}"
        )
    report.note("Stopped. Homes, datasets and images stay; `sudo make up` is quick now.")


def _clean_nodes(paths: Paths, cluster: settings.ClusterSettings, report: StepReport) -> list[str]:
    """Clean every node that answers, and return the names of the others."""
    daemons = DockerClients(cluster.nodes, instance=paths.instance, run_dir=paths.run)
    try:
        with report.step("Containers and networks on every node"), ExitStack() as stack:
            orphan = []
            try:
                stack.enter_context(keep_broker_stopped(paths))
            except SetupError as error:
                orphan.append(str(error))
            cleanup = asyncio.run(clean_nodes(daemons, cluster, paths.instance))
            if not orphan:
                record_stopped_nodes(paths, cleanup.stopped)
    finally:
        daemons.close()
    for text in (*cleanup.failures.values(), *cleanup.warnings, *orphan):
        report.note(f"  not cleaned: {text}")
    # Guests may be away; what is left there is removed when they are back.
    return [name for name in cleanup.failures if not cluster.node(name).guest]


def _cancel_jobs(paths: Paths, cluster: settings.ClusterSettings, backend: BackendPlugin, report: StepReport) -> None:
    """Cancel the backend's jobs that stand for leases; all other jobs stay."""
    with report.step(f"gpuhub's jobs in {backend.title}"):
        try:
            asyncio.run(backend.cancel_jobs(cluster, paths.instance))
        except GpuhubError as error:
            failure = str(error)
        else:
            failure = ""
    if failure:
        report.note(f"  not cancelled: {failure}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCleanup:
    """What `gpuhub down` did on the nodes."""

    #: Node → why it is not clean.
    failures: Mapping[str, str]
    #: Nodes that are proven clean.
    stopped: StoppedNodes
    #: Problems that leave nothing of users on a node.
    warnings: Sequence[str] = ()


async def clean_nodes(daemons: DockerClients, cluster: settings.ClusterSettings, instance: str) -> NodeCleanup:
    """Clean every node that answers."""
    nodes = [node.name for node in cluster.nodes]
    removals = await asyncio.gather(
        *(_remove_containers(daemons, node, instance) for node in nodes), return_exceptions=True
    )
    failures = _find_failures(nodes, removals)
    stopped: StoppedNodes = {
        node: result for node, result in zip(nodes, removals, strict=True) if isinstance(result, str)
    }
    if describe_shared_identities(stopped):
        # One daemon may have answered for two nodes, which proves nothing.
        stopped = {}
    # The firewall goes after the containers that it protects.
    firewalls = await asyncio.gather(
        *(remove_firewall(daemons, instance, node) for node in nodes), return_exceptions=True
    )
    failures = _find_failures(nodes, firewalls) | failures
    # The first node, which manages the Swarm, is last: it holds the definitions of the overlay networks.
    for node in reversed(nodes):
        try:
            await _remove_networks(daemons, node, instance)
        except GpuhubError as error:
            failures.setdefault(node, str(error))
    own_failures = {node for node in failures if not cluster.node(node).guest}
    warnings = await membership.leave_swarm(daemons, cluster) if cluster.has_overlay and not own_failures else []
    in_order = {node: failures[node] for node in nodes if node in failures}
    return NodeCleanup(failures=in_order, stopped=stopped, warnings=warnings)


async def _remove_networks(daemons: DockerClients, node: str, instance: str) -> None:
    """Remove the networks, where necessary once Swarm knows that the removed containers have left them.

    Raises:
        GpuhubError: At least one of them remains.
    """
    end = asyncio.get_running_loop().time() + SWARM_TASKS_DEADLINE_S
    while True:
        try:
            await remove_instance_objects(daemons, node, instance, "network")
        except GpuhubError as error:
            if "in use by task" not in str(error) or asyncio.get_running_loop().time() > end:
                raise
        else:
            return
        await asyncio.sleep(_SWARM_TASKS_POLL_S)


def _find_failures(nodes: Sequence[str], results: Sequence[object]) -> dict[str, str]:
    """Return the errors of the nodes; one that gpuhub does not know is raised."""
    failures = {}
    for node, result in zip(nodes, results, strict=True):
        if isinstance(result, GpuhubError):
            failures[node] = str(result)
        elif isinstance(result, BaseException):
            raise result
    return failures


async def _remove_containers(daemons: DockerClients, node: str, instance: str) -> str:
    """Remove the containers and the definitions of their NFS volumes; users' scratch and the data of services stay.

    Returns the id of the daemon, which lists no container of the instance any more.

    Raises:
        GpuhubError: Something could not be removed.
    """
    # These may have databases, and get time to end.
    services = await list_services(daemons, node)
    await asyncio.gather(*(remove_service(daemons, node, service) for service in services))
    await remove_instance_objects(daemons, node, instance, "container")
    filters = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
    left = await daemons.call(node, "containers", all=True, filters=filters)
    # The id is asked after the list, as another daemon may have replaced the one that was asked before.
    info = await daemons.call(node, "info")
    await remove_nfs_volumes(daemons, node, instance)
    if still_there := [raw for raw in left if raw["Labels"].get(names.LABEL_KIND) not in names.KINDS_WITHOUT_LEASE]:
        raise GpuhubError(f"node {node}: {len(still_there)} containers of users are still there")
    return str(info["ID"])
