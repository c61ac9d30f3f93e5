"""Which notebooks are idle: their own reports, and the readings of their GPUs, in this run of the broker.

Idle notebooks are stopped, or suspended for others who wait, or both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuhub.broker.state.capacity import Capacity
from gpuhub.broker.state.ledger import Ledger
from gpuhub.broker_api.schemas import ActivityReport, LeaseState, Purpose, SuspensionState
from gpuhub.config.containers.idle import IdleSettings
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain import idle_policy, lease_states, suspension
from gpuhub.domain.clock import Clock
from gpuhub.domain.idle_policy import IdleAssessment, IdleObservation
from gpuhub.domain.models import LeaseRow
from gpuhub.domain.suspension import IdleHolder


@dataclass(slots=True)
class _Record:
    """What was last seen of a notebook; times are monotonic seconds."""

    report: ActivityReport | None = None
    reported_at: float = 0.0
    used_at: float | None = None
    unused_since: float | None = None
    warned_at: float | None = None
    #: Its last attempt to be suspended was refused, and it was not used since.
    is_refused: bool = False


class IdleNotebooks:
    """Assesses the notebooks that hold GPUs or have lent one, where idle ones are stopped."""

    def __init__(self, *, cluster: ClusterSettings, ledger: Ledger, capacity: Capacity, clock: Clock) -> None:
        self._cluster = cluster
        self._is_on = cluster.stops_idle_notebooks or cluster.suspends_idle_notebooks
        self._ledger = ledger
        self._capacity = capacity
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def find_limits(self, lease: LeaseRow) -> IdleSettings | None:
        """Return the settings by which a notebook is stopped or suspended while it is idle; None if it is neither.

        A suspended one takes memory of its node; while it waits for its GPU, its owner wants it.
        """
        if not self._is_on or lease.purpose is not Purpose.NOTEBOOK or lease.state is not LeaseState.ACTIVE:
            return None
        profile = self._cluster.profile(lease.profile or "")
        is_suspended = suspension.find_state(lease) is SuspensionState.SUSPENDED
        if not (lease.held or is_suspended) or profile is None or lease_states.is_expired(lease, self._clock.now()):
            return None
        limits = profile.idle.merge(self._cluster.idle)
        return limits if limits.is_on or limits.suspend_after else None

    def list_leases(self) -> Iterator[tuple[LeaseRow, IdleSettings]]:
        """Yield the notebooks that are stopped or suspended when they are idle, with their settings."""
        for lease in self._ledger.snapshot.leases.values() if self._is_on else ():
            limits = self.find_limits(lease)
            if limits is not None:
                yield lease, limits

    def record_report(self, lease_id: str, report: ActivityReport) -> None:
        """Store what a notebook reports about itself."""
        record = self._records.setdefault(lease_id, _Record())
        record.report, record.reported_at = report, self._clock.monotonic()
        record.is_refused = record.is_refused and not report.is_busy

    def update(self, lease: LeaseRow, limits: IdleSettings) -> IdleAssessment | None:
        """Process the readings of a notebook's GPUs; return the assessment if its owner is warned from now on."""
        record, now = self._records.setdefault(lease.id, _Record()), self._clock.monotonic()
        use = self._read_use(lease)
        if use is not None and use < limits.low_use:
            record.unused_since = now if record.unused_since is None else record.unused_since
        else:
            record.unused_since = None
            record.used_at = record.used_at if use is None else now
        assessment = self.assess(lease, limits)
        if assessment is None or not assessment.is_warned:
            record.warned_at = None
            return None
        if record.warned_at is not None:
            return None
        record.warned_at = now
        return assessment

    def assess(self, lease: LeaseRow, limits: IdleSettings) -> IdleAssessment | None:
        """Return how long the notebook has been idle and when it is stopped; None while it is not, or not known."""
        seen = self._observe(lease)
        return None if seen is None else idle_policy.assess(limits, seen)

    def find_inactive_s(self, lease: LeaseRow) -> float | None:
        """Return the seconds without activity of a notebook; None while it is busy, or if that is not known."""
        seen = self._observe(lease)
        return None if seen is None else idle_policy.find_inactive_s(seen)

    def explain_unsuspendable(self, lease: LeaseRow) -> str | None:
        """Return why a notebook cannot be suspended now, for its owner; None if it can."""
        limits = self.find_limits(lease)
        if lease.suspension is not None:
            return f"it is {lease.suspension.state} already"
        if limits is None or not limits.suspend_after:
            return "the settings of this cluster do not allow it (idle.suspend_after)"
        reason = suspension.explain_unsuitable(lease)
        if reason is None and self.find_inactive_s(lease) is None:
            return "a cell or a job of it runs, or it has not reported what it does"
        return reason

    def list_suspendable(self) -> list[IdleHolder]:
        """Return the notebooks that have been idle for long enough to be suspended for others."""
        holders = []
        for lease, limits in self.list_leases():
            inactive_s = self.find_inactive_s(lease)
            is_kept = not lease.resources.suspendable or (lease.kept_until or 0.0) > self._clock.now()
            if not limits.suspend_after or inactive_s is None or inactive_s < limits.suspend_after or is_kept:
                continue
            if not self._records[lease.id].is_refused and self.explain_unsuspendable(lease) is None:
                holders.append(IdleHolder(lease=lease.id, uuid=lease.gpus[0].uuid, idle_s=inactive_s))
        return holders

    def note_refusal(self, lease_id: str) -> None:
        """Note that a notebook could not be suspended: it is not tried again until it was used."""
        if lease_id in self._records:
            self._records[lease_id].is_refused = True

    def forget_warning(self, lease_id: str) -> None:
        """Let a notebook that is kept or resumed be warned again for the whole time."""
        if lease_id in self._records:
            self._records[lease_id].warned_at = None

    def may_stop(self, lease: LeaseRow, assessment: IdleAssessment | None) -> bool:
        """Return whether the notebook may be stopped now."""
        record = self._records.get(lease.id)
        age_s = None if record is None or record.report is None else self._clock.monotonic() - record.reported_at
        return idle_policy.may_stop(assessment, age_s)

    def forget_ended(self) -> None:
        """Drop notebooks that have ended."""
        leases = self._ledger.snapshot.leases
        self._records = {lease_id: record for lease_id, record in self._records.items() if lease_id in leases}

    def find_idle_times(self, waiting_outside: int) -> dict[str, float]:
        """Return since when notebooks are idle for whose GPUs others may wait, by lease; seconds since 1970.

        Args:
            waiting_outside: Number of requests from outside gpuhub that wait.
        """
        waiting = {lease.owner for lease in self._ledger.find_leases("waiting")}
        if not waiting and not waiting_outside:
            return {}
        times = {}
        for lease, limits in self.list_leases():
            assessment = self.assess(lease, limits)
            is_long = assessment is not None and assessment.idle_s >= limits.warn_before
            if assessment is not None and is_long and (waiting_outside or waiting - {lease.owner}):
                times[lease.id] = self._clock.now() - assessment.idle_s
        return times

    def _observe(self, lease: LeaseRow) -> IdleObservation | None:
        """Return what is known about a notebook now; None if it has not reported anything."""
        record, now = self._records.get(lease.id), self._clock.monotonic()
        if record is None or record.report is None:
            return None
        report_age_s = now - record.reported_at
        return IdleObservation(
            report_age_s=report_age_s,
            is_busy=record.report.is_busy or bool(self._ledger.index.find("jobs of notebook", lease.id)),
            inactive_s=record.report.inactive_s + report_age_s,
            used_s=None if record.used_at is None else now - record.used_at,
            unused_s=None if record.unused_since is None else now - record.unused_since,
            kept_s=max(0.0, (lease.kept_until or 0.0) - self._clock.now()),
            warned_s=None if record.warned_at is None else now - record.warned_at,
        )

    def _read_use(self, lease: LeaseRow) -> int | None:
        """Return the use of the busiest GPU, percent; None where it is not known, or not of this notebook alone."""
        uses = []
        for gpu in lease.held:
            node = self._capacity.inventory.nodes.get(gpu.node)
            if gpu.share > 1 or node is None or not node.is_fresh(self._clock.monotonic()):
                return None
            use = next((reading.utilisation_percent for reading in node.gpus if reading.uuid == gpu.uuid), None)
            if use is None:
                return None
            uses.append(use)
        return max(uses, default=None)
