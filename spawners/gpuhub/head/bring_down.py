"""`gpuhub down`: everything that `gpuhub up` started is stopped and taken away; data stays."""

from __future__ import annotations

import asyncio
import shutil

from gpuhub import names, settings
from gpuhub.closet import lifecycle, plan
from gpuhub.containers import swarm
from gpuhub.containers.clearing import remove_all, remove_definitions
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import GpuhubError, SetupError
from gpuhub.guard.container import remove_guard
from gpuhub.head import programs
from gpuhub.head.report import Report
from gpuhub.head.supervisor import Supervisor
from gpuhub.paths import Paths
from gpuhub.slurm.make import make_api
from gpuhub.slurm.values import LIVE


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
        cluster = settings.load(paths.used_cluster_file)
        if cluster.has_docker:
            _clean_nodes(paths, cluster, report)
        if cluster.engine == "slurm":
            _end_jobs(paths, cluster, report)
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


def _end_jobs(paths: Paths, cluster: settings.Cluster, report: Report) -> None:
    """End the Slurm jobs that stand for leases; everybody's others stay."""
    with report.step("gpuhub's jobs in Slurm"):
        failure = asyncio.run(_cancel_all(cluster, paths.instance))
    if failure:
        report.note(f"  not ended: {failure}")


async def _cancel_all(cluster: settings.Cluster, instance: str) -> str:
    """What went wrong, or nothing."""
    api = make_api(cluster.slurm)
    try:
        for job in (await api.look()).jobs:
            if job.state in LIVE and job.name.startswith(names.slurm_job(instance, "")):
                # Containers are gone by now; without them, the job is the notebook itself and is asked first.
                await api.cancel(job.id, name=job.name, at_once=cluster.has_docker)
    except GpuhubError as error:
        return str(error)
    finally:
        await api.close()
    return ""


async def _clean_all(daemons: Daemons, cluster: settings.Cluster, instance: str) -> list[str]:
    """Clean what answers; a line for each node that does not."""
    results = await asyncio.gather(
        *(_remove_containers(daemons, node.name, instance) for node in cluster.nodes), return_exceptions=True
    )
    failures = [str(result) for result in results if isinstance(result, BaseException)]
    # Last of the containers: until then they guard the others.
    results = await asyncio.gather(
        *(remove_guard(daemons, instance, node.name) for node in cluster.nodes), return_exceptions=True
    )
    failures += [str(result) for result in results if isinstance(result, BaseException)]
    # The manager of the swarm (the first node) last: it holds the overlays' definitions.
    for node in reversed(cluster.nodes):
        try:
            await remove_all(daemons, node.name, instance, "network")
        except GpuhubError as error:
            failures.append(str(error))
    if cluster.has_overlay and not failures:
        failures += await swarm.leave_swarm(daemons, cluster)
    return failures


async def _remove_containers(daemons: Daemons, node: str, instance: str) -> None:
    """Remove containers with the NFS volumes that they had; users' scratch stays."""
    await remove_all(daemons, node, instance, "container")
    await remove_definitions(daemons, node, instance)
