"""When a launch releases workers for others, and how."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpu_launch.broker import models
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.common.launch_spec import Membership
from gpu_launch.errors import LaunchFailed
from gpu_launch.launch.membership import (
    CHECKPOINT_S,
    UNRESPONSIVE,
    MembershipChange,
    check_enough_nodes,
    checkpoint_seconds,
    describe_change,
    find_change,
)
from gpu_launch.launch.plan import LaunchPlan

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MEMBERSHIP = Membership(includes_notebook=False, workers=(0, 1), nodes=("rig1", "rig2"), nproc_per_node=1)


def plan(least=1):
    """Up to two workers."""
    return LaunchPlan(
        nnodes=2,
        least_nnodes=least,
        nproc_per_node=1,
        includes_notebook=False,
        notebook_gpus=(),
        exclude_nodes=(),
        demand=GpuRequest(scavenge=True),
    )


def worker(index, state="running", message=None):
    """A worker on a node of its own."""
    return models.Worker(index=index, node=f"rig{index + 1}", gpus=(), state=state, exit_code=None, message=message)


BOTH = (worker(0), worker(1))


def job(state="running", workers=BOTH, **parts):
    """A job on two nodes."""
    return models.Job(
        id="j", run_id="r", state=state, version=1, position=None, waiting_for=None, workers=workers, reason=None,
        renew_within_s=30.0, **parts,
    )  # fmt: skip


def change(found, *, least=1, leaving=(), gone=(), joined=()):
    """What has to be given, of a start that was never preempted."""
    workers = found.workers if found else ()
    return find_change(found, MEMBERSHIP, plan(least), workers=workers, leaving=leaving, gone=gone, joined=joined)


@pytest.mark.parametrize("state", ["starting", "running", "waiting", "a state of tomorrow"])
def test_no_worker_is_released_without_need(state):
    """Nor where nobody was asked."""
    assert change(job(state)) is None
    assert change(None) is None


@pytest.mark.parametrize(
    "found",
    [
        job("preempting"),
        job("waiting", workers=(), preemptions=1),
        job("running", preemptions=1),
        job("starting", preemptions=2),
    ],
    ids=["preempting", "missed: waits", "missed: runs again", "missed: twice"],
)
def test_preempted_job_releases_all_workers(found):
    """Also when its news came so late that it waits, or is granted, again."""
    assert change(found, least=2) == MembershipChange(is_complete=True, leaving=frozenset({0, 1}))


RELEASED = job(workers=(worker(1),))


@pytest.mark.parametrize(
    ("found", "leaving"),
    [(job(), {0}), (RELEASED, ()), (job(workers=(worker(0, "exited"),)), {0, 1})],
    ids=["gets SIGTERM", "no worker any more", "both ended, one gone"],
)
def test_elastic_job_releases_the_workers_that_the_broker_revokes(found, leaving):
    """However that is heard of first; no restart is used up."""
    given = change(found, leaving=leaving)
    assert (given.is_complete, 0 in given.leaving, given.lost) == (False, True, None)


def test_worker_failure_of_an_elastic_job_counts_as_a_restart():
    """Its memory, say."""
    lost = worker(0, "exited", "out of memory")
    found = job(workers=(lost, worker(1)))
    assert change(found) == MembershipChange(is_complete=False, leaving=frozenset({0}), lost=lost)


@pytest.mark.parametrize("found", [job(), None], ids=["the broker knows nothing", "nobody can be asked"])
def test_elastic_job_continues_without_an_unreachable_worker(found):
    """Long before the broker notices, or where there is none to ask; a restart is used up."""
    given = change(found, gone={1})
    assert (given.is_complete, given.leaving) == (False, frozenset({1}))
    assert (given.lost.node, given.lost.message) == ("rig2", UNRESPONSIVE)
    assert change(found, gone={7}) is None
    assert change(found, least=2, gone={1}) is None


def test_elastic_job_adds_new_workers():
    """At once with those that go, or by themselves."""
    assert change(job(), joined=["rig3"]) == MembershipChange(is_complete=False, leaving=frozenset(), joined=("rig3",))
    both = change(RELEASED, joined=["rig3"])
    assert (both.leaving, both.joined) == (frozenset({0}), ("rig3",))


def test_job_of_fixed_size_releases_no_single_worker():
    """Without one of them it cannot continue."""
    assert change(job(workers=(worker(0), worker(1, "exited"))), least=2) is None
    assert change(job("stopping"), leaving={1}) is None


def test_membership_change_is_reported_to_the_user():
    """How long there is, who goes, and with what it continues."""
    whole = MembershipChange(is_complete=True, leaving=frozenset({0, 1}))
    assert describe_change(whole, MEMBERSHIP, grace_s=60.0) == "preempted: others need the GPUs; 60 s for a checkpoint"
    assert describe_change(whole, MEMBERSHIP, grace_s=None) == "preempted: others need the GPUs"
    part = MembershipChange(is_complete=False, leaving=frozenset({1}))
    assert (
        describe_change(part, MEMBERSHIP, grace_s=60.0)
        == "rig2 is released, others need the GPUs; continuing with 1 node"
    )
    come = MembershipChange(is_complete=False, leaving=frozenset(), joined=("rig3", "rig4"))
    assert describe_change(come, MEMBERSHIP, grace_s=60.0) == "rig3, rig4 take part now; continuing with 4 nodes"
    swap = MembershipChange(is_complete=False, leaving=frozenset({0}), joined=("rig3",))
    assert describe_change(swap, MEMBERSHIP, grace_s=60.0) == (
        "rig1 is released, others need the GPUs; rig3 takes part now; continuing with 2 nodes"
    )
    lost = MembershipChange(is_complete=False, leaving=frozenset({0, 1}), lost=worker(0))
    assert describe_change(lost, MEMBERSHIP, grace_s=60.0) == "rig1, rig2 are lost; continuing with 0 nodes"


@pytest.mark.parametrize(
    ("left_s", "seconds"), [(42.0, 42.0), (-3.0, CHECKPOINT_S), (10**7, CHECKPOINT_S), (None, CHECKPOINT_S)]
)
def test_checkpoint_grace_period_comes_from_the_broker(left_s, seconds):
    """Unless the clocks of two machines make nonsense of it, or it is not told."""
    until = None if left_s is None else NOW + timedelta(seconds=left_s)
    assert checkpoint_seconds(job("preempting", checkpoint_until=until), NOW) == seconds
    assert checkpoint_seconds(None, NOW) == CHECKPOINT_S


def test_fewer_than_the_minimum_of_workers_is_an_error():
    """Said with both numbers."""
    check_enough_nodes(MEMBERSHIP, plan())
    with pytest.raises(LaunchFailed, match=r"1 node left, and --nnodes 2:2 needs 2\."):
        check_enough_nodes(MEMBERSHIP.without(frozenset({0})), plan(least=2))
