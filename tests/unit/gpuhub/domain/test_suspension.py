"""Suspensions: every transition, allowed and refused, and which notebooks are suspended for whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhub.broker_api.schemas import JobState, LeaseState, SuspensionState
from gpuhub.common.errors import Conflict
from gpuhub.common.gpu import GpuRequirement, GpuSpec
from gpuhub.domain import lease_states, scheduler_input, suspension
from gpuhub.domain.models import LeaseRow, ResourceRequest, Suspension
from gpuhub.domain.suspension import IdleHolder, WaitingDemand
from gpuhub.scheduler.interface import Allocation, GpuSlot, NodeAllocation, NodeCapacity, SchedulerSnapshot
from gpuhub.scheduler.scheduler import BuiltinScheduler
from tests.support.broker.factories import build_running_job, lease_row

CARD = GpuSpec(model="RTX 5090", memory_mib=32607)


def active(**changes: object) -> LeaseRow:
    slot = GpuSlot(uuid="GPU-rig1-1", node="rig1", index=1, card=CARD)
    granted = lease_states.grant(lease_row(time_limit_s=36000), [NodeAllocation(node="rig1", slots=(slot,))], 100.0)
    return lease_states.activate(granted, "c" * 64, 110.0).evolve(**changes)


def test_the_whole_life_of_a_suspension() -> None:
    """The lease stays active, with its epoch and its end; it holds its GPU but between proof and grant."""
    suspending = suspension.begin(active(), 8192, 200.0)
    assert [gpu.uuid for gpu in suspending.held] == ["GPU-rig1-1"]
    suspended = suspension.prove(suspending, 8000, 210.0)
    assert (suspended.held, suspended.suspension and suspended.suspension.moved_mib) == ((), 8000)
    assert suspension.is_without_gpu(suspended)
    resuming = suspension.request_resume(suspended, 300.0)
    assert resuming.waits
    restoring = suspension.regrant(resuming, 320.0)
    assert [gpu.uuid for gpu in restoring.held] == ["GPU-rig1-1"]
    back = suspension.finish(restoring)
    assert (back.suspension, back.held_from, back.charged_from) == (None, 320.0, 320.0)
    assert (back.state, back.epoch, back.expires_at, back.granted_at) == (LeaseState.ACTIVE, 1, 36100.0, 100.0)


def test_only_allowed_transitions() -> None:
    """Each step follows one state; what may be repeated changes nothing."""
    lease = active()
    suspending = suspension.begin(lease, 10, 1.0)
    suspended = suspension.prove(suspending, 10, 2.0)
    restoring = suspension.regrant(suspension.request_resume(suspended, 3.0), 4.0)
    assert suspension.begin(suspending, 99, 5.0) is suspending
    for other in (lease, restoring):
        assert suspension.request_resume(other, 5.0) is other
    for row, step in (
        (lease, lambda row: suspension.prove(row, 1, 5.0)),
        (suspended, lambda row: suspension.prove(row, 1, 5.0)),
        (suspended, suspension.abandon),
        (suspended, lambda row: suspension.regrant(row, 5.0)),
        (suspended, suspension.finish),
        (restoring, suspension.abandon),
        (lease_states.release(suspended, "stopped", 5.0), lambda row: suspension.regrant(row, 6.0)),
    ):
        with pytest.raises(Conflict):
            step(row)


def test_a_cell_that_runs_meanwhile_brings_it_back() -> None:
    """What is being moved out is wanted again: it waits for its GPU as soon as that is done."""
    wanted = suspension.request_resume(suspension.begin(active(), 10, 1.0), 1.5)
    assert wanted.suspension is not None
    assert (wanted.suspension.state, wanted.suspension.is_wanted) == (SuspensionState.SUSPENDING, True)
    assert suspension.request_resume(wanted, 1.6) is wanted
    resuming = suspension.prove(wanted, 12, 2.0)
    assert (resuming.waits, resuming.held) == (True, ())
    assert suspension.finish(suspension.regrant(resuming, 3.0)).suspension is None


def test_what_cannot_be_suspended() -> None:
    """Jobs, several GPUs, shares, MIG devices, notebooks without a container and those of Slurm."""
    gpu = active().gpus[0]
    from dataclasses import replace

    from gpuhub.broker_api.schemas import Purpose

    for lease, reason in (
        (active(purpose=Purpose.JOB), "only notebooks"),
        (active(gpus=(gpu, replace(gpu, uuid="GPU-2"))), "one whole GPU"),
        (active(gpus=()), "one whole GPU"),
        (active(gpus=(replace(gpu, share=4),)), "one whole GPU"),
        (active(gpus=(replace(gpu, uuid="MIG-1"),)), "MIG"),
        (active(container_id=None), "runs"),
        (active(slurm_job=7), "Slurm"),
        (lease_states.release(active(), "stopped", 5.0), "runs"),
    ):
        assert reason in (suspension.explain_unsuitable(lease) or "")
        with pytest.raises(Conflict, match=reason):
            suspension.begin(lease, 1, 6.0)


@pytest.mark.parametrize(
    ("job_changes", "lease_changes", "expected"),
    [
        ({}, {}, True),
        ({"detached": False}, {}, False),
        ({"nproc_per_node": 2}, {}, False),
        ({"nnodes": 2}, {}, False),
        ({"state": JobState.STARTING}, {}, False),
        ({}, {"resources": ResourceRequest()}, False),
        ({}, {"resources": ResourceRequest(scavenge=True, guests=True)}, False),
        ({}, {"resources": ResourceRequest(scavenge=True, spread=1)}, False),
        ({}, {"slurm_job": 7}, False),
        ({}, {"suspension": Suspension(state=SuspensionState.RESTORING, since=1.0)}, False),
    ],
)
def test_which_jobs_can_be_suspended(
    job_changes: dict[str, object], lease_changes: dict[str, object], expected: bool
) -> None:
    """Scavenging ones of one process with one whole GPU, which need nobody who looks on."""
    job, lease = build_running_job(nodes=1, scavenge=True)
    job, lease = job.evolve(**{"detached": True, **job_changes}), lease.evolve(**lease_changes)
    assert suspension.can_suspend_job(lease, job) is expected


def test_the_time_limit_of_a_job_stands_still() -> None:
    """It has what was left, from the grant on; less if it was shortened meanwhile."""
    _, lease = build_running_job(nodes=1, scavenge=True)
    assert lease.expires_at == 1010.0
    away = suspension.prove(suspension.begin_job(lease, 8192, 400.0), 8192, 410.0)
    assert (away.expires_at, away.waits, away.held) == (None, True, ())
    assert scheduler_input.build_resume_request(away).time_limit_s == 600.0
    assert suspension.regrant(away, 5000.0).expires_at == 5600.0
    assert suspension.regrant(away.evolve(expires_at=5100.0), 5000.0).expires_at == 5100.0
    assert [gpu.uuid for gpu in suspension.list_bound_gpus(away)] == ["GPU-rig1"]


def test_a_suspended_job_is_extended_from_the_moment_at_which_it_continues() -> None:
    """Its time stands still also after that, and whether it had a limit before or not."""
    _, lease = build_running_job(nodes=1, scavenge=True)
    for limited in (lease, lease.evolve(expires_at=None, time_limit_s=None)):
        away = suspension.prove(suspension.begin_job(limited, 8192, 400.0), 8192, 410.0)
        more = lease_states.extend(away, 3600, 500.0)
        assert more.expires_at is None
        assert scheduler_input.build_resume_request(more).time_limit_s == 3600.0
        assert suspension.regrant(more, 9000.0).expires_at == 12600.0


def test_a_job_that_was_suspended_keeps_its_time_when_a_drain_is_undone() -> None:
    """It had its GPU from 10 to 410 and from 5000 on; counted from the grant alone, its limit of 1000 s would be over."""
    _, lease = build_running_job(nodes=1, scavenge=True)
    away = suspension.prove(suspension.begin_job(lease, 8192, 400.0), 8192, 410.0)
    drained = lease_states.shorten(away, 5600.0, "node rig1 is draining by root")
    undrained = lease_states.restore_time(drained)
    assert (undrained.expires_at, undrained.reason) == (None, None)
    assert suspension.regrant(undrained, 5000.0).expires_at == 5600.0
    back = suspension.finish(suspension.regrant(away, 5000.0))
    again = lease_states.restore_time(lease_states.shorten(back, 5100.0, "node rig1 is draining by root"))
    assert again.expires_at == 6000.0


def test_a_suspended_lease_ends_by_the_proof_that_its_container_is_gone() -> None:
    """Although it holds no GPU."""
    suspended = suspension.prove(suspension.begin(active(), 10, 1.0), 10, 2.0)
    ending = lease_states.release(suspended, "stopped", 3.0)
    assert (ending.state, lease_states.list_unproven_nodes(ending)) == (LeaseState.RELEASING, ("rig1",))
    assert lease_states.prove_released(ending, "rig1", 4.0).state is LeaseState.RELEASED


def test_a_jump_of_the_clock_moves_all_times() -> None:
    lease = suspension.finish(
        suspension.regrant(
            suspension.request_resume(suspension.prove(suspension.begin(active(), 1, 1.0), 1, 2.0), 3.0), 4.0
        )
    )
    again = suspension.begin(lease, 1, 50.0)
    moved = lease_states.shift_times(again, 1000.0)
    assert (moved.held_from, moved.suspension and moved.suspension.since) == (1004.0, 1050.0)


def test_the_request_is_for_this_gpu_alone() -> None:
    """Of two equal cards only the notebook's own serves it; its container keeps CPU and memory meanwhile."""
    suspended = suspension.request_resume(suspension.prove(suspension.begin(active(), 8000, 1.0), 8000, 2.0), 3.0)
    request, host = scheduler_input.list_values(suspended, None)
    assert isinstance(host, Allocation)
    assert host.node_allocations[0].slots == ()
    assert host.node_allocations[0].memory_mib == suspended.find_size("rig1").memory_mib + 8000
    slots = [
        GpuSlot(uuid=f"GPU-rig1-{index}", node="rig1", index=index, card=GpuSpec(
            model="RTX 5090", memory_mib=32607, awaited_as=f"GPU-rig1-{index}" if index == 1 else None
        ))
        for index in range(2)
    ]  # fmt: skip
    scheduler = BuiltinScheduler()
    scheduler.rebuild(
        SchedulerSnapshot(nodes=[NodeCapacity(name="rig1", slots=tuple(slots))], requests=[request], allocations=[host])
    )
    [granted] = scheduler.decide(10.0).grants.values()
    assert [slot.uuid for slot in granted.node_allocations[0].slots] == ["GPU-rig1-1"]
    # Others may have the awaited card, and a requirement of it takes no other.
    assert GpuRequirement(models=("RTX 5090",)).accepts(slots[1].card)
    assert not GpuRequirement(uuid="GPU-rig1-1").accepts(slots[0].card)


def test_a_suspended_lease_that_waits_for_nothing_has_its_container_alone() -> None:
    suspended = suspension.prove(suspension.begin(active(), 8000, 1.0), 8000, 2.0)
    [host] = scheduler_input.list_values(suspended, None)
    assert isinstance(host, Allocation)
    assert host.request.gpus_per_node == 0


DEMANDS = st.lists(
    st.builds(
        WaitingDemand,
        gpus=st.integers(1, 3),
        candidates=st.frozensets(st.sampled_from([f"GPU-{n}" for n in range(6)])),
    ),
    max_size=4,
)
HOLDERS = st.lists(st.integers(0, 5), unique=True, max_size=6).map(
    lambda numbers: [IdleHolder(lease=f"l{n}", uuid=f"GPU-{n}", idle_s=n * 60.0) for n in numbers]
)


@given(DEMANDS, HOLDERS, st.sets(st.integers(0, 5)).map(lambda found: {f"GPU-{n}" for n in found}))
def test_whatever_is_suspended_lets_a_request_start(
    demands: list[WaitingDemand], holders: list[IdleHolder], free: set[str]
) -> None:
    """Each chosen notebook has a GPU that some request can use, and without requests nothing is chosen."""
    free -= {holder.uuid for holder in holders}
    chosen = suspension.choose(demands, holders, free)
    by_lease = {holder.lease: holder for holder in holders}
    assert len(chosen) == len(set(chosen)) <= sum(demand.gpus for demand in demands)
    usable = frozenset[str]().union(*(demand.candidates for demand in demands)) if demands else frozenset()
    assert all(by_lease[lease].uuid in usable for lease in chosen)


def test_the_longest_idle_notebooks_come_first_and_one_gpu_serves_one_request() -> None:
    holders = [IdleHolder(lease=f"l{n}", uuid=f"GPU-{n}", idle_s=100.0 * n) for n in range(3)]
    everything = frozenset({"GPU-0", "GPU-1", "GPU-2", "GPU-3"})
    one, two = WaitingDemand(gpus=1, candidates=everything), WaitingDemand(gpus=2, candidates=everything)
    assert suspension.choose([one], holders, set()) == ["l2"]
    assert suspension.choose([one], holders, {"GPU-3"}) == []
    assert suspension.choose([two, one], holders, {"GPU-3"}) == ["l2", "l1"]
    # Five GPUs cannot be had: nothing is suspended in vain, and a later request gets what it needs.
    assert suspension.choose([WaitingDemand(gpus=5, candidates=everything), one], holders, set()) == ["l2"]


def test_states_are_described_for_people() -> None:
    """One sentence for each state, with where and how much."""
    suspended = suspension.prove(suspension.begin(active(), 8192, 1.0), 8192, 2.0)
    texts = {
        state: suspension.describe(suspended, suspension.Suspension(state=state, since=2.0, moved_mib=8192), 602.0)
        for state in SuspensionState
    }
    assert texts == {
        SuspensionState.SUSPENDING: "its GPU memory is being moved into host memory (8.0 GiB)",
        SuspensionState.SUSPENDED: (
            "suspended for 10 min: 8.0 GiB of GPU memory are kept in host memory; a cell that runs brings it back"
        ),
        SuspensionState.RESUMING: "waits for the RTX 5090 on rig1, which others use",
        SuspensionState.RESTORING: "its memory is being moved back to the RTX 5090 on rig1 (8.0 GiB)",
    }
