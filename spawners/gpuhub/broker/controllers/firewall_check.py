"""Periodic checks that each node's firewall is in place, since other programs may remove its rules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gpuhub.common.errors import GpuhubError, NodeUnreachable
from gpuhub.domain.clock import Clock
from gpuhub.nodes.status import NodeStatus

#: Ensures that the firewall is in place on a node; raises GpuhubError where it is not.
EnsureFirewall = Callable[[str], Awaitable[None]]

#: Interval between two checks of a node whose firewall is in place, seconds.
CHECK_PERIOD_S = 10.0
#: Time that a poll of the node waits for a check, seconds.
ANSWER_TIMEOUT_S = 4.0


@dataclass(slots=True)
class _NodeCheck:
    """State of the checks of one node."""

    started_at: float | None = None
    task: asyncio.Task[None] | None = None


class FirewallChecker:
    """Checks the firewalls of all nodes, with at most one check of a node at a time."""

    def __init__(self, ensure: EnsureFirewall, clock: Clock) -> None:
        self._ensure = ensure
        self._clock = clock
        self._checks: dict[str, _NodeCheck] = {}

    async def close(self) -> None:
        """Cancel running checks."""
        tasks = [check.task for check in self._checks.values() if check.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check(self, record: NodeStatus) -> NodeStatus:
        """Return the record with the error of the node's firewall, if any.

        Raises:
            NodeUnreachable: the daemon no longer answers.
        """
        check = self._checks.setdefault(record.name, _NodeCheck())
        if check.task is None:
            is_recent = check.started_at is not None and self._clock.monotonic() - check.started_at < CHECK_PERIOD_S
            if is_recent and record.firewall_error is None:
                return record
            check.started_at = self._clock.monotonic()
            check.task = asyncio.ensure_future(self._ensure_on(record.name))
        done, _ = await asyncio.wait({check.task}, timeout=ANSWER_TIMEOUT_S)
        if not done:
            return record
        task, check.task = check.task, None
        try:
            task.result()
        except NodeUnreachable:
            check.started_at = None
            raise
        except GpuhubError as error:
            return record.evolve(firewall_error=str(error).removeprefix(f"node {record.name}: "))
        return record.evolve(firewall_error=None)

    async def _ensure_on(self, node: str) -> None:
        await self._ensure(node)


def describe_firewall_change(before: NodeStatus, after: NodeStatus) -> list[tuple[str, str]]:
    """Return kind and text of the event when a node's firewall fails or is restored."""
    if after.firewall_error == before.firewall_error:
        return []
    if after.firewall_error is None:
        return [("node.guarded", "its firewall is in place again")]
    return [("node.unguarded", after.firewall_error)]
