"""Wakes sleeping nodes before `gpuhub up` sets them up."""

from __future__ import annotations

import asyncio
import time

from gpuhub.common.errors import GpuhubError
from gpuhub.common.units import format_span
from gpuhub.config.settings import ClusterSettings, NodeSettings, PowerSettings
from gpuhub.docker.client import DockerClients
from gpuhub.nodes.power_switch import switch_on
from gpuhub.ops.console import StepReport

#: Interval between two checks whether a node answers, seconds.
_POLL_S = 1.0
#: Interval between two magic packets, seconds.
_RESEND_S = 10.0


async def wake_nodes(daemons: DockerClients, cluster: ClusterSettings, report: StepReport) -> None:
    """Wake all nodes that may sleep and do not answer, and return when they do; those that do not in time are noted."""
    answers = await asyncio.gather(*(_is_answering(daemons, node.name) for node in cluster.power_nodes))
    asleep = [node for node, is_up in zip(cluster.power_nodes, answers, strict=True) if not is_up]
    if not asleep:
        return
    with report.step(f"Wake {', '.join(node.name for node in asleep)}"):
        outcomes = await asyncio.gather(
            *(_wake(daemons, node, power) for node in asleep if (power := cluster.find_power(node.name)) is not None)
        )
    for outcome in outcomes:
        if outcome is not None:
            report.note(f"  ! {outcome}")


async def _wake(daemons: DockerClients, node: NodeSettings, power: PowerSettings) -> str | None:
    """Return why a node could not be woken; None if it answers."""
    end = time.monotonic() + power.wake_timeout
    sent_at = 0.0
    while time.monotonic() < end:
        if not sent_at or (power.on == "wake-on-lan" and time.monotonic() - sent_at > _RESEND_S):
            sent_at = time.monotonic()
            try:
                await switch_on(node, power)
            except GpuhubError as error:
                return str(error)
        if await _is_answering(daemons, node.name):
            return None
        await asyncio.sleep(_POLL_S)
    return f"node {node.name} did not come up within {format_span(power.wake_timeout)} after it was woken"


async def _is_answering(daemons: DockerClients, node: str) -> bool:
    try:
        await daemons.call(node, "ping")
    except GpuhubError:
        return False
    return True
