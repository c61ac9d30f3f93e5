"""When a waiting request will start, and which of its own demands makes it wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpuhub.engines.base import Obstacle, Request
from gpuhub.engines.mirror import Mirror
from gpuhub.engines.stock import UNKNOWN
from gpuhub.engines.walk import Walk
from gpuhub.gpus import Requirement

#: Forecasts beyond the protected starts are made as long as nodes × requests before stay below.
_MOST_STEPS = 8192
#: A time limit that would let a request pass before others.
_SHORT_S = 3600.0


def expected_start(mirror: Mirror, walk: Walk, request_id: str, position: int) -> float | None:
    """From time limits; None when it is not known. The walk has been taken, and undone."""
    if request_id in walk.grants:
        return walk.now
    plan = walk.plans.get(request_id)
    if plan is None and position * len(mirror.stock.nodes) <= _MOST_STEPS:
        further = Walk(mirror, walk.now, plans_all=True)
        further.run_to(request_id)
        further.undo()
        if request_id in further.grants:
            return walk.now
        plan = further.plans.get(request_id)
    if plan is None or plan.at == UNKNOWN:
        return None
    return max(plan.at, walk.now)


def obstacles(mirror: Mirror, request: Request, now: float, position: int) -> tuple[Obstacle, ...]:
    """The request's own demands, the one without which it would start first before the others."""
    found = []
    for demand, variant in relaxed(request):
        mirror.put_request(variant)
        walk = Walk(mirror, now)
        walk.run()
        walk.undo()
        found.append(Obstacle(demand=demand, would_start_at=expected_start(mirror, walk, request.id, position)))
    mirror.put_request(request)
    return tuple(sorted(found, key=lambda each: UNKNOWN if each.would_start_at is None else each.would_start_at))


def relaxed(request: Request) -> Iterator[tuple[str, Request]]:
    """Each demand, as a person would say it, and the request without it."""
    wanted = request.requirement
    if wanted.models:
        yield f"model {' or '.join(wanted.models)}", _requiring(request, replace(wanted, models=()))
    if wanted.least_memory_mib:
        memory = f"at least {wanted.least_memory_mib / 1024:.3g} GiB"
        yield memory, _requiring(request, replace(wanted, least_memory_mib=0))
    if wanted.least_driver is not None:
        yield f"driver {wanted.least_driver} or newer", _requiring(request, replace(wanted, least_driver=None))
    if wanted.least_capability is not None:
        newer = f"compute capability {'.'.join(map(str, wanted.least_capability))} or newer"
        yield newer, _requiring(request, replace(wanted, least_capability=None))
    yield from _smaller(request)
    if request.same_model and request.size > 1:
        yield "same model", replace(request, same_model=False)
    if request.exclusive:
        yield "exclusive node", replace(request, exclusive=False)
    if request.exclude:
        yield f"not on {', '.join(sorted(request.exclude))}", replace(request, exclude=frozenset())
    if request.cpu_milli:
        yield f"{request.cpu_milli / 1000:.3g} CPU cores", replace(request, cpu_milli=0)
    if request.memory_mib:
        yield f"{request.memory_mib / 1024:.3g} GiB of memory", replace(request, memory_mib=0)
    if request.time_limit_s is None:
        yield "no time limit", replace(request, time_limit_s=_SHORT_S)
    elif request.time_limit_s > _SHORT_S:
        hours = f"time limit of {request.time_limit_s / 3600:.3g} h"
        yield hours, replace(request, time_limit_s=_SHORT_S)


def _smaller(request: Request) -> Iterator[tuple[str, Request]]:
    if request.spread is not None:
        if request.spread > 1:
            yield f"{request.spread} GPUs", replace(request, spread=1)
        return
    if request.least_nodes > 1:
        yield f"{request.least_nodes} nodes", replace(request, nodes=1, least_nodes=1)
    if request.gpus_per_node > 1:
        on_one = f"{request.gpus_per_node} GPUs on one node"
        yield on_one, replace(request, spread=request.least_size, nodes=1, least_nodes=1)
    if request.share > 1:
        part = f"1/{request.share} of a GPU"
        yield part, replace(request, share=2 * request.share)


def _requiring(request: Request, requirement: Requirement) -> Request:
    return replace(request, requirement=requirement)
