"""`gpuhub down`: stops and removes everything that `gpuhub up` started; data stays."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import ExitStack

from gpuhub.backends.plugin import BackendPlugin, find_plugin
from gpuhub.broker.db.stopped_nodes import StoppedNodes, keep_broker_stopped, record_stopped_nodes
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.docker import swarm
from gpuhub.docker.client import DockerClients
from gpuhub.docker.container_lifecycle import remove_instance_objects, remove_nfs_volumes
from gpuhub.docker.firewall_container import remove_firewall
from gpuhub.nodes.daemon_identity import describe_shared_identities
from gpuhub.ops.console import StepReport
from gpuhub.ops.deploy import programs
from gpuhub.ops.deploy.cluster_choice import find_provider
from gpuhub.ops.deploy.programs import Supervisor


def stop_hub(paths: Paths, report: StepReport, *, purge: bool = False) -> None:
    """Stop the instance and leave no process, namespace, container, network or mount of it.

    `purge` removes the images that are kept for the next start as well; homes, the database and secrets always stay.

    Raises:
        SetupError: Something is still there; each thing is named.
    """
    supervisor = Supervisor(paths)
    if supervisor.is_running():
        with report.step("JupyterHub, broker and proxy"):
            # The hub first: it would take the notebooks that are removed below for crashed ones.
            for name in (programs.HUB, programs.BROKER, programs.PROXY):
                supervisor.stop(name)
    if paths.used_cluster_file.exists():
        cluster = settings.load(paths.used_cluster_file)
        backend = find_plugin(cluster)
        if backend.capabilities(cluster).containers:
            _clean_nodes(paths, cluster, report)
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
    report.note("Stopped. Homes, datasets and images stay; `sudo make up` is quick now.")


def _clean_nodes(paths: Paths, cluster: settings.ClusterSettings, report: StepReport) -> None:
    daemons = DockerClients(cluster.nodes, instance=paths.instance, run_dir=paths.run)
    try:
        with report.step("Containers and networks on every node"), ExitStack() as stack:
            orphan = None
            try:
                stack.enter_context(keep_broker_stopped(paths))
            except SetupError as error:
                orphan = str(error)
            failures, stopped = asyncio.run(_clean_all(daemons, cluster, paths.instance))
            if orphan is None:
                record_stopped_nodes(paths, stopped)
            else:
                failures.append(orphan)
    finally:
        daemons.close()
    for failure in failures:
        report.note(f"  not cleaned: {failure}")


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


async def _clean_all(
    daemons: DockerClients, cluster: settings.ClusterSettings, instance: str
) -> tuple[list[str], StoppedNodes]:
    """Clean every node that answers; return a line for each one that does not, and the nodes that are proven clean."""
    removals = await asyncio.gather(
        *(_remove_containers(daemons, node.name, instance) for node in cluster.nodes), return_exceptions=True
    )
    failures = [str(result) for result in removals if isinstance(result, BaseException)]
    stopped: StoppedNodes = {
        node.name: result for node, result in zip(cluster.nodes, removals, strict=True) if isinstance(result, str)
    }
    if describe_shared_identities(stopped):
        # One daemon may have answered for two nodes, which proves nothing.
        stopped = {}
    # The firewall goes after the containers that it protects.
    results = await asyncio.gather(
        *(remove_firewall(daemons, instance, node.name) for node in cluster.nodes), return_exceptions=True
    )
    failures += [str(result) for result in results if isinstance(result, BaseException)]
    # The manager of the Swarm (the first node) is last: it holds the definitions of the overlay networks.
    for node in reversed(cluster.nodes):
        try:
            await remove_instance_objects(daemons, node.name, instance, "network")
        except GpuhubError as error:
            failures.append(str(error))
    if cluster.has_overlay and not failures:
        failures += await swarm.leave_swarm(daemons, cluster)
    return failures, stopped


async def _remove_containers(daemons: DockerClients, node: str, instance: str) -> str:
    """Remove the containers and the definitions of their NFS volumes; users' scratch stays.

    Returns the id of the daemon, which lists no container of the instance any more.

    Raises:
        GpuhubError: Something could not be removed.
    """
    await remove_instance_objects(daemons, node, instance, "container")
    filters = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
    left = await daemons.call(node, "containers", all=True, filters=filters)
    # The id is asked after the list, as another daemon may have replaced the one that was asked before.
    info = await daemons.call(node, "info")
    await remove_nfs_volumes(daemons, node, instance)
    if still_there := [raw for raw in left if raw["Labels"].get(names.LABEL_KIND) not in names.KINDS_WITHOUT_LEASE]:
        raise GpuhubError(f"node {node}: {len(still_there)} containers of users are still there")
    return str(info["ID"])
