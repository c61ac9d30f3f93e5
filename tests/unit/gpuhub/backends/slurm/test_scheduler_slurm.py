"""What the scheduler says of Slurm's queue, of what is free there, and of who else has what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuhub.backends.slurm.scheduler import SlurmScheduler, number_slots
from gpuhub.common.gpu import GpuRequirement, GpuSpec
from gpuhub.config.slurm import SlurmSettings
from gpuhub.scheduler.interface import Allocation, GpuSlot, NodeAllocation, NodeCapacity, SchedulingRequest
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState, SlurmNode, SlurmSnapshot

CARDS = {"rig1": ("RTX 5090", "RTX 5090"), "rig2": ("RTX 5070",)}
NODES = (
    SlurmNode(name="gpu-a", state="idle", takes_work=True, gpus={"rtx5090": 2}, used={"rtx5090": 0}),
    SlurmNode(name="gpu-b", state="idle", takes_work=True, gpus={"rtx5070": 1}, used={"rtx5070": 0}),
    SlurmNode(name="elsewhere", state="idle", takes_work=True, gpus={"rtx5090": 8}, used={}),
)


def slots(node: str) -> tuple[GpuSlot, ...]:
    return tuple(
        GpuSlot(uuid=f"{node}-{index}", node=node, index=index, card=GpuSpec(model=model, memory_mib=8192))
        for index, model in enumerate(CARDS[node])
    )


def build(*jobs: SlurmJob, nodes: tuple[SlurmNode, ...] = NODES) -> SlurmScheduler:
    scheduler = SlurmScheduler(instance="lab", node_names={"gpu-a": "rig1", "gpu-b": "rig2"})
    for node in CARDS:
        scheduler.put_node(NodeCapacity(name=node, slots=slots(node)))
    scheduler.observe(SlurmSnapshot(jobs=jobs, nodes=nodes))
    return scheduler


def job(number: int, state: SlurmJobState = SlurmJobState.PENDING, **fields: Any) -> SlurmJob:
    return SlurmJob(id=number, name=f"job{number}", user_id=1, state=state, **fields)


def request(name: str, number: int | None = None, **fields: Any) -> SchedulingRequest:
    return SchedulingRequest(id=name, owner="ada", slurm_job=number, **fields)


def used(gpus: int) -> tuple[SlurmNode, ...]:
    return (replace(NODES[0], used={"rtx5090": gpus}), *NODES[1:])


def test_queue_order_includes_external_jobs() -> None:
    scheduler = build(
        job(1, priority=10), job(2, priority=30), job(3, priority=10), job(4, priority=50, state=SlurmJobState.RUNNING)
    )
    for one in (request("c", 3), request("a", 1), request("new", created_at=5.0), request("runs", 4)):
        scheduler.put_request(one)
    assert scheduler.order_requests(0.0) == ["runs", "slurm-2", "a", "c", "new"]
    assert scheduler.explain_pending("c", 0.0).position == 4


def test_expected_starts_come_from_slurm() -> None:
    scheduler = build(job(1, expected_start=500.0), job(2), job(3, expected_start=365 * 86400.0))
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        scheduler.put_request(request(name, number))
    assert scheduler.explain_pending("c", 0.0).expected_start is None
    assert scheduler.explain_pending("a", 0.0).expected_start == 500.0
    assert scheduler.explain_pending("b", 0.0).expected_start is None
    assert list(scheduler.find_constraints("a", 0.0)) == []


def test_running_job_is_granted_once() -> None:
    scheduler = build(job(7, SlurmJobState.RUNNING, nodes=("gpu-a",), gpus={"gpu-a": (1,)}))
    scheduler.put_request(request("a", 7))
    scheduler.put_request(request("b"))
    decision = scheduler.decide(100.0)
    assert {name: [slot.uuid for share in grant.node_allocations for slot in share.slots]
            for name, grant in decision.grants.items()} == {"a": ["rig1-1"]}  # fmt: skip
    assert decision.preemptions == ()
    assert scheduler.decide(100.0).grants == {}
    assert scheduler.report_usage(100.0)["ada"].gpus == 1


def test_exclusive_request_gets_the_gpus_that_it_requested() -> None:
    """Slurm allocates all GPUs of the node to an exclusive job; the others are shown as held by the job."""
    running = job(7, SlurmJobState.RUNNING, nodes=("gpu-a",), gpus={"gpu-a": (0, 1)})
    scheduler = build(running)
    exclusive = request("a", 7, exclusive=True)
    scheduler.put_request(exclusive)
    assert scheduler.explain_misfit(exclusive, running) is None
    assert scheduler.explain_misfit(request("b", 7), running) is not None
    assert scheduler.explain_misfit(request("b", 7, exclusive=True, gpus_per_node=3), running) is not None
    assert scheduler.explain_misfit(request("b", 7, exclusive=True, spread=1), running) is None
    [grant] = scheduler.decide(100.0).grants.values()
    assert [slot.uuid for node in grant.node_allocations for slot in node.slots] == ["rig1-0"]
    assert scheduler.find_external_jobs() == {"rig1-1": running}


def test_exclusive_request_gets_suitable_gpus_of_one_model() -> None:
    cards = (("RTX 5060", 8192), ("RTX 5070", 12288), ("RTX 5070", 12288))
    there = tuple(
        GpuSlot(uuid=f"u{index}", node="rig1", index=index, card=GpuSpec(model=model, memory_mib=memory_mib))
        for index, (model, memory_mib) in enumerate(cards)
    )
    node = SlurmNode(name="gpu-a", state="mixed", takes_work=True, gpus={"rtx5060": 1, "rtx5070": 2})
    running = job(7, SlurmJobState.RUNNING, nodes=("gpu-a",), gpus={"gpu-a": (0, 1, 2)})

    def grant(**fields: Any) -> list[str]:
        scheduler = build(running, nodes=(node,))
        scheduler.put_node(NodeCapacity(name="rig1", slots=there))
        scheduler.put_request(request("a", 7, exclusive=True, **fields))
        [granted] = scheduler.decide(100.0).grants.values()
        return [slot.uuid for node in granted.node_allocations for slot in node.slots]

    assert grant(gpus_per_node=2, same_model=True) == ["u1", "u2"]
    assert grant(requirement=GpuRequirement(models=("RTX 5070",))) == ["u1"]
    assert grant(spread=2) == ["u0", "u1"]
    assert grant(gpus_per_node=0) == []


def test_nothing_is_granted_on_unavailable_nodes() -> None:
    scheduler = build(job(7, SlurmJobState.RUNNING, nodes=("gpu-a",), gpus={"gpu-a": (0,)}))
    scheduler.put_node(
        NodeCapacity(name="rig1", slots=slots("rig1"), takes_work=False, unavailable_reason="it does not answer")
    )
    scheduler.put_request(request("a", 7))
    assert scheduler.decide(0.0).grants == {}
    assert scheduler.explain_pending("a", 0.0).text == (
        "Slurm: it was allocated rig1, where no container can be started now: it does not answer"
    )


def test_a_suspended_job_is_not_granted() -> None:
    scheduler = build(job(7, SlurmJobState.SUSPENDED, nodes=("gpu-a",), gpus={"gpu-a": (0,)}))
    scheduler.put_request(request("a", 7))
    assert scheduler.decide(0.0).grants == {}


def test_request_can_start_now_if_slurm_has_free_gpus() -> None:
    wants = GpuRequirement(models=("RTX 5090",))
    assert build().can_start_now(request("x", requirement=wants), 0.0)
    assert build(nodes=used(1)).can_start_now(request("x", requirement=wants), 0.0)
    assert not build(nodes=used(2)).can_start_now(request("x", requirement=wants), 0.0)
    assert build(nodes=used(2)).can_start_now(request("x"), 0.0)
    assert build().can_start_now(request("x", gpus_per_node=2), 0.0)
    assert not build(nodes=used(1)).can_start_now(request("x", gpus_per_node=2), 0.0)
    assert not build(nodes=used(1)).can_start_now(request("x", requirement=wants, exclusive=True), 0.0)
    assert build(nodes=used(1)).can_start_now(request("x", spread=2), 0.0)
    assert not build(nodes=used(1)).can_start_now(request("x", spread=3), 0.0)
    assert build(nodes=used(2)).can_start_now(request("x", nodes=2, least_nodes=1), 0.0)
    assert build(nodes=used(2)).can_start_now(request("x", gpus_per_node=0), 0.0)
    drained = (replace(NODES[0], takes_work=False), *NODES[1:])
    assert not build(nodes=drained).can_start_now(request("x", requirement=wants), 0.0)


def test_gpus_of_external_jobs_are_explained() -> None:
    others = job(1, SlurmJobState.RUNNING, nodes=("gpu-a",), gpus={"gpu-a": (1,)})
    mine = job(2, SlurmJobState.RUNNING, nodes=("gpu-a",), gpus={"gpu-a": (0,)})
    leaving = replace(
        job(3, SlurmJobState.RUNNING, nodes=("gpu-b",), gpus={"gpu-b": (0,)}), name=f"lab-lease-l{'0' * 16}"
    )
    stranger = job(4, SlurmJobState.RUNNING, nodes=("elsewhere",), gpus={"elsewhere": (0,)})
    scheduler = build(others, mine, leaving, stranger)
    share = NodeAllocation(node="rig1", slots=slots("rig1")[:1])
    scheduler.put_allocation(Allocation(request=request("a", 2), node_allocations=(share,), granted_at=0.0))
    assert scheduler.find_external_jobs() == {"rig1-1": others}


def test_name_hides_no_gpus_of_an_external_job() -> None:
    """Anybody may name a job like this, and gpuhub does not cancel it."""
    named = replace(job(1, SlurmJobState.RUNNING, nodes=("gpu-a",), gpus={"gpu-a": (1,)}), name="lab-lease-mine")
    assert build(named).find_external_jobs() == {"rig1-1": named}


def test_unavailable_nodes_are_explained_by_slurm() -> None:
    drained = replace(NODES[1], takes_work=False, state="idle+drain", reason="fans")
    assert build(nodes=(NODES[0], drained)).find_unavailable() == {"rig2": "idle+drain: fans"}


def test_gpus_are_numbered_by_type_in_slurm_order() -> None:
    cards = ("RTX 5060", "RTX 5090", "RTX 5060", "RTX 5090")
    there = [
        GpuSlot(uuid=f"u{index}", node="n", index=index, card=GpuSpec(model=model, memory_mib=1))
        for index, model in enumerate(cards)
    ]

    def numbered(**has: int) -> dict[int, str]:
        node = SlurmNode(name="n", state="idle", takes_work=True, gpus=has)
        return {number: slot.uuid for number, slot in number_slots(there, node, SlurmSettings()).items()}

    assert numbered(rtx5090=2, rtx5060=2) == {0: "u1", 1: "u3", 2: "u0", 3: "u2"}
    assert numbered(**{"": 4}) == {0: "u0", 1: "u1", 2: "u2", 3: "u3"}
    # Slurm has a card that the node does not report: which of its type is which cannot be told.
    assert numbered(rtx5090=3, rtx5060=2) == {3: "u0", 4: "u2"}


def test_pending_reason_shows_that_slurm_is_unreachable() -> None:
    scheduler = build(job(1))
    scheduler.put_request(request("a", 1))
    before = scheduler.explain_pending("a", 0.0).text
    scheduler.note_unreachable("no answer")
    assert (
        scheduler.explain_pending("a", 0.0).text
        == f"Slurm: no answer; last known state: {before.removeprefix('Slurm: ')}"
    )
    scheduler.observe(SlurmSnapshot(jobs=(job(1),), nodes=NODES))
    assert scheduler.explain_pending("a", 0.0).text == before


def test_request_that_no_node_can_serve_is_explained() -> None:
    scheduler = build()
    scheduler.put_request(request("a", requirement=GpuRequirement(least_driver="590")))
    scheduler.put_request(request("b"))
    assert (
        scheduler.explain_pending("a", 0.0).text
        == "Slurm: no node that both Slurm and gpuhub know meets the request yet"
    )
    assert scheduler.explain_pending("b", 0.0).text == "Slurm: it is being submitted"
    assert not scheduler.can_start_now(request("a", requirement=GpuRequirement(least_driver="590")), 0.0)
