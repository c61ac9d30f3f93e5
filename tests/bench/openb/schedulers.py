"""What runs a queue in virtual time: first come, first served, the same with overtaking, and the product's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuhub.engines.base import Engine, Holding, NodeSupply, Request, Slot, World
from gpuhub.engines.placement import WHOLE, Choice, Demand, NodeState
from gpuhub.gpus import Requirement
from tests.bench.openb import inflate
from tests.bench.openb.baselines import FirstFit


@dataclass(frozen=True, slots=True)
class Job:
    """A task of a trace as somebody asks for it."""

    id: str
    owner: str
    demand: Demand
    arrives_at: float
    runs_s: float
    #: The time limit that the owner gives.
    limit_s: float


class Scheduler(Protocol):
    """Told of what comes and ends, asked what starts."""

    def arrive(self, job: Job) -> None: ...

    def end(self, job: Job, now: float) -> None: ...

    def start(self, now: float) -> list[str]:
        """Ids of the jobs that start now."""
        ...

    def look_again_at(self) -> float | None:
        """When to ask again though nothing comes or ends."""
        ...


class Fifo:
    """In the order of arrival, each to the first node with room.

    Strictly, everybody waits behind one who finds none; `overtaking`, whoever finds room goes, and a large job may wait
    as long as small ones come.
    """

    def __init__(self, nodes: Sequence[NodeState], *, overtaking: bool = False) -> None:
        self._nodes = list(nodes)
        self._overtaking = overtaking
        self._queue: list[Job] = []
        self._places: dict[str, tuple[int, Choice]] = {}

    def arrive(self, job: Job) -> None:
        self._queue.append(job)

    def end(self, job: Job, now: float) -> None:
        at, choice = self._places.pop(job.id)
        self._nodes[at] = inflate.give_back(self._nodes[at], job.demand, choice)

    def start(self, now: float) -> list[str]:
        for job in self._queue:
            if not self._put(job) and not self._overtaking:
                break
        started = [job.id for job in self._queue if job.id in self._places]
        self._queue = [job for job in self._queue if job.id not in self._places]
        return started

    def look_again_at(self) -> float | None:
        return None

    def _put(self, job: Job) -> bool:
        for at, node in enumerate(self._nodes):
            choice = FirstFit().choose(node, job.demand)
            if choice is not None:
                self._nodes[at] = inflate.place(node, job.demand, choice)
                self._places[job.id] = (at, choice)
                return True
        return False


class Ours:
    """The product's engine, told what the broker would tell it."""

    def __init__(self, engine: Engine, nodes: Sequence[NodeState]) -> None:
        self._engine = engine
        self._waiting: dict[str, Request] = {}
        self._look_again_at: float | None = None
        engine.rebuild(World(nodes=[_supply(at, node) for at, node in enumerate(nodes)]))

    def arrive(self, job: Job) -> None:
        request = _request(job, seq=len(self._waiting))
        self._waiting[job.id] = request
        self._engine.put_request(request)

    def end(self, job: Job, now: float) -> None:
        self._engine.drop(job.id, now)

    def start(self, now: float) -> list[str]:
        decision = self._engine.decide(now)
        self._look_again_at = decision.look_again_at
        for id, grant in decision.grants.items():
            request = self._waiting.pop(id)
            ends_at = None if request.time_limit_s is None else now + request.time_limit_s
            self._engine.put_holding(Holding(request=request, shares=grant.shares, granted_at=now, ends_at=ends_at))
        return list(decision.grants)

    def look_again_at(self) -> float | None:
        return self._look_again_at


def _supply(at: int, node: NodeState) -> NodeSupply:
    name = f"node{at:04}"
    return NodeSupply(
        name=name,
        slots=tuple(
            Slot(uuid=f"GPU-{name}-{index}", node=name, index=index, card=card) for index, card in enumerate(node.cards)
        ),
        cpu_milli=node.cpu_milli,
        memory_mib=node.memory_mib,
    )


def _request(job: Job, seq: int) -> Request:
    demand = job.demand
    return Request(
        id=job.id,
        owner=job.owner,
        created_at=job.arrives_at,
        seq=seq,
        gpus_per_node=demand.gpus,
        requirement=Requirement(models=tuple(card.model for card in demand.cards or ())),
        share=WHOLE // demand.milli,
        batch=True,
        time_limit_s=job.limit_s,
        cpu_milli=demand.cpu_milli,
        memory_mib=demand.memory_mib,
    )
