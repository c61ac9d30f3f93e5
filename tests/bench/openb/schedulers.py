"""Schedulers that run a queue in virtual time: first come, first served, the same with overtaking, and the product's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuhub.common.gpu import GpuRequirement
from gpuhub.scheduler.demand import WHOLE, NodeDemand
from gpuhub.scheduler.interface import (
    Allocation,
    GpuSlot,
    NodeCapacity,
    Scheduler,
    SchedulerSnapshot,
    SchedulingRequest,
)
from gpuhub.scheduler.placement import FreeCapacity, PlacementChoice
from tests.bench.openb import inflate
from tests.bench.openb.baselines import FirstFit


@dataclass(frozen=True, slots=True)
class Job:
    """A task of a trace as a user's job."""

    id: str
    owner: str
    demand: NodeDemand
    arrives_at: float
    runs_s: float
    #: The time limit that the owner sets.
    limit_s: float


class QueueScheduler(Protocol):
    """Receives arrivals and ends, and decides which jobs start."""

    def arrive(self, job: Job) -> None: ...

    def end(self, job: Job, now: float) -> None: ...

    def start(self, now: float) -> list[str]:
        """Return the ids of the jobs that start now."""
        ...

    def next_wakeup(self) -> float | None:
        """Return when `start` should be called again even if nothing arrives or ends."""
        ...


class FifoQueue:
    """Starts jobs in the order of arrival, each on the first node with room.

    Strictly, all jobs wait behind one that does not fit; with `overtaking`, any job that fits starts, and a large job
    may starve.
    """

    def __init__(self, nodes: Sequence[FreeCapacity], *, overtaking: bool = False) -> None:
        self._nodes = list(nodes)
        self._overtaking = overtaking
        self._queue: list[Job] = []
        self._places: dict[str, tuple[int, PlacementChoice]] = {}

    def arrive(self, job: Job) -> None:
        self._queue.append(job)

    def end(self, job: Job, now: float) -> None:
        at, choice = self._places.pop(job.id)
        self._nodes[at] = inflate.release(self._nodes[at], job.demand, choice)

    def start(self, now: float) -> list[str]:
        for job in self._queue:
            if not self._put(job) and not self._overtaking:
                break
        started = [job.id for job in self._queue if job.id in self._places]
        self._queue = [job for job in self._queue if job.id not in self._places]
        return started

    def next_wakeup(self) -> float | None:
        return None

    def _put(self, job: Job) -> bool:
        for at, node in enumerate(self._nodes):
            choice = FirstFit().choose(node, job.demand)
            if choice is not None:
                self._nodes[at] = inflate.place(node, job.demand, choice)
                self._places[job.id] = (at, choice)
                return True
        return False


class BuiltinQueue:
    """The product's scheduler, with the events that the broker would pass to it."""

    def __init__(self, scheduler: Scheduler, nodes: Sequence[FreeCapacity]) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, SchedulingRequest] = {}
        self._next_wakeup: float | None = None
        scheduler.rebuild(SchedulerSnapshot(nodes=[_node_capacity(at, node) for at, node in enumerate(nodes)]))

    def arrive(self, job: Job) -> None:
        request = _request(job, seq=len(self._waiting))
        self._waiting[job.id] = request
        self._scheduler.put_request(request)

    def end(self, job: Job, now: float) -> None:
        self._scheduler.remove(job.id, now)

    def start(self, now: float) -> list[str]:
        decision = self._scheduler.decide(now)
        self._next_wakeup = decision.decide_again_at
        for id, grant in decision.grants.items():
            request = self._waiting.pop(id)
            ends_at = None if request.time_limit_s is None else now + request.time_limit_s
            self._scheduler.put_allocation(
                Allocation(request=request, node_allocations=grant.node_allocations, granted_at=now, ends_at=ends_at)
            )
        return list(decision.grants)

    def next_wakeup(self) -> float | None:
        return self._next_wakeup


def _node_capacity(at: int, node: FreeCapacity) -> NodeCapacity:
    name = f"node{at:04}"
    return NodeCapacity(
        name=name,
        slots=tuple(
            GpuSlot(uuid=f"GPU-{name}-{index}", node=name, index=index, card=card)
            for index, card in enumerate(node.cards)
        ),
        cpu_milli=node.cpu_milli,
        memory_mib=node.memory_mib,
    )


def _request(job: Job, seq: int) -> SchedulingRequest:
    demand = job.demand
    return SchedulingRequest(
        id=job.id,
        owner=job.owner,
        created_at=job.arrives_at,
        seq=seq,
        gpus_per_node=demand.gpus,
        requirement=GpuRequirement(models=tuple(card.model for card in demand.cards or ())),
        share=WHOLE // demand.milli,
        batch=True,
        time_limit_s=job.limit_s,
        cpu_milli=demand.cpu_milli,
        memory_mib=demand.memory_mib,
    )
