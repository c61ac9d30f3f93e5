"""Leases against one node's containers: what is done in every combination."""

from __future__ import annotations

import pytest

from gpuhub import names
from gpuhub.broker.reconcile import (
    Action,
    Container,
    End,
    Gone,
    Remove,
    WorkerEnded,
    is_settled,
    parse_container,
    reconcile_node,
)
from gpuhub.broker.rows import Ask, JobRow, LeasedGpu, LeaseRow, WorkerRow
from gpuhub.broker.schemas import JobState, LeaseState, Purpose, WorkerState

NOW = 10_000.0


def lease(state: LeaseState, *, since: float = NOW - 30, **changes: object) -> LeaseRow:
    row = LeaseRow(
        id="l1",
        seq=1,
        key="k",
        owner="ada",
        purpose=Purpose.NOTEBOOK,
        subject="",
        profile="p",
        ask=Ask(),
        created_at=1.0,
        since=since,
        state=state,
        epoch=1,
        nodes=("rig1",),
        gpus=(LeasedGpu(uuid="GPU-1", node="rig1", index=0, model="RTX 5090", memory_mib=1, worker=0),),
        reason="stopped" if state is LeaseState.RELEASING else None,
    )
    return row.evolve(**changes)


def container(state: str = "running", **changes: object) -> Container:
    parts: dict[str, object] = {"id": "c1", "kind": "notebook", "lease": "l1", "epoch": 1, "worker": None}
    return Container(**{**parts, "state": state, **changes})  # type: ignore[arg-type]


def actions(
    *containers: Container, of: LeaseRow, job: JobRow | None = None, busy: frozenset[str] = frozenset()
) -> list[Action]:
    return reconcile_node(
        node="rig1",
        containers=containers,
        leases={of.id: of},
        jobs={} if job is None else {job.id: job},
        listed_at=NOW,
        busy=busy,
    )


NONE: list[Action] = []


@pytest.mark.parametrize(
    ("row", "there", "expected"),
    [
        # A granted notebook is being made.
        (lease(LeaseState.GRANTED), [], NONE),
        (lease(LeaseState.GRANTED), [container("created")], NONE),
        (
            lease(LeaseState.GRANTED, since=NOW - 301),
            [],
            [End(lease_id="l1", reason="it was not started within 5 minutes")],
        ),
        # An active one lives as long as its container.
        (lease(LeaseState.ACTIVE), [container()], NONE),
        (lease(LeaseState.ACTIVE), [container("paused")], NONE),
        (lease(LeaseState.ACTIVE), [container("created")], NONE),
        (
            lease(LeaseState.ACTIVE, since=NOW - 121),
            [container("created")],
            [End(lease_id="l1", reason="its container was never started")],
        ),
        (lease(LeaseState.ACTIVE), [container("exited")], [End(lease_id="l1", reason="its container ended")]),
        (lease(LeaseState.ACTIVE), [container("dead")], [End(lease_id="l1", reason="its container ended")]),
        (lease(LeaseState.ACTIVE), [], [End(lease_id="l1", reason="its container is gone")]),
        # A list begun before the activation says nothing about it.
        (lease(LeaseState.ACTIVE, since=NOW + 0.01), [], NONE),
        # Time limits: the hub gets a minute to stop it.
        (lease(LeaseState.ACTIVE, expires_at=NOW - 59), [container()], NONE),
        (
            lease(LeaseState.ACTIVE, expires_at=NOW - 61),
            [container()],
            [End(lease_id="l1", reason="its time limit was reached")],
        ),
        # Releasing: containers go, then the lease.
        (lease(LeaseState.RELEASING), [container()], [Remove(container_id="c1", why="stopped")]),
        (lease(LeaseState.RELEASING), [container("exited")], [Remove(container_id="c1", why="stopped")]),
        (lease(LeaseState.RELEASING), [], [Gone(lease_id="l1")]),
        (lease(LeaseState.RELEASING, since=NOW + 0.01), [], NONE),
        # Nothing to do on a node where the lease has nothing.
        (lease(LeaseState.ACTIVE, nodes=("rig2",)), [], NONE),
        (lease(LeaseState.WAITING, nodes=(), gpus=()), [], NONE),
    ],
)
def test_notebooks(row: LeaseRow, there: list[Container], expected: list[Action]) -> None:
    """One lease and what its node shows."""
    assert actions(*there, of=row) == expected


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lease": "gone"}, "its lease gone has ended or never was"),
        ({"lease": ""}, "its lease (none) has ended or never was"),
        ({"epoch": 2}, "it is of epoch 2 of lease l1, which is in epoch 1"),
    ],
)
def test_strangers_are_removed(changes: dict[str, object], why: str) -> None:
    """A container that belongs to no open lease is removed, and until then the node gets no work."""
    found = actions(container(id="stranger", **changes), container(), of=lease(LeaseState.ACTIVE))
    assert found == [Remove(container_id="stranger", why=why, is_foreign=True)]
    assert not is_settled(found)


def test_a_container_on_the_wrong_node_is_a_stranger() -> None:
    """A lease's container belongs on the lease's nodes alone."""
    found = actions(container(), of=lease(LeaseState.ACTIVE, nodes=("rig2",)))
    assert [action.why for action in found if isinstance(action, Remove)] == ["its lease l1 is for rig2"]


def test_the_gpu_agent_is_left_alone() -> None:
    """The agent sees all GPUs and holds none."""
    found = actions(container(kind=names.KIND_AGENT, lease="", epoch=0), of=lease(LeaseState.RELEASING))
    assert found == [Gone(lease_id="l1")]


def job(state: JobState, *workers: WorkerState) -> JobRow:
    return JobRow(
        id="j1",
        run_id="run-000001",
        owner="ada",
        server="",
        notebook_lease=None,
        lease_id="l1",
        image="i",
        nnodes=len(workers),
        nproc_per_node=1,
        created_at=1.0,
        since=1.0,
        state=state,
        workers=tuple(WorkerRow(index=i, node="rig1", state=s) for i, s in enumerate(workers)),
    )


def worker(index: int, state: str = "running") -> Container:
    return container(state, id=f"w{index}", kind="worker", worker=index)


def test_ended_and_lost_workers_are_found() -> None:
    """An exited worker is to be asked why, a missing one is gone, a pending one is not expected yet."""
    states = (WorkerState.RUNNING, WorkerState.RUNNING, WorkerState.RUNNING, WorkerState.PENDING)
    row = lease(LeaseState.ACTIVE, purpose=Purpose.JOB)
    found = actions(worker(0), worker(1, "exited"), of=row, job=job(JobState.STARTING, *states))
    assert found == [
        WorkerEnded(job_id="j1", index=1, container_id="w1"),
        WorkerEnded(job_id="j1", index=2, container_id=None),
    ]


def test_workers_that_are_being_made_are_not_judged() -> None:
    """While starts are under way a list may be older than what the ledger knows."""
    row = lease(LeaseState.ACTIVE, purpose=Purpose.JOB)
    running = job(JobState.RUNNING, WorkerState.RUNNING)
    assert actions(of=row, job=running, busy=frozenset({"l1"})) == []
    releasing = lease(LeaseState.RELEASING, purpose=Purpose.JOB)
    assert actions(of=releasing, job=running, busy=frozenset({"l1"})) == []


def test_a_list_entry_is_read_from_its_labels() -> None:
    """Docker's own list carries all that is needed; labels of others do no harm."""
    raw = {
        "Id": "c1",
        "State": "running",
        "Labels": {
            names.LABEL_KIND: "worker",
            names.LABEL_LEASE: "l1",
            names.LABEL_EPOCH: "3",
            names.LABEL_WORKER: "2",
            "else": "x",
        },
    }
    assert parse_container(raw) == Container(id="c1", kind="worker", lease="l1", epoch=3, worker=2, state="running")
    odd = parse_container({"Id": "c2", "State": "Exited", "Labels": {names.LABEL_EPOCH: "-1"}})
    assert odd == Container(id="c2", kind="", lease="", epoch=0, worker=None, state="exited")
