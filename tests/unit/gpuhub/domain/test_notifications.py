"""What is reported of leases and jobs, and how."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuhub.broker_api.schemas import JobState, LeaseState, NotificationKind, Purpose
from gpuhub.domain import suspension
from gpuhub.domain.models import JobRow, LeasedGpu, LeaseRow, NotificationRow, ResourceRequest
from gpuhub.domain.notifications import (
    BACKOFF_S,
    MAX_BODY,
    MAX_LISTED,
    build_idle,
    build_time_left,
    choose_pause,
    combine,
    has_little_time,
    list_job_notifications,
    list_lease_notifications,
)
from tests.support.broker.factories import build_running_job

GPU = LeasedGpu(uuid="GPU-1", node="rig1", index=0, model="RTX 5090", memory_mib=32607, worker=0)
WAITING = LeaseRow(
    id="l1", seq=1, key="k", owner="ada", purpose=Purpose.NOTEBOOK, subject="", profile="rtx5090",
    resources=ResourceRequest(), created_at=100.0, since=100.0,
)  # fmt: skip
GRANTED = WAITING.evolve(state=LeaseState.GRANTED, granted_at=820.0, gpus=(GPU,), nodes=("rig1",))
JOB = JobRow(
    id="j1", run_id="run-1", owner="ada", server="", notebook_lease=None, lease_id="l1", image="i", nnodes=1,
    nproc_per_node=1, created_at=0.0, since=0.0, started_at=100.0, detached=True, state=JobState.STOPPING,
)  # fmt: skip


def list_all(before: Any, after: Any, now: float = 820.0) -> list[tuple[str, str, str]]:
    report = list_job_notifications if isinstance(after, JobRow) else list_lease_notifications
    return [(row.kind.value, row.title, row.body) for row in report(before, after, now)]


def test_a_grant_after_a_wait_is_reported_once() -> None:
    """Not one that came at once, nor one without a GPU, nor later changes of the lease."""
    assert list_all(WAITING, GRANTED) == [
        ("granted", "Your GPU is there: RTX 5090 on rig1", "Your notebook waited 12 min and starts now.")
    ]
    assert list_all(WAITING, GRANTED, 110.0) == []
    assert list_all(WAITING, GRANTED.evolve(gpus=())) == []
    assert list_all(GRANTED, GRANTED.evolve(state=LeaseState.ACTIVE)) == []
    second = GRANTED.evolve(subject="second", gpus=(GPU, GPU, replace(GPU, node="rig2")))
    assert [row[1:] for row in list_all(WAITING, second)] == [
        ("Your GPU is there: 3 × RTX 5090 on rig1, rig2", "Your notebook 'second' waited 12 min and starts now.")
    ]
    [row] = list_lease_notifications(WAITING, GRANTED, 820.0, JOB.evolve(name="train"))
    assert row.body == "Job train waited 12 min and starts now."


def test_quarantine_is_reported_to_the_owner_of_the_machines() -> None:
    """The lease's own owner can do nothing about it."""
    after = GRANTED.evolve(state=LeaseState.QUARANTINED, note="node rig1 does not answer")
    [row] = list_lease_notifications(GRANTED.evolve(state=LeaseState.RELEASING), after, 900.0)
    assert (row.owner, row.kind) == (None, NotificationKind.GPU_FAILED)
    assert "node rig1 does not answer" in row.body


@pytest.mark.parametrize(
    ("changes", "kind", "title", "body"),
    [
        ({"exit_code": 0, "reason": "done"}, "job-ended", "Job run-1 has ended", "Done. It ran for 12 min."),
        (
            {"exit_code": 1, "has_failed": True, "reason": "worker 0 on rig1: ended with exit code 1"},
            "job-failed", "Job run-1 failed", "Worker 0 on rig1: ended with exit code 1. It ran for 12 min.",
        ),
        (
            {"reason": "its time limit was reached", "name": "train"},
            "job-ended", "Job train has ended", "Its time limit was reached. It ran for 12 min.",
        ),
    ],
)  # fmt: skip
def test_ends_of_jobs(changes: dict[str, Any], kind: str, title: str, body: str) -> None:
    """With the reason; a failure has a kind of its own."""
    assert list_all(JOB, JOB.evolve(state=JobState.ENDED, **changes)) == [(kind, title, body)]


def test_launches_of_notebooks_end_silently() -> None:
    """Their user watches them."""
    launch = JOB.evolve(detached=False)
    assert list_all(launch, launch.evolve(state=JobState.ENDED, reason="released")) == []


def test_each_preemption_is_reported() -> None:
    """Under a key of its own."""
    running = JOB.evolve(state=JobState.RUNNING)
    keys = [
        row.key
        for count in (0, 1)
        for row in list_job_notifications(
            running.evolve(preemptions=count), running.evolve(state=JobState.PREEMPTING, preemptions=count), 1.0
        )
    ]
    assert keys == ["preempted:j1:0", "preempted:j1:1"]


@pytest.mark.parametrize(
    ("reason", "body"),
    [(None, "Others need its GPUs."), ("node rig3: it does not answer", "Node rig3: it does not answer.")],
)
def test_preemption_names_its_reason(reason: str | None, body: str) -> None:
    """Others need the GPUs, or a node does not answer."""
    running = JOB.evolve(state=JobState.RUNNING)
    (row,) = list_job_notifications(running, running.evolve(state=JobState.PREEMPTING, reason=reason), 1.0)
    assert row.body.startswith(f"{body} It may write a checkpoint, waits again,")


def test_a_job_that_makes_way_is_reported_when_its_gpu_is_free() -> None:
    """And when it has it again after a while; an attempt that is refused is not."""
    _, active = build_running_job(nodes=1, scavenge=True)
    leaving = suspension.begin_job(active, 8192, 100.0)
    away = suspension.prove(leaving, 8192, 110.0)
    back = suspension.regrant(away, 900.0)
    steps = ((active, leaving), (leaving, suspension.abandon(leaving)), (leaving, away), (away, back))
    rows = [row for before, after in steps for row in list_lease_notifications(before, after, 900.0, JOB)]
    assert [(row.kind, row.title) for row in rows] == [
        (NotificationKind.JOB_PREEMPTED, "Job run-1 is suspended"),
        (NotificationKind.GRANTED, "Your GPU is back: RTX 5090 on rig1"),
    ]
    assert rows[1].body == "Job run-1 waited 13 min and continues now."


def test_time_left() -> None:
    """Ten minutes before the end of a lease that is longer than twice that; an extension makes a new one."""
    lease = GRANTED.evolve(granted_at=0.0, expires_at=7200.0)
    assert [has_little_time(lease, now) for now in (6599.0, 6600.0, 7199.0, 7200.0)] == [False, True, True, False]
    assert not has_little_time(lease.evolve(expires_at=1200.0), 700.0)
    assert not has_little_time(lease.evolve(expires_at=None), 700.0)
    row = build_time_left(lease, 600.0)
    assert (row.title, row.valid_s) == ("10 min left: RTX 5090 on rig1", 600.0)
    assert build_time_left(lease.evolve(expires_at=9000.0), 600.0).key != row.key


def test_idle_notebook() -> None:
    """With why, and until when it can be read in time."""
    row = build_idle(GRANTED, "no activity for 50 min", 600.0, 1000.0)
    assert row.title == "Your idle notebook will be stopped in 10 min"
    assert "RTX 5090 on rig1: no activity for 50 min." in row.body
    assert row.valid_s == 600.0


def build(number: int, body: str = "text") -> NotificationRow:
    return NotificationRow(kind=NotificationKind.JOB_ENDED, key=f"k{number}", title=f"title {number}", body=body)


def test_several_become_one_message() -> None:
    """Bounded in number and length."""
    assert (combine([build(1)], is_repeated=False).title, combine([build(1)], is_repeated=False).body) == (
        "title 1",
        "text",
    )
    both = combine([build(1), build(2)], is_repeated=False)
    assert (both.title, both.body) == ("2 notifications of gpuhub", "• title 1: text\n• title 2: text")
    many = combine([build(number, "x" * 10_000) for number in range(100)], is_repeated=False)
    assert many.body.endswith(f"… and {100 - MAX_LISTED} more")
    assert len(many.body) < MAX_LISTED * (MAX_BODY + 200)


def test_a_repeated_message_says_so() -> None:
    """Its receiver may have it already."""
    assert combine([build(1)], is_repeated=True).body.startswith("gpuhub restarted while it sent this")


def test_pauses_grow() -> None:
    """And the last one is repeated."""
    assert [choose_pause(attempt) for attempt in range(1, 7)] == [*BACKOFF_S, BACKOFF_S[-1]]
