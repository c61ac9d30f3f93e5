"""Metrics of leases, the queue and jobs: their current number, and counters since the broker's start.

Series with an owner exist for users who have or wait for GPUs, and those with a job or lease while it holds GPUs, so
that the number of series is bounded by users and GPUs.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gpuhub.broker.db.writer import Changes
from gpuhub.broker.metrics.gpu_metrics import LABELS, label_gpu
from gpuhub.broker_api.schemas import JobState, LeaseState, Purpose, SuspensionState
from gpuhub.domain.models import JobRow, LeasedGpu, LeaseRow, LedgerSnapshot

#: Upper bounds of the histogram of waits, seconds.
WAIT_BUCKETS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86400.0)
#: Maximum number of kinds of events that are counted; the others are `other`.
MAX_EVENT_KINDS = 100
#: Labels of jobs, without `job`, which is Prometheus' own label of the scraped service.
_JOB_LABELS = ("job_id", "owner", "job_name")
T = TypeVar("T", LeaseRow, JobRow)


def collect_ledger(snapshot: LedgerSnapshot, now: float) -> Iterator[Metric]:
    """Yield the metrics of open leases and jobs; `now` is in seconds since 1970."""
    jobs = {job.lease_id: job for job in snapshot.jobs.values()}
    leases = snapshot.leases.values()
    yield _count_leases(leases)
    yield _count_suspended(leases)
    yield _collect_leased_gpus(leases, jobs)
    yield from _collect_queue([lease for lease in leases if lease.state is LeaseState.REQUESTED], now)
    yield from _collect_jobs(snapshot.jobs.values(), snapshot)


def _count_leases(leases: Iterable[LeaseRow]) -> Metric:
    count = Tally((lease.purpose, lease.state) for lease in leases)
    family = GaugeMetricFamily("gpuhub_lease_open", "Leases that have not ended.", labels=("purpose", "state"))
    for state in LeaseState:
        for purpose in Purpose:
            if state is not LeaseState.RELEASED:
                family.add_metric((purpose.value, state.value), float(count[purpose, state]))
    return family


def _count_suspended(leases: Iterable[LeaseRow]) -> Metric:
    count = Tally(lease.suspension.state for lease in leases if lease.suspension is not None)
    family = GaugeMetricFamily(
        "gpuhub_lease_suspended", "Notebooks that have lent their GPU, or are about to.", labels=("state",)
    )
    for state in SuspensionState:
        family.add_metric((state.value,), float(count[state]))
    return family


def _collect_leased_gpus(leases: Iterable[LeaseRow], jobs: dict[str, JobRow]) -> Metric:
    labels = (*LABELS, "lease", "owner", "purpose", "job_id", "job_name")
    family = GaugeMetricFamily(
        "gpuhub_lease_gpus", "Part of a GPU that a lease holds: 1 for the whole GPU.", labels=labels
    )
    for lease in leases:
        job = jobs.get(lease.id)
        more = (lease.id, lease.owner, lease.purpose.value, job.id if job else "", job.name if job else "")
        for gpu in lease.held:
            family.add_metric((*label_gpu(gpu.node, gpu.index, gpu.uuid, gpu.model), *more), 1 / gpu.share)
    return family


def _collect_queue(waiting: Iterable[LeaseRow], now: float) -> Iterator[Metric]:
    by_owner: defaultdict[tuple[str, str], list[LeaseRow]] = defaultdict(list)
    for lease in waiting:
        by_owner[lease.owner, lease.purpose.value].append(lease)
    labels = ("owner", "purpose")
    requests = GaugeMetricFamily("gpuhub_queue_requests", "Requests that wait.", labels=labels)
    gpus = GaugeMetricFamily("gpuhub_queue_gpus", "GPUs that waiting requests ask for.", labels=labels)
    age = GaugeMetricFamily("gpuhub_queue_oldest_age_seconds", "Age of the oldest waiting request.", labels=labels)
    for key, leases in by_owner.items():
        requests.add_metric(key, float(len(leases)))
        gpus.add_metric(key, float(sum(lease.resources.size / lease.resources.share for lease in leases)))
        age.add_metric(key, max(0.0, now - min(lease.created_at for lease in leases)))
    yield from (requests, gpus, age)
    length = GaugeMetricFamily("gpuhub_queue_length", "All requests that wait.")
    length.add_metric((), float(sum(len(leases) for leases in by_owner.values())))
    yield length


def _collect_jobs(jobs: Iterable[JobRow], snapshot: LedgerSnapshot) -> Iterator[Metric]:
    states = Tally(job.state for job in jobs)
    family = GaugeMetricFamily("gpuhub_job_open", "Jobs that have not ended.", labels=("state",))
    for state in JobState:
        if state is not JobState.ENDED:
            family.add_metric((state.value,), float(states[state]))
    gpus = GaugeMetricFamily("gpuhub_job_gpus", "GPUs that a job holds.", labels=_JOB_LABELS)
    started = GaugeMetricFamily(
        "gpuhub_job_start_timestamp_seconds", "When all workers of a job ran that holds GPUs.", labels=_JOB_LABELS
    )
    for job in jobs:
        lease = snapshot.leases.get(job.lease_id)
        held = () if lease is None else lease.held
        if not held:
            continue
        labels = (job.id, job.owner, job.name)
        gpus.add_metric(labels, sum(1 / gpu.share for gpu in held))
        if job.started_at is not None:
            started.add_metric(labels, job.started_at)
    yield from (family, gpus, started)


class LedgerCounters:
    """Counts what happens to leases and jobs, and events, from the broker's start on."""

    def __init__(self, registry: CollectorRegistry, started_at: float) -> None:
        """Register the counters; `started_at` is the broker's start, in seconds since 1970."""
        self._started_at = started_at
        #: GPU-seconds of GPUs that were released since the start, by owner.
        self._ended_gpu_s: defaultdict[str, float] = defaultdict(float)
        self._granted = Counter("gpuhub_lease_granted", "Leases that were granted.", ["purpose"], registry=registry)
        self._released = Counter(
            "gpuhub_lease_released", "Leases that were granted and ended.", ["purpose"], registry=registry
        )
        self._quarantined = Counter(
            "gpuhub_lease_quarantined", "Leases that ended without proof.", ["purpose"], registry=registry
        )
        self._abandoned = Counter(
            "gpuhub_queue_abandoned", "Requests that ended before a grant.", ["purpose"], registry=registry
        )
        self._wait = Histogram(
            "gpuhub_queue_wait_seconds",
            "Time from a request to its grant.",
            ["purpose"],
            registry=registry,
            buckets=WAIT_BUCKETS_S,
        )
        self._jobs = Counter("gpuhub_job_ended", "Jobs that ended.", ["outcome"], registry=registry)
        self._preemptions = Counter("gpuhub_job_preemptions", "Jobs that were preempted.", registry=registry)
        self._events = Counter("gpuhub_events", "Events that the broker recorded.", ["kind"], registry=registry)
        self._kinds: set[str] = set()
        for purpose in Purpose:
            for family in (self._granted, self._released, self._quarantined, self._abandoned, self._wait):
                family.labels(purpose.value)
        for outcome in ("succeeded", "failed", "stopped"):
            self._jobs.labels(outcome)

    def record(self, changes: Changes) -> None:
        """Count changes that were stored."""
        for before, lease in changes.leases:
            self._record_lease(before, lease)
        for job_before, job in changes.jobs:
            self._record_job(job_before, job)
        for event in changes.events:
            if len(self._kinds) < MAX_EVENT_KINDS:
                self._kinds.add(event.kind)
            self._events.labels(event.kind if event.kind in self._kinds else "other").inc()

    def collect_gpu_seconds(self, snapshot: LedgerSnapshot, now: float) -> Metric:
        """Return the GPU time of each owner since the broker's start, in seconds of whole GPUs."""
        seconds = self._ended_gpu_s.copy()
        for lease in snapshot.leases.values():
            for gpu in lease.held:
                seconds[lease.owner] += self._count_gpu_seconds(lease, gpu, now)
        family = CounterMetricFamily(
            "gpuhub_lease_gpu_seconds", "Time for which leases of an owner held GPUs.", labels=("owner",)
        )
        for owner, value in seconds.items():
            family.add_metric((owner,), value)
        return family

    def _record_lease(self, before: LeaseRow | None, lease: LeaseRow) -> None:
        purpose = lease.purpose.value
        if lease.granted_at is not None and (before is None or before.granted_at is None):
            self._granted.labels(purpose).inc()
            self._wait.labels(purpose).observe(max(0.0, lease.granted_at - lease.created_at))
        if _enters(before, lease, LeaseState.QUARANTINED):
            self._quarantined.labels(purpose).inc()
        if _enters(before, lease, LeaseState.RELEASED):
            (self._abandoned if lease.granted_at is None else self._released).labels(purpose).inc()
        held = {gpu.uuid for gpu in before.held} if before is not None else set()
        for gpu in lease.gpus:
            if gpu.uuid in held and gpu.released_at is not None:
                self._ended_gpu_s[lease.owner] += self._count_gpu_seconds(lease, gpu, gpu.released_at)

    def _record_job(self, before: JobRow | None, job: JobRow) -> None:
        if before is not None and job.preemptions > before.preemptions:
            self._preemptions.inc(job.preemptions - before.preemptions)
        if _enters(before, job, JobState.ENDED):
            is_failure = job.has_failed or job.exit_code
            outcome = "failed" if is_failure else "stopped" if job.exit_code is None else "succeeded"
            self._jobs.labels(outcome).inc()

    def _count_gpu_seconds(self, lease: LeaseRow, gpu: LeasedGpu, until: float) -> float:
        # Earlier time was counted in an earlier run, and Prometheus would add all of it again.
        began = max(self._started_at, lease.charged_from)
        return max(0.0, until - began) / gpu.share


def _enters(before: T | None, after: T, state: LeaseState | JobState) -> bool:
    return after.state is state and (before is None or before.state is not state)
