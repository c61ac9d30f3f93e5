"""`gpuhub down`: everything that `gpuhub up` started is stopped and taken away; data stays."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from typing import Literal

from gpuhub import names, settings
from gpuhub.closet import lifecycle, plan
from gpuhub.containers import swarm
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
    results = await asyncio.gather(
        *(_remove_all(daemons, node.name, instance, "container") for node in cluster.nodes), return_exceptions=True
    )
    failures = [str(result) for result in results if isinstance(result, BaseException)]
    # The manager of the swarm (the first node) last: it holds the overlays' definitions.
    for node in reversed(cluster.nodes):
        try:
            await _remove_all(daemons, node.name, instance, "network")
        except GpuhubError as error:
            failures.append(str(error))
    if cluster.has_overlay and not failures:
        failures += await swarm.leave_swarm(daemons, cluster)
    return failures


async def _remove_all(daemons: Daemons, node: str, instance: str, kind: Literal["container", "network"]) -> None:
    listing, removal = {"container": ({"all": True}, {"force": True, "v": True}), "network": ({}, {})}[kind]
    mine = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
    for found in await daemons.call(node, f"{kind}s", filters=mine, **listing):
        with contextlib.suppress(NotFound):  # it went by itself meanwhile
            await daemons.call(node, f"remove_{kind}", found["Id"], **removal)
