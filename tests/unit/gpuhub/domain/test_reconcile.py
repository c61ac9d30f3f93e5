"""Leases against one node's containers: what is done in every combination."""

from __future__ import annotations

import pytest

from gpuhub.broker_api.schemas import JobState, LeaseState, Purpose, WorkerState
from gpuhub.common import names
from gpuhub.domain.models import JobRow, LeasedGpu, LeaseRow, WorkerRow
from gpuhub.domain.reconcile import (
    Action,
    MarkUnproven,
    ObservedContainer,
    ObservedNode,
    ProveReleased,
    RecordWorkerExit,
    RefreshIdentity,
    ReleaseLease,
    RemoveContainer,
    SendSigterm,
    is_clean,
    parse_container,
    parse_devices,
    reconcile_node,
    relies_on_absence,
)
from gpuhub.nodes.status import NodeIdentity
from tests.support.broker.factories import lease_row

NOW = 10_000.0


def gpu(worker: int, node: str = "rig1", **changes: float) -> LeasedGpu:
    parts = {"uuid": f"GPU-{worker + 1}", "node": node, "index": worker, "model": "RTX 5090", "memory_mib": 1}
    return LeasedGpu(**parts, worker=worker, **changes)  # type: ignore[arg-type]


def lease(state: LeaseState, *, since: float = NOW - 30, **changes: object) -> LeaseRow:
    row = lease_row(
        created_at=1.0,
        since=since,
        state=state,
        epoch=1,
        nodes=("rig1",),
        identities={"rig1": ("d1", "b1")},
        gpus=(gpu(0),),
        reason="stopped" if state is LeaseState.RELEASING else None,
    )
    return row.evolve(**changes)


def container(state: str = "running", **changes: object) -> ObservedContainer:
    parts: dict[str, object] = {"id": "c1", "kind": "notebook", "lease": "l1", "epoch": 1, "worker": None}
    return ObservedContainer(**{**parts, "state": state, **changes})  # type: ignore[arg-type]


def actions(
    *containers: ObservedContainer,
    of: LeaseRow,
    job: JobRow | None = None,
    starting_leases: frozenset[str] = frozenset(),
    identity: NodeIdentity = ("d1", "b1"),
) -> list[Action]:
    return reconcile_node(
        ObservedNode(
            node="rig1", identity=identity, containers=containers, observed_at=NOW, starting_leases=starting_leases
        ),
        leases={of.id: of},
        on_node=[of] if "rig1" in of.nodes else [],
        job_of={} if job is None else {job.lease_id: job},
        preempt_grace=60,
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
            [ReleaseLease(lease_id="l1", reason="it was not started within 5 minutes")],
        ),
        # An active one lives as long as its container.
        (lease(LeaseState.ACTIVE), [container()], NONE),
        (lease(LeaseState.ACTIVE), [container("paused")], NONE),
        (lease(LeaseState.ACTIVE), [container("created")], NONE),
        (
            lease(LeaseState.ACTIVE, since=NOW - 121),
            [container("created")],
            [ReleaseLease(lease_id="l1", reason="its container was never started")],
        ),
        (
            lease(LeaseState.ACTIVE),
            [container("exited")],
            [ReleaseLease(lease_id="l1", reason="its container ended", is_loss=True)],
        ),
        (
            lease(LeaseState.ACTIVE),
            [container("dead")],
            [ReleaseLease(lease_id="l1", reason="its container ended", is_loss=True)],
        ),
        (lease(LeaseState.ACTIVE), [], [ReleaseLease(lease_id="l1", reason="its container is gone", is_loss=True)]),
        (
            lease(LeaseState.ACTIVE, expires_at=NOW - 1),
            [],
            [ReleaseLease(lease_id="l1", reason="its container is gone")],
        ),
        # A list begun before the activation says nothing about it.
        (lease(LeaseState.ACTIVE, since=NOW + 0.01), [], NONE),
        # Time limits: the hub gets a minute to stop it.
        (lease(LeaseState.ACTIVE, expires_at=NOW - 59), [container()], NONE),
        (
            lease(LeaseState.ACTIVE, expires_at=NOW - 61),
            [container()],
            [ReleaseLease(lease_id="l1", reason="its time limit was reached")],
        ),
        # Releasing: containers go, then the lease.
        (lease(LeaseState.RELEASING), [container()], [RemoveContainer(container_id="c1", reason="stopped")]),
        (lease(LeaseState.RELEASING), [container("exited")], [RemoveContainer(container_id="c1", reason="stopped")]),
        (lease(LeaseState.RELEASING), [], [ProveReleased(lease_id="l1")]),
        (lease(LeaseState.RELEASING, since=NOW + 0.01), [], NONE),
        # So it is with one that is quarantined: proof that comes late is proof.
        (lease(LeaseState.QUARANTINED), [container()], [RemoveContainer(container_id="c1", reason="released")]),
        (lease(LeaseState.QUARANTINED), [], [ProveReleased(lease_id="l1")]),
        # Nothing to do on a node where the lease has nothing.
        (lease(LeaseState.ACTIVE, nodes=("rig2",)), [], NONE),
        (lease(LeaseState.REQUESTED, nodes=(), gpus=()), [], NONE),
    ],
)
def test_notebook_leases_are_reconciled(row: LeaseRow, there: list[ObservedContainer], expected: list[Action]) -> None:
    """One lease and what its node shows."""
    assert actions(*there, of=row) == expected


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lease": "gone"}, "its lease gone has ended or never was"),
        ({"lease": ""}, "its lease (none) has ended or never was"),
        ({"epoch": 2}, "it is of epoch 2 of lease l1, which is in epoch 1"),
        ({"devices": frozenset({"GPU-1", "GPU-7"})}, "it has GPU GPU-7, which is not in its lease l1"),
        ({"devices": frozenset({"all"})}, "it has GPU all, which is not in its lease l1"),
    ],
)
def test_foreign_containers_are_removed(changes: dict[str, object], why: str) -> None:
    """A container that belongs to no open lease is removed, and until then the node gets no work."""
    found = actions(container(id="stranger", **changes), container(), of=lease(LeaseState.ACTIVE))
    assert found == [RemoveContainer(container_id="stranger", reason=why, is_foreign=True)]
    assert not is_clean(found)


def test_container_on_the_wrong_node_is_foreign() -> None:
    """A lease's container belongs on the lease's nodes alone."""
    found = actions(container(), of=lease(LeaseState.ACTIVE, nodes=("rig2",)))
    assert [action.reason for action in found if isinstance(action, RemoveContainer)] == ["its lease l1 is for rig2"]


def test_gpu_agent_is_ignored() -> None:
    """The agent sees all GPUs and holds none."""
    found = actions(container(kind=names.KIND_AGENT, lease="", epoch=0), of=lease(LeaseState.RELEASING))
    assert found == [ProveReleased(lease_id="l1")]


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


def worker(index: int, state: str = "running") -> ObservedContainer:
    return container(state, id=f"w{index}", kind="worker", worker=index)


def test_ended_and_lost_workers_are_found() -> None:
    """An exited worker is to be asked why, a missing one is gone, a pending one is not expected yet."""
    states = (WorkerState.RUNNING, WorkerState.RUNNING, WorkerState.RUNNING, WorkerState.PENDING)
    row = lease(LeaseState.ACTIVE, purpose=Purpose.JOB, gpus=tuple(gpu(index) for index in range(4)))
    found = actions(worker(0), worker(1, "exited"), of=row, job=job(JobState.STARTING, *states))
    assert found == [
        RecordWorkerExit(job_id="j1", index=1, container_id="w1"),
        RecordWorkerExit(job_id="j1", index=2, container_id=None),
    ]


def test_workers_being_created_are_ignored() -> None:
    """While starts are under way a list may be older than what the ledger knows."""
    row = lease(LeaseState.ACTIVE, purpose=Purpose.JOB)
    running = job(JobState.RUNNING, WorkerState.RUNNING)
    assert actions(of=row, job=running, starting_leases=frozenset({"l1"})) == []
    releasing = lease(LeaseState.RELEASING, purpose=Purpose.JOB)
    assert actions(of=releasing, job=running, starting_leases=frozenset({"l1"})) == []


def test_container_is_parsed_from_its_labels() -> None:
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
    assert parse_container(raw) == ObservedContainer(
        id="c1", kind="worker", lease="l1", epoch=3, worker=2, state="running"
    )
    odd = parse_container({"Id": "c2", "State": "Exited", "Labels": {names.LABEL_EPOCH: "-1"}})
    assert odd == ObservedContainer(id="c2", kind="", lease="", epoch=0, worker=None, state="exited")


def test_container_gpus_are_parsed_from_the_inspection() -> None:
    """By UUID; a request without names is one for all; none is none."""
    asked = {"HostConfig": {"DeviceRequests": [{"DeviceIDs": ["GPU-1"]}, {"DeviceIDs": ["MIG-2"]}]}}
    assert parse_devices(asked) == {"GPU-1", "MIG-2"}
    assert parse_devices({"HostConfig": {"DeviceRequests": [{"DeviceIDs": None, "Count": -1}]}}) == {"all"}
    assert parse_devices({"HostConfig": {"DeviceRequests": None}}) == frozenset()
    assert parse_devices({}) == frozenset()


# -- whose word counts -------------------------------------------------------------------------------------------------

OTHER_DAEMON = ("d2", "b1")
DOUBT = MarkUnproven(
    lease_id="l1",
    reason="another Docker daemon answers on rig1 than when the lease began, and no restart of it is known",
)


@pytest.mark.parametrize(
    ("then", "now", "is_proof"),
    [
        (("d1", "b1"), ("d1", "b1"), True),
        (("d1", "b1"), ("d1", "b2"), True),
        (("d1", "b1"), ("d1", None), True),
        (("d1", "b1"), ("d2", "b2"), True),
        (("d1", "b1"), ("d2", "b1"), False),
        (("d1", "b1"), ("d2", None), False),
        (("d1", None), ("d2", "b2"), False),
        (("d1", "b1"), (None, "b2"), False),
        (None, ("d2", "b2"), True),
        ((None, None), ("d2", "b2"), True),
    ],
)
def test_proof_requires_the_same_daemon_or_a_machine_restart(
    then: NodeIdentity | None, now: NodeIdentity, is_proof: bool
) -> None:
    """A daemon with other data lists nothing of what the one before it still runs."""
    row = lease(LeaseState.RELEASING, identities={} if then is None else {"rig1": then})
    found = [action for action in actions(of=row, identity=now) if action != RefreshIdentity(lease_id="l1")]
    assert found == ([ProveReleased(lease_id="l1")] if is_proof else [DOUBT])
    assert relies_on_absence(found) is is_proof


@pytest.mark.parametrize(
    ("then", "now", "is_renewed"),
    [
        (("d1", "b1"), ("d1", "b1"), False),
        (("d1", "b1"), ("d1", None), False),
        (("d1", "b1"), ("d1", "b2"), True),
        (("d1", None), ("d1", "b2"), True),
        (None, ("d1", "b2"), True),
        (("d1", "b1"), ("d2", "b2"), False),
        (("d1", "b1"), (None, "b2"), False),
    ],
)
def test_lease_that_survives_a_restart_needs_a_later_restart(
    then: NodeIdentity | None, now: NodeIdentity, is_renewed: bool
) -> None:
    """A container that is made after the restart runs on when the daemon is wiped later."""
    row = lease(LeaseState.GRANTED, identities={} if then is None else {"rig1": then})
    assert (RefreshIdentity(lease_id="l1") in actions(of=row, identity=now)) is is_renewed


def test_another_daemon_ends_no_lease() -> None:
    """A notebook and a worker that another daemon does not list may still run; what it lists is acted on."""
    active = lease(LeaseState.ACTIVE)
    assert actions(of=active, identity=OTHER_DAEMON) == [DOUBT]
    ended = ReleaseLease(lease_id="l1", reason="its container ended", is_loss=True)
    assert actions(container("exited"), of=active, identity=OTHER_DAEMON) == [DOUBT, ended]
    over = lease(LeaseState.ACTIVE, expires_at=NOW - 61)
    assert actions(of=over, identity=OTHER_DAEMON) == [
        DOUBT,
        ReleaseLease(lease_id="l1", reason="its time limit was reached"),
    ]
    row = lease(LeaseState.ACTIVE, purpose=Purpose.JOB)
    assert actions(of=row, job=job(JobState.RUNNING, WorkerState.RUNNING), identity=OTHER_DAEMON) == [DOUBT]
    releasing = lease(LeaseState.RELEASING)
    assert actions(container(), of=releasing, identity=OTHER_DAEMON) == [
        DOUBT,
        RemoveContainer(container_id="c1", reason="stopped"),
    ]


# -- giving back -------------------------------------------------------------------------------------------------------


def test_workers_of_a_preempted_job_are_signalled_once() -> None:
    """Those that run get a signal, those that ended are asked why."""
    row = lease(LeaseState.ACTIVE, purpose=Purpose.JOB, gpus=(gpu(0), gpu(1)))
    running = job(JobState.PREEMPTING, WorkerState.RUNNING, WorkerState.RUNNING)
    assert actions(worker(0), worker(1, "exited"), of=row, job=running) == [
        SendSigterm(container_id="w0", reason="job j1 gives its GPUs to others"),
        RecordWorkerExit(job_id="j1", index=1, container_id="w1"),
    ]


def shrinking(shed_at: float, **changes: float) -> LeaseRow:
    return lease(
        LeaseState.ACTIVE,
        purpose=Purpose.JOB,
        nodes=("rig2", "rig1"),
        gpus=(gpu(0, "rig2"), gpu(1, shrink_requested_at=shed_at, **changes)),
    )


@pytest.mark.parametrize(
    ("row", "there", "expected"),
    [
        (
            shrinking(NOW - 5),
            [worker(1)],
            [SendSigterm(container_id="w1", reason="lease l1 gives its GPUs on rig1 back")],
        ),
        (
            shrinking(NOW - 60),
            [worker(1)],
            [RemoveContainer(container_id="w1", reason="lease l1 gives its GPUs on rig1 back")],
        ),
        (
            shrinking(NOW - 5),
            [worker(1, "exited")],
            [RemoveContainer(container_id="w1", reason="lease l1 gives its GPUs on rig1 back")],
        ),
        (shrinking(NOW - 5), [], [ProveReleased(lease_id="l1")]),
        # A list begun before the job was told says nothing.
        (shrinking(NOW + 0.01), [], NONE),
        # What was given back is no place for its workers any more.
        (
            shrinking(NOW - 90, released_at=NOW - 50),
            [worker(1)],
            [
                RemoveContainer(
                    container_id="w1", reason="it is worker 1 of job j1, which has no such worker here", is_foreign=True
                )
            ],
        ),
        (shrinking(NOW - 90, released_at=NOW - 50), [], NONE),
    ],
)
def test_elastic_job_releases_a_node(row: LeaseRow, there: list[ObservedContainer], expected: list[Action]) -> None:
    """Its workers there are told, removed after the grace, and when they are gone its GPUs there are free."""
    shrunk = job(JobState.RUNNING, WorkerState.RUNNING).evolve(workers=(WorkerRow(index=0, node="rig2"),))
    assert actions(*there, of=row, job=shrunk) == expected


def test_another_daemon_does_not_prove_a_shrink() -> None:
    """Shrinking needs proof as an end does."""
    row = shrinking(NOW - 5)
    shrunk = job(JobState.RUNNING, WorkerState.RUNNING).evolve(workers=(WorkerRow(index=0, node="rig2"),))
    assert actions(of=row, job=shrunk, identity=OTHER_DAEMON) == [DOUBT]


def test_lease_of_a_job_is_not_treated_as_a_notebook() -> None:
    """A job's lease is never taken for a notebook's."""
    assert actions(of=lease(LeaseState.ACTIVE, purpose=Purpose.JOB)) == []
