"""Metrics of leases, queue and jobs, and what is counted when they change."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from gpuhub.broker.db.writer import Changes
from gpuhub.broker.metrics.ledger_metrics import MAX_EVENT_KINDS, LedgerCounters, collect_ledger
from gpuhub.broker_api.schemas import LeaseState, SuspensionState
from gpuhub.domain import job_states, lease_states, suspension
from gpuhub.domain.models import EventRow, LedgerSnapshot, ResourceRequest, Suspension
from tests.support.broker.factories import build_running_job, lease_row
from tests.support.broker.metrics import Metrics


def snapshot_of(*rows: object) -> LedgerSnapshot:
    leases = {row.id: row for row in rows if hasattr(row, "epoch")}
    jobs = {row.id: row for row in rows if not hasattr(row, "epoch")}
    return LedgerSnapshot(leases=leases, jobs=jobs)


def test_empty_broker_has_a_queue_of_length_zero() -> None:
    metrics = Metrics(collect_ledger(LedgerSnapshot(), 0.0))
    assert metrics.value("gpuhub_queue_length") == 0
    assert set(metrics.values("gpuhub_lease_open")) == set(metrics.values("gpuhub_job_open")) == {0.0}
    assert metrics.list("gpuhub_queue_requests") == []


def test_waiting_requests_are_summed_by_owner() -> None:
    """Number, GPUs and age; a request for half a GPU counts as half."""
    first = lease_row(resources=ResourceRequest(gpus_per_node=2))
    second = lease_row(id="l2", created_at=150.0, resources=ResourceRequest(share=2))
    metrics = Metrics(collect_ledger(snapshot_of(first, second), 200.0))
    who = {"owner": "ada", "purpose": "notebook"}
    assert metrics.value("gpuhub_queue_requests", **who) == 2
    assert metrics.value("gpuhub_queue_gpus", **who) == 2.5
    assert metrics.value("gpuhub_queue_oldest_age_seconds", **who) == 100.0
    assert metrics.value("gpuhub_queue_length") == 2
    assert metrics.value("gpuhub_lease_open", purpose="notebook", state="requested") == 2


def test_suspended_notebooks_are_counted_by_state() -> None:
    """Every state is there, also without any."""
    suspension = Suspension(state=SuspensionState.SUSPENDED, since=1.0)
    metrics = Metrics(collect_ledger(snapshot_of(lease_row(state=LeaseState.ACTIVE, suspension=suspension)), 2.0))
    assert metrics.value("gpuhub_lease_suspended", state="suspended") == 1
    assert sorted(metrics.values("gpuhub_lease_suspended")) == [0.0, 0.0, 0.0, 1.0]


def test_held_gpus_name_their_lease_and_job() -> None:
    """Each GPU by UUID, so that readings can be joined with owner and job."""
    job, lease = build_running_job(nodes=2)
    job = job.evolve(name="bert")
    metrics = Metrics(collect_ledger(snapshot_of(job, lease), 20.0))
    assert metrics.list("gpuhub_lease_gpus", UUID="GPU-rig2") == [
        {
            "gpu": "0",
            "UUID": "GPU-rig2",
            "model": "RTX 5090",
            "Hostname": "rig2",
            "lease": "l1",
            "owner": "ada",
            "purpose": "job",
            "job_id": "j1",
            "job_name": "bert",
        }
    ]
    assert metrics.value("gpuhub_job_gpus", job_id="j1", owner="ada", job_name="bert") == 2
    assert metrics.value("gpuhub_job_start_timestamp_seconds", job_id="j1") == 11.0
    assert metrics.value("gpuhub_job_open", state="running") == 1


def test_shares_of_a_gpu_add_up_to_one() -> None:
    _, lease = build_running_job(nodes=1, share=4)
    metrics = Metrics(collect_ledger(snapshot_of(lease), 20.0))
    assert metrics.values("gpuhub_lease_gpus") == [0.25]


def test_waiting_job_has_no_series_of_its_own() -> None:
    """Arrays of thousands would otherwise be thousands of series."""
    job, _ = build_running_job()
    metrics = Metrics(collect_ledger(snapshot_of(job), 20.0))
    assert metrics.list("gpuhub_job_gpus") == []


class Counted:
    """The counters of a broker that started at 0."""

    def __init__(self, started_at: float = 0.0) -> None:
        self.registry = CollectorRegistry()
        self.counters = LedgerCounters(self.registry, started_at)

    def record(self, **changes: list[object]) -> None:
        self.counters.record(Changes(**changes))

    @property
    def metrics(self) -> Metrics:
        return Metrics(self.registry.collect())

    def gpu_seconds(self, now: float, *rows: object) -> dict[str, float]:
        family = self.counters.collect_gpu_seconds(snapshot_of(*rows), now)
        return {sample.labels["owner"]: sample.value for sample in family.samples}


def test_grants_waits_and_ends_are_counted() -> None:
    """One lease from request to release: each once, however often it changes in between."""
    counted = Counted()
    _, active = build_running_job(nodes=1)
    requested = active.evolve(state=LeaseState.REQUESTED, granted_at=None, gpus=())
    released = lease_states.force_release(lease_states.release(active, "stopped", 30.0), "root", 40.0)
    counted.record(leases=[(None, requested)])
    counted.record(leases=[(requested, active)])
    counted.record(leases=[(active, active.evolve(note="x"))])
    counted.record(leases=[(active, released)])
    metrics = counted.metrics
    assert metrics.value("gpuhub_lease_granted_total", purpose="job") == 1
    assert metrics.value("gpuhub_lease_released_total", purpose="job") == 1
    assert metrics.value("gpuhub_queue_abandoned_total", purpose="job") == 0
    assert metrics.value("gpuhub_queue_wait_seconds_sum", purpose="job") == 9.0
    assert metrics.value("gpuhub_queue_wait_seconds_bucket", purpose="job", le="10.0") == 1
    assert metrics.value("gpuhub_lease_granted_total", purpose="notebook") == 0


def test_request_that_ends_before_its_grant_is_abandoned() -> None:
    counted = Counted()
    requested = lease_row()
    counted.record(leases=[(requested, lease_states.release(requested, "stopped", 130.0))])
    assert counted.metrics.value("gpuhub_queue_abandoned_total", purpose="notebook") == 1
    assert counted.metrics.value("gpuhub_lease_released_total", purpose="notebook") == 0


def test_gpu_time_grows_while_a_lease_runs_and_stays_when_it_ends() -> None:
    """In seconds of whole GPUs: two GPUs from 10 on, the second of them is released at 40."""
    counted = Counted()
    _, lease = build_running_job(nodes=2)
    assert counted.gpu_seconds(15.0, lease) == {"ada": 10.0}
    assert counted.gpu_seconds(40.0, lease) == {"ada": 60.0}
    shrunk = lease.evolve(gpus=(lease.gpus[0], replace(lease.gpus[1], released_at=40.0)))
    counted.record(leases=[(lease, shrunk)])
    assert counted.gpu_seconds(40.0, shrunk) == {"ada": 60.0}
    assert counted.gpu_seconds(50.0, shrunk) == {"ada": 70.0}
    ended = lease_states.force_release(lease_states.release(shrunk, "stopped", 60.0), "root", 60.0)
    counted.record(leases=[(shrunk, ended)])
    assert counted.gpu_seconds(100.0) == {"ada": 80.0}


def test_gpu_time_of_an_earlier_run_is_not_counted_again() -> None:
    """Prometheus has it from then, and adds what a counter has after a restart."""
    _, lease = build_running_job(nodes=1)
    assert Counted(started_at=100.0).gpu_seconds(130.0, lease) == {"ada": 30.0}


def test_gpu_time_of_a_suspended_job_is_counted_once() -> None:
    """It holds its GPU from 10 to 40 and again from 100 on: the time in between and before is not added again."""
    counted = Counted()
    _, lease = build_running_job(nodes=1)
    suspending = suspension.begin_job(lease, 1024, 40.0)
    suspended = suspension.prove(suspending, 1024, 40.0)
    counted.record(leases=[(suspending, suspended)])
    assert counted.gpu_seconds(90.0, suspended) == {"ada": 30.0}
    resumed = suspension.regrant(suspended, 100.0)
    counted.record(leases=[(suspended, resumed)])
    assert counted.gpu_seconds(110.0, resumed) == {"ada": 40.0}


def test_jobs_are_counted_by_outcome() -> None:
    counted = Counted()
    job, _ = build_running_job()
    for exit_code in (0, 0, 1, None):
        stopped = job_states.stop(job, "over", 20.0)
        ended = job_states.end(stopped, 21.0).evolve(exit_code=exit_code)
        counted.record(jobs=[(stopped, ended)])
    outcomes = ("succeeded", "failed", "stopped")
    assert [counted.metrics.value("gpuhub_job_ended_total", outcome=one) for one in outcomes] == [2, 1, 1]
    failing = job_states.fail(job, "worker 0 cannot be started", 20.0)
    counted.record(jobs=[(failing, job_states.end(failing, 21.0))])
    assert [counted.metrics.value("gpuhub_job_ended_total", outcome=one) for one in outcomes] == [2, 2, 1]


def test_preemptions_are_counted() -> None:
    counted = Counted()
    job, _ = build_running_job()
    counted.record(jobs=[(job, job.evolve(preemptions=1))])
    assert counted.metrics.value("gpuhub_job_preemptions_total") == 1


def test_number_of_event_kinds_is_bounded() -> None:
    counted = Counted()
    kinds = [f"kind.{number}" for number in range(MAX_EVENT_KINDS + 3)]
    counted.record(events=[EventRow(at=0.0, kind=kind, text="") for kind in kinds])
    assert counted.metrics.value("gpuhub_events_total", kind="other") == 3
    assert len(counted.metrics.list("gpuhub_events_total")) == MAX_EVENT_KINDS + 1
