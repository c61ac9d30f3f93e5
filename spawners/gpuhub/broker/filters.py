"""Whether each node's packet filter is in place: asked again and again, since somebody may take it away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gpuhub.broker.clock import Clock
from gpuhub.errors import GpuhubError, NodeUnreachable
from gpuhub.nodes.records import NodeRecord

#: Has the packet filter in place on a node, or says with a GpuhubError why it is not.
EnsureFilter = Callable[[str], Awaitable[None]]

#: Between two questions to a node whose filter is in place, seconds.
PERIOD_S = 10.0
#: A look at a node does not wait longer than this for its answer, seconds.
WAIT_S = 4.0


@dataclass(slots=True)
class _Known:
    """What is remembered of one node."""

    asked_at: float | None = None
    question: asyncio.Task[None] | None = None


class Filters:
    """Asks nodes; one question at a time for each."""

    def __init__(self, ensure: EnsureFilter, clock: Clock) -> None:
        self._ensure = ensure
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = [known.question for known in self._known.values() if known.question is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def judge(self, record: NodeRecord) -> NodeRecord:
        """The record with what is wrong with the node's packet filter.

        Raises:
            NodeUnreachable: the daemon stopped to answer.
        """
        known = self._known.setdefault(record.name, _Known())
        if known.question is None:
            is_recent = known.asked_at is not None and self._clock.monotonic() - known.asked_at < PERIOD_S
            if is_recent and record.filter_trouble is None:
                return record
            known.asked_at = self._clock.monotonic()
            known.question = asyncio.ensure_future(self._ensure_on(record.name))
        done, _ = await asyncio.wait({known.question}, timeout=WAIT_S)
        if not done:
            return record
        question, known.question = known.question, None
        try:
            question.result()
        except NodeUnreachable:
            known.asked_at = None
            raise
        except GpuhubError as error:
            return record.evolve(filter_trouble=str(error).removeprefix(f"node {record.name}: "))
        return record.evolve(filter_trouble=None)

    async def _ensure_on(self, node: str) -> None:
        await self._ensure(node)


def filter_news(before: NodeRecord, after: NodeRecord) -> list[tuple[str, str]]:
    """Kind and text of what changed about a node's packet filter."""
    if after.filter_trouble == before.filter_trouble:
        return []
    if after.filter_trouble is None:
        return [("node.guarded", "its packet filter is in place again")]
    return [("node.unguarded", after.filter_trouble)]
