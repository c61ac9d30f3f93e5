"""The state of instances as the hub and the broker report it together, and the wait until one is ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpu_launch.broker.models import Lease
from gpu_launch.cli.connection.http import retry_while_away
from gpu_launch.cli.connection.hub_client import HubClient, Server
from gpu_launch.cli.context import Context
from gpu_launch.cli.follow import RETRY_LIMIT_S
from gpu_launch.cli.tables import Column, format_iso
from gpu_launch.errors import GpuLaunchError
from gpu_launch.output import text as render
from gpu_launch.units import format_span

#: Length of a long poll while an instance waits, and time between two queries of the hub after that; seconds.
_LONG_POLL_S = 10.0
_POLL_S = 0.5
_REQUESTED = "requested"
_LIVE_STATES = frozenset({_REQUESTED, "granted", "active"})

COLUMNS = (
    Column(title="NAME"),
    Column(title="STATE"),
    Column(title="PROFILE", min_width=7),
    Column(title="NODE", min_width=6),
    Column(title="GPUS", min_width=8),
    Column(title="TIME", min_width=12),
)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A server with its lease; None without one."""

    server: Server
    lease: Lease | None

    @property
    def state(self) -> str:
        """Return `ready`, `waiting` (in the queue), `starting`, `stopping`, `stopped`, or that of a suspension."""
        if self.server.is_stopped:
            return "stopped"
        if self.server.pending == "stop":
            return "stopping"
        if self.server.is_ready:
            return (self.lease.suspension if self.lease is not None else "") or "ready"
        return "waiting" if self.lease is not None and self.lease.state == _REQUESTED else "starting"


def describe_name(name: str) -> str:
    """Return how texts name an instance at their beginning."""
    return f"Instance {name}" if name else "The default instance"


def list_instances(context: Context, client: HubClient, *, stopped: bool = True) -> list[Instance]:
    """Return the user's instances, the default one first; with `stopped` also names of servers that have ended."""
    leases = {lease.server: lease for lease in context.broker.list_leases() if _is_live(lease, context.user)}
    # The hub lists the default server of every user, which has no name to forget, also if it never ran.
    servers = [server for server in client.list_servers(stopped=stopped) if server.name or not server.is_stopped]
    return [Instance(server=server, lease=leases.get(server.name)) for server in servers]


def find_lease(context: Context, name: str) -> Lease | None:
    """Return the live lease of an instance, None if there is none."""
    leases = [lease for lease in context.broker.list_leases() if _is_live(lease, context.user) and lease.server == name]
    return leases[-1] if leases else None


def _is_live(lease: Lease, user: str) -> bool:
    return lease.is_notebook and lease.owner == user and lease.state in _LIVE_STATES


def wait_until_ready(context: Context, client: HubClient, name: str, report: Callable[[str], None]) -> Instance:
    """Return the instance when it is ready.

    Args:
        context: The hub and the broker; a restart of both is waited for.
        client: The hub's API.
        name: The instance; empty for the default one.
        report: Gets one line whenever what it waits for has changed.

    Raises:
        GpuLaunchError: The start failed; the text has the reason.
    """
    last = ""
    while True:
        server = retry_while_away(
            lambda: client.find_server(name), on_retry=context.note_once, retry_limit_s=RETRY_LIMIT_S
        )
        if server is None:
            reason = client.read_failure(name) or "it was stopped, or the hub has restarted"
            raise GpuLaunchError(f"{describe_name(name)} did not start: {reason}")
        lease = find_lease(context, name)
        instance = Instance(server=server, lease=lease)
        if server.is_ready:
            return instance
        text = describe_progress(instance)
        if text != last:
            report(text)
            last = text
        if lease is not None and lease.state == _REQUESTED:
            context.broker.get_lease(lease.id, version=lease.version, wait_s=_LONG_POLL_S)
        else:
            time.sleep(_POLL_S)


def describe_progress(instance: Instance) -> str:
    """Describe in one line what an instance that is not ready waits for."""
    lease = instance.lease
    if lease is None:
        return "starting"
    if lease.state == _REQUESTED:
        return f"waiting for GPUs{render.format_queue_state(lease, datetime.now(UTC))}"
    return f"starting on {', '.join(lease.nodes)}" + (f" with {render.format_gpus(lease.gpus)}" if lease.gpus else "")


def build_row(instance: Instance, now: datetime) -> tuple[str, ...]:
    """Build an instance's row; the time is the one that is left, or the place in the queue."""
    lease = instance.lease
    return (
        instance.server.name or "(default)",
        instance.state,
        _find_profile(instance) or "-",
        ", ".join(lease.nodes) if lease is not None and lease.nodes else "-",
        render.format_gpus(lease.gpus) if lease is not None and lease.gpus else "-",
        _format_time(instance, now),
    )


def _find_profile(instance: Instance) -> str:
    return (instance.lease.profile if instance.lease is not None else "") or instance.server.profile


def _format_time(instance: Instance, now: datetime) -> str:
    lease = instance.lease
    if lease is None:
        return "-"
    if lease.state == _REQUESTED:
        return f"#{lease.position}" if lease.position else "-"
    return "-" if lease.expires_at is None else f"{format_span((lease.expires_at - now).total_seconds())} left"


def build_json(instance: Instance, ssh_host: str) -> dict[str, Any]:
    """Build the JSON of an instance. Later versions may add keys but do not change them. Times are ISO 8601."""
    lease = instance.lease
    return {
        "name": instance.server.name,
        "state": instance.state,
        "profile": _find_profile(instance),
        "url": instance.server.url,
        "ssh_host": ssh_host,
        "node": lease.nodes[0] if lease is not None and lease.nodes else None,
        "gpus": [gpu.model for gpu in lease.gpus] if lease is not None else [],
        "position": lease.position if lease is not None else None,
        "waiting_for": lease.waiting_for if lease is not None else None,
        "expected_start": format_iso(lease.expected_start) if lease is not None else None,
        "expires_at": format_iso(lease.expires_at) if lease is not None else None,
    }


def describe_ready(instance: Instance) -> str:
    """Describe where a ready instance runs, and until when."""
    lease = instance.lease
    text = f"{describe_name(instance.server.name)} is ready"
    if lease is None:
        return f"{text}."
    text += f" on {', '.join(lease.nodes)}" + (f" with {render.format_gpus(lease.gpus)}" if lease.gpus else "")
    if lease.expires_at is None:
        return f"{text}."
    return f"{text}, for {format_span((lease.expires_at - datetime.now(UTC)).total_seconds())}."


def sort_instances(instances: Sequence[Instance]) -> list[Instance]:
    """Sort those that run before those that have ended, then by name."""
    return sorted(instances, key=lambda instance: (instance.server.is_stopped, instance.server.name))
