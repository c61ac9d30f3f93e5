"""Nodes that sleep: the doctor leaves them asleep."""

from __future__ import annotations

from collections.abc import Mapping

from gpuhub.broker_api.schemas import NodeState, NodeView
from gpuhub.common.errors import GpuhubError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.broker_connection import connect_to_broker
from gpuhub.ops.doctor.findings import Finding, ok, warning

_SLEEPING = frozenset({NodeState.ASLEEP, NodeState.WAKING})


async def read_power_nodes(cluster: ClusterSettings, paths: Paths) -> Mapping[str, NodeView]:
    """Return the nodes that may sleep as the broker shows them; none while gpuhub does not run."""
    if not cluster.power_nodes:
        return {}
    try:
        client = connect_to_broker(paths)
    except GpuhubError:
        return {}
    try:
        views = await client.nodes()
    except GpuhubError:
        return {}
    finally:
        await client.close()
    return {view.name: view for view in views if view.power is not None}


def check_sleep(view: NodeView) -> Finding | None:
    """Return the finding about a node that sleeps, of which nothing else can be checked; None for one that does not."""
    if view.state not in _SLEEPING:
        return None
    return ok("power", f"{view.message}; nothing else was checked. `gpuhub node power on {view.name}` wakes it")


def check_power(view: NodeView) -> list[Finding]:
    """Return findings about a node that was not woken, or that does not go to sleep."""
    if view.power is None or view.power.error is None:
        return []
    return [
        warning(
            "power",
            view.power.error,
            "see docs/nodes.md: the card and the firmware must allow Wake-on-LAN, and no user may be logged in",
        )
    ]
