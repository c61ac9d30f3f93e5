"""`gpuhub down`: everything that `gpuhub up` started is stopped and taken away; data stays."""

from __future__ import annotations

import asyncio
import shutil

from gpuhub import names, settings
from gpuhub.closet import lifecycle, plan
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import GpuhubError, NotFound, SetupError
from gpuhub.head import programs
from gpuhub.head.report import Report
from gpuhub.head.supervisor import Supervisor
from gpuhub.paths import Paths


def bring_down(paths: Paths, report: Report, *, purge: bool = False) -> None:
    """Stop the instance and leave no process, namespace, container, network or mount of it.

    `purge` removes the practice closet's image data too; homes, the store and secrets always stay.

    Raises:
        SetupError: something is still there; each thing is named.
    """
    supervisor = Supervisor(paths)
    if supervisor.is_running():
        with report.step("JupyterHub, broker and proxy"):
            # The hub first, so that it does not take vanishing notebooks for crashed ones.
            for name in (programs.HUB, programs.BROKER, programs.PROXY):
                supervisor.stop(name)
    if paths.used_cluster_file.exists():
        _clean_nodes(paths, settings.load(paths.used_cluster_file), report)
    closet = plan.practice_plan(paths.instance)
    with report.step("Processes and namespaces"):
        supervisor.shutdown()
        lifecycle.ensure_down(closet, paths, purge=purge)
        shutil.rmtree(paths.run, ignore_errors=True)
        if purge:
            shutil.rmtree(paths.images, ignore_errors=True)
    left = lifecycle.leftovers(closet, paths)
    if left:
        raise SetupError("\n".join(["still there after `gpuhub down`:", *left]))
    report.note("Stopped. Homes, datasets and images stay; `sudo make up` is quick now.")


def _clean_nodes(paths: Paths, cluster: settings.Cluster, report: Report) -> None:
    daemons = Daemons(cluster.nodes, instance=paths.instance, run_dir=paths.run)
    try:
        with report.step("Containers and networks on every node"):
            failures = asyncio.run(_clean_all(daemons, cluster, paths.instance))
    finally:
        daemons.close()
    for failure in failures:
        report.note(f"  not cleaned: {failure}")


async def _clean_all(daemons: Daemons, cluster: settings.Cluster, instance: str) -> list[str]:
    """Clean what answers; a line for each node that does not."""
    # Workers of the swarm before its manager (the first node), which holds the overlays' definitions.
    results = await asyncio.gather(
        *(_clean_containers(daemons, node.name, instance) for node in cluster.nodes), return_exceptions=True
    )
    failures = [str(result) for result in results if isinstance(result, BaseException)]
    for node in reversed(cluster.nodes):
        try:
            await _clean_networks(daemons, node.name, instance)
        except GpuhubError as error:
            failures.append(str(error))
    if cluster.has_overlay and not failures:
        failures += await _leave_swarm(daemons, cluster)
    return failures


async def _leave_swarm(daemons: Daemons, cluster: settings.Cluster) -> list[str]:
    """Dissolve the Swarm, unless somebody else uses it too; workers leave before their manager."""
    manager = cluster.nodes[0].name
    info = (await daemons.call(manager, "info")).get("Swarm", {})
    if info.get("LocalNodeState") != "active" or not info.get("ControlAvailable"):
        return []
    others = [
        network["Name"]
        for network in await daemons.call(manager, "networks", filters={"driver": ["overlay"]})
        if not network.get("Ingress") and network["Name"] != "ingress"
    ]
    if others or await daemons.call(manager, "services"):
        return [f"the Swarm stays: others use it ({', '.join(others) or 'services'})"]
    for node in reversed(cluster.nodes):
        swarm_info = (await daemons.call(node.name, "info")).get("Swarm", {})
        if swarm_info.get("LocalNodeState") == "active":
            await daemons.call(node.name, "leave_swarm", force=True)
    return []


async def _clean_containers(daemons: Daemons, node: str, instance: str) -> None:
    mine = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
    for container in await daemons.call(node, "containers", all=True, filters=mine):
        try:
            await daemons.call(node, "remove_container", container["Id"], force=True, v=True)
        except NotFound:
            continue


async def _clean_networks(daemons: Daemons, node: str, instance: str) -> None:
    mine = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
    for network in await daemons.call(node, "networks", filters=mine):
        try:
            await daemons.call(node, "remove_network", network["Id"])
        except NotFound:
            continue
