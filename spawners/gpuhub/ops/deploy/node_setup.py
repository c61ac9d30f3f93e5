"""Nodes at the start of an instance: which of them answer, and their images, networks and packet filters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gpuhub.common.errors import NodeUnreachable, SetupError
from gpuhub.common.files import replace_file
from gpuhub.common.paths import Paths
from gpuhub.config.machines.data_network import DATA_NETWORK_NOTE
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker import esp_probe, networks
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.firewall_container import ensure_firewall
from gpuhub.docker.swarm import membership
from gpuhub.nodes.daemon_identity import describe_shared_identities
from gpuhub.ops.console import StepReport
from gpuhub.ops.deploy import node_wakeup
from gpuhub.ops.images import distribution

#: Limit of a call to a node that is set up: its disk may still be writing gigabytes of images. Seconds.
_TIMEOUT_S = 60.0


async def set_up_nodes(
    paths: Paths, cluster: ClusterSettings, source: Path, report: StepReport, *, refresh: bool = False
) -> frozenset[str]:
    """Bring images, networks and packet filters to the nodes that answer, and return the names of the others.

    A node that was set up before may be away, as after a power cut that one machine has not survived; it keeps what it
    was given. One that never answered at this address is more likely a mistake in the settings.

    Args:
        source: The root of gpuhub's source tree.
        refresh: Build all images again, with Debian's current packages.

    Raises:
        GpuhubError: A step failed, or a node does not answer and was never set up; the text names the remedy.
    """
    # The service for guests sets those up, which may be away, and over their slow links.
    cluster = cluster.without_guests()
    with closing(DockerClients(cluster.nodes, instance=paths.instance, run_dir=paths.run)) as daemons:
        await node_wakeup.wake_nodes(daemons, cluster, report)
        present = await _find_answering(daemons, paths, cluster, report)
    away = frozenset(node.name for node in cluster.nodes if node not in present)
    answering = cluster.model_copy(update={"nodes": present})
    with closing(_connect_patiently(paths, answering)) as daemons:
        await distribution.ensure_images(daemons, answering, paths, source, report, refresh=refresh)
    with closing(_connect_patiently(paths, cluster)) as daemons:
        if cluster.has_encrypted_overlay:
            with report.step("Every node's kernel can encrypt users' networks"):
                await esp_probe.require_encryption(daemons, [node.name for node in present])
        with report.step("Networks"):
            warning = await membership.ensure_swarm(daemons, cluster, away=away)
            await asyncio.gather(
                *(networks.ensure_access_network(daemons, cluster, paths.instance, node.name) for node in present)
            )
        if warning is not None:
            report.note(f"  ! {warning}")
        if cluster.has_data_network:
            report.note(f"  {DATA_NETWORK_NOTE}.")
        title = "Packet filter" if cluster.network.guard else "No packet filter (network.guard = false)"
        with report.step(title):
            await asyncio.gather(*(ensure_firewall(daemons, cluster, paths.instance, node.name) for node in present))
    _remember(paths, present)
    return away


def _connect_patiently(paths: Paths, cluster: ClusterSettings) -> DockerClients:
    return DockerClients(cluster.nodes, instance=paths.instance, run_dir=paths.run, timeout_s=_TIMEOUT_S)


async def _find_answering(
    daemons: DockerClients, paths: Paths, cluster: ClusterSettings, report: StepReport
) -> tuple[NodeSettings, ...]:
    """Return the nodes that answer, and note those that do not.

    Raises:
        NodeUnreachable: None answers, or one does not that was never set up at this address.
        SetupError: Several nodes have the same Docker daemon.
    """
    known = _read_known(paths)
    with report.step(f"Docker answers on {len(cluster.nodes)} node{'s' * (len(cluster.nodes) > 1)}"):
        names = [node.name for node in cluster.nodes]
        answers = dict(zip(names, await asyncio.gather(*(_ask(daemons, name) for name in names)), strict=True))
        failures = {name: answer for name, answer in answers.items() if isinstance(answer, NodeUnreachable)}
        for node in cluster.nodes:
            if node.name in failures and (known.get(node.name) != node.docker or len(failures) == len(cluster.nodes)):
                raise failures[node.name]
        check_unique_daemons(
            {name: str(answer["ID"]) for name, answer in answers.items() if not isinstance(answer, NodeUnreachable)}
        )
    for error in failures.values():
        report.note(
            f"  ! {error}. gpuhub starts without it; run `sudo make up` again when it is back, so that it gets new "
            "images and settings"
        )
    return tuple(node for node in cluster.nodes if node.name not in failures)


async def _ask(daemons: DockerClients, node: str) -> dict[str, Any] | NodeUnreachable:
    try:
        info: dict[str, Any] = await daemons.call(node, "info")
    except NodeUnreachable as error:
        return error
    return info


def check_unique_daemons(ids: Mapping[str, str]) -> None:
    """Check that the nodes' Docker daemons have different ids.

    Raises:
        SetupError: A line for each id that several nodes have, with their names and the remedy.
    """
    shared = describe_shared_identities(ids)
    if shared:
        raise SetupError("\n".join(shared))


def _read_known(paths: Paths) -> dict[str, str]:
    """Return the Docker addresses at which nodes were set up before, by name."""
    try:
        known: dict[str, str] = json.loads(paths.known_nodes.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return known


def _remember(paths: Paths, nodes: tuple[NodeSettings, ...]) -> None:
    known = _read_known(paths) | {node.name: node.docker for node in nodes}
    replace_file(paths.known_nodes, json.dumps(known))
