"""CPU and memory of containers: the share that goes with GPUs, numbers of their own, and what is left."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.scheduler.interface import NodeAllocation, NodeCapacity, SchedulingRequest
from tests.support.scheduler_snapshots import BIG, HOUR, NOW, SMALL, ask, build_scheduler, hold, node, slot

#: 16 cores and 64,000 MiB: three for each of four GPUs and four for a notebook without one.
SIZES: dict[str, Any] = {
    "cpu_milli": 16000,
    "memory_mib": 64000,
    "cpu_per_gpu": 3000,
    "memory_per_gpu": 12000,
    "cpu_without_gpu": 4000,
    "memory_without_gpu": 16000,
}
FOUR = node("n0", SMALL, SMALL, SMALL, SMALL, **SIZES)


def follow(name: str, **more: Any) -> SchedulingRequest:
    """Return a request whose containers get their GPUs' share, and half a core and 1,000 MiB at least."""
    return ask(name, **{"cpu_milli": 500, "memory_mib": 1000, "cpu_by_gpu": True, "memory_by_gpu": True, **more})


def grant_sizes(there: list[NodeCapacity], *known: Any) -> dict[str, list[tuple[str, int | None, int | None]]]:
    """Return by request: node, CPU and memory of each container that is granted now."""
    grants = build_scheduler(there, *known).decide(NOW).grants
    return {
        name: [(part.node, part.cpu_milli, part.memory_mib) for part in grant.node_allocations]
        for name, grant in grants.items()
    }


@pytest.mark.parametrize(
    ("request_", "cpu_milli", "memory_mib"),
    [
        (follow("a"), 3000, 12000),
        (follow("a", gpus_per_node=3), 9000, 36000),
        (follow("a", share=4), 750, 3000),
        (follow("a", gpus_per_node=0), 4000, 16000),
        # The whole node, with what is kept for a notebook without GPU.
        (follow("a", gpus_per_node=1, exclusive=True), 16000, 64000),
        # `--cpus 2`, `--cpus 8+` and `--cpus 2+`, the memory following the GPU.
        (follow("a", cpu_milli=2000, cpu_by_gpu=False), 2000, 12000),
        (follow("a", cpu_milli=8000), 8000, 12000),
        (follow("a", cpu_milli=2000), 3000, 12000),
        (follow("a", memory_mib=50000, memory_by_gpu=False), 3000, 50000),
    ],
)
def test_size_follows_the_gpus_unless_said(request_: SchedulingRequest, cpu_milli: int, memory_mib: int) -> None:
    """A share for each GPU, the part of it for a part of a GPU, and numbers where the request has some."""
    assert grant_sizes([FOUR], request_) == {"a": [("n0", cpu_milli, memory_mib)]}


def test_sizes_on_different_nodes_differ() -> None:
    """A gang has on each node what its GPUs bring there; a job on any nodes by their number."""
    rich = node("n1", BIG, **SIZES | {"cpu_per_gpu": 14000, "memory_per_gpu": 60000})
    assert grant_sizes([FOUR, rich], follow("a", nodes=2, least_nodes=2)) == {
        "a": [("n0", 3000, 12000), ("n1", 14000, 60000)]
    }
    sizes = grant_sizes([FOUR, rich], follow("a", spread=5, gpus_per_node=1))["a"]
    assert sorted(sizes) == [("n0", 12000, 48000), ("n1", 14000, 60000)]


def test_node_of_unknown_size_grants_no_numbers() -> None:
    """What containers get there is the settings' default; nothing is counted."""
    assert grant_sizes([node("n0", SMALL)], follow("a")) == {"a": [("n0", None, None)]}


def test_free_gpus_divide_what_larger_requests_left() -> None:
    """Twelve cores went with one GPU: the other three have the rest in equal parts, whoever comes first."""
    there = [FOUR]
    large = hold(ask("x", cpu_milli=13000, memory_mib=4000), slot(there, "n0-0"))
    sizes = grant_sizes(there, large, follow("a"), follow("b"), follow("c"))
    assert {name: size[0][1] for name, size in sizes.items()} == {"a": 1000, "b": 1000, "c": 1000}
    assert {size[0][2] for size in sizes.values()} == {12000}


def test_nothing_is_promised_twice() -> None:
    """With less than the least left, a request waits although a GPU is free; one without GPU waits as well."""
    there = [FOUR]
    everything = hold(ask("x", cpu_milli=15600, memory_mib=4000), slot(there, "n0-0"))
    scheduler = build_scheduler(there, everything, follow("a"), follow("b", gpus_per_node=0))
    assert scheduler.decide(NOW).grants == {}
    assert grant_sizes(there, everything, ask("c", cpu_milli=300, memory_mib=4000)) == {"c": [("n0", 300, 4000)]}
    assert "too little CPU or memory is left on the nodes" in scheduler.explain_pending("a", NOW).text


def test_notebook_without_gpu_starts_beside_a_full_node() -> None:
    """Four GPUs' shares leave four cores for it."""
    sizes = grant_sizes([FOUR], follow("a", gpus_per_node=4), follow("b", gpus_per_node=0))
    assert sizes == {"a": [("n0", 12000, 48000)], "b": [("n0", 4000, 16000)]}


def test_granted_size_counts_after_a_restart() -> None:
    """What the store says of a grant counts, not what the request would get now."""
    there = [FOUR]
    held = hold(follow("x"), slot(there, "n0-0"))
    part = NodeAllocation(node="n0", slots=held.node_allocations[0].slots, cpu_milli=15000, memory_mib=63500)
    sizes = grant_sizes(there, type(held)(request=held.request, node_allocations=(part,), granted_at=NOW), follow("a"))
    assert sizes == {}


def test_impossible_size_is_refused_with_what_there_is() -> None:
    """At once, with the numbers of the nodes."""
    scheduler = build_scheduler([FOUR])
    reason = scheduler.explain_infeasible(ask("a", cpu_milli=64000, memory_mib=4096), {"n0": (SMALL,) * 4})
    assert reason == (
        "64 CPU cores and 4 GiB of memory was requested; none of the nodes can provide it; containers may have: "
        "n0 16 CPU cores and 62.5 GiB"
    )


def test_what_is_granted_counts_next_to_a_planned_start() -> None:
    """Not what was requested at least: the first notebook without GPU gets all that an earlier request does not need."""
    held = hold(ask("z", time_limit_s=2 * HOUR, cpu_milli=12000), slot([FOUR], "n0-0"))
    notebooks = [follow(name, gpus_per_node=0, memory_mib=0, memory_by_gpu=False) for name in "bc"]
    scheduler = build_scheduler([FOUR], held, ask("a", cpu_milli=12500), *notebooks)
    grants = scheduler.decide(NOW).grants
    assert {name: grant.node_allocations[0].cpu_milli for name, grant in grants.items()} == {"b": 3500}
    scheduler.remove("z", NOW + HOUR)
    assert scheduler.decide(NOW + HOUR).grants.keys() == {"a"}
