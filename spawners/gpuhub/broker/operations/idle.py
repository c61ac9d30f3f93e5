"""Operations on idle notebooks: their reports, the culler's question, and their owners, who keep or suspend them."""

from __future__ import annotations

from gpuhub.broker import audit
from gpuhub.broker.admission import access
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker.views import views
from gpuhub.broker_api.schemas import (
    ActivityAnswer,
    ActivityReport,
    LeaseView,
    ReclaimAnswer,
    ReclaimRequest,
)
from gpuhub.common.errors import Conflict, NotAllowed
from gpuhub.common.units import format_span
from gpuhub.domain import idle_policy, lease_states, suspension
from gpuhub.domain.models import Identity, LeaseRow

#: Interval of the reports of a notebook that is not stopped when it is idle, seconds: its GPUs may fail.
UNUSED_REPORT_PERIOD_S = 60.0
#: Interval of the reports of a notebook that is suspended, or may be at any time, seconds.
SUSPENDED_REPORT_PERIOD_S = 2.0


class IdleOperations:
    """What notebooks, owners and the culler ask about idle notebooks, suspended ones among them."""

    def __init__(self, core: BrokerState) -> None:
        self._core = core

    async def report(self, caller: Identity, lease_id: str, report: ActivityReport) -> ActivityAnswer:
        """Store what a notebook reports about itself.

        Raises:
            NotFound: the lease does not exist, or it belongs to another user.
        """
        lease = await access.find_lease(self._core, caller, lease_id)
        limits, problems = self._core.idle.find_limits(lease), views.list_gpu_problems(self._core, lease)
        if limits is not None:
            self._core.idle.record_report(lease_id, report)
        if lease.suspension is not None:
            now, cell_s = self._core.clock.now(), report.last_cell_s
            if report.is_busy or (cell_s is not None and now - cell_s > lease.suspension.begun_at):
                await request_resume(self._core, lease_id)
            lease = self._core.ledger.snapshot.leases.get(lease_id, lease)
            return ActivityAnswer(
                idle=views.view_idle(self._core, lease),
                report_in_s=SUSPENDED_REPORT_PERIOD_S,
                gpu_problems=problems,
                suspension=views.view_suspension(self._core, lease),
            )
        if limits is None:
            return ActivityAnswer(idle=None, report_in_s=UNUSED_REPORT_PERIOD_S, gpu_problems=problems)
        period_s = idle_policy.choose_report_period(self._core.idle.assess(lease, limits))
        if limits.suspend_after and report.inactive_s >= limits.suspend_after:
            # It may be suspended at any time, and has to learn of it before its user runs a cell.
            period_s = min(period_s, SUSPENDED_REPORT_PERIOD_S)
        return ActivityAnswer(idle=views.view_idle(self._core, lease), report_in_s=period_s, gpu_problems=problems)

    async def keep(self, caller: Identity, lease_id: str) -> LeaseView:
        """Keep an idle notebook for a time.

        Raises:
            NotFound: the lease does not exist, or it belongs to another user.
            Conflict: it is not idle, or was kept for the longest time already.
        """
        core = self._core
        lease = await access.find_lease(core, caller, lease_id)
        limits = core.idle.find_limits(lease)
        assessment = None if limits is None else core.idle.assess(lease, limits)
        if limits is None or assessment is None:
            raise Conflict("the notebook is not idle: it need not be kept")
        idle_s = assessment.idle_s

        def edit(transaction: Transaction) -> None:
            current = transaction.leases.get(lease_id)
            if current is None or current.state not in lease_states.LIVE:
                raise Conflict(f"lease {lease_id} has ended")
            if lease_states.is_expired(current, transaction.now):
                raise Conflict(f"lease {lease_id} is over, and is being ended")
            kept = idle_policy.keep(current, limits, transaction.now - idle_s, transaction.now)
            transaction.put_lease(kept)
            span = format_span((kept.kept_until or 0.0) - transaction.now)
            transaction.add_event(
                "lease.kept", f"{caller.name} keeps the idle notebook for {span}", owner=lease.owner, lease=lease_id
            )

        await core.ledger.change(edit)
        core.idle.forget_warning(lease_id)
        return views.view_lease(core, await access.find_lease(core, caller, lease_id))

    async def suspend(self, caller: Identity, lease_id: str) -> LeaseView:
        """Begin to suspend a notebook, so that others can have its GPU; repeated calls change nothing.

        Raises:
            NotFound: the lease does not exist, or it belongs to another user.
            Conflict: it cannot be suspended now.
        """
        lease = await access.find_lease(self._core, caller, lease_id)
        reason = None if lease.suspension is not None else self._core.idle.explain_unsuspendable(lease)
        if reason is not None:
            raise Conflict(f"the notebook cannot be suspended: {reason}")
        await begin_suspension(self._core, lease_id)
        return views.view_lease(self._core, await access.find_lease(self._core, caller, lease_id))

    async def resume(self, caller: Identity, lease_id: str) -> LeaseView:
        """Let a suspended notebook wait for its GPU; other notebooks do not change.

        Raises:
            NotFound: the lease does not exist, or it belongs to another user.
        """
        await access.find_lease(self._core, caller, lease_id)
        self._core.idle.forget_warning(lease_id)
        await request_resume(self._core, lease_id)
        return views.view_lease(self._core, await access.find_lease(self._core, caller, lease_id))

    async def reclaim(self, caller: Identity, request: ReclaimRequest) -> ReclaimAnswer:
        """Answer whether the culler should stop a notebook now; if so, its lease ends, with the reason for its owner.

        Raises:
            NotAllowed: the caller is not the culler.
        """
        if not caller.may_reclaim:
            raise NotAllowed("only the hub's culler asks which notebooks to stop")
        ledger = self._core.ledger
        leases = ledger.find_leases("server", request.owner, request.server)
        due = [lease.id for lease in leases if self._find_reason(lease) is not None]
        if not due:
            return ReclaimAnswer(stop=False)
        reasons: dict[str, str] = {}

        def edit(transaction: Transaction) -> None:
            reasons.clear()
            for lease_id in due:
                lease = transaction.leases.get(lease_id)
                reason = None if lease is None else self._find_reason(lease)
                if lease is not None and reason is not None:
                    _stop(transaction, lease, reason)
                    reasons[lease_id] = reason

        await ledger.change(edit)
        for lease_id, reason in reasons.items():
            audit.note_owner(request.owner)
            audit.note_reason(f"{lease_id}: {reason}")
        return ReclaimAnswer(stop=bool(reasons))

    def _find_reason(self, lease: LeaseRow) -> str | None:
        """Return why a notebook may be stopped now, for its owner; None if it may not."""
        limits = self._core.idle.find_limits(lease)
        assessment = None if limits is None else self._core.idle.assess(lease, limits)
        if limits is None or assessment is None or not self._core.idle.may_stop(lease, assessment):
            return None
        return idle_policy.describe_stop(assessment.reason, assessment.idle_s, limits)


def _stop(transaction: Transaction, lease: LeaseRow, reason: str) -> None:
    transaction.put_lease(lease_states.shorten(lease, transaction.now, reason))
    name = f"notebook {lease.subject!r}" if lease.subject else "notebook"
    gpus = ", ".join(f"{gpu.model} on {gpu.node}" for gpu in suspension.list_bound_gpus(lease))
    text = f"{lease.owner}'s {name} ({gpus}): {reason}"
    transaction.add_event("lease.reclaimed", text, owner=lease.owner, lease=lease.id)


async def begin_suspension(core: BrokerState, lease_id: str) -> None:
    """Begin to suspend a notebook, unless it has ended or changed meanwhile."""

    def edit(transaction: Transaction) -> None:
        lease = transaction.leases.get(lease_id)
        if lease is not None and suspension.explain_unsuitable(lease) is None:
            memory_mib = core.capacity.find_used_mib(lease.gpus[0])
            transaction.put_lease(suspension.begin(lease, memory_mib, transaction.now))

    await core.ledger.change(edit)


async def request_resume(core: BrokerState, lease_id: str) -> None:
    """Let a suspended notebook wait for its GPU; others do not change."""
    lease = core.ledger.snapshot.leases.get(lease_id)
    if lease is None or suspension.request_resume(lease, core.clock.now()) is lease:
        return

    def edit(transaction: Transaction) -> None:
        current = transaction.leases.get(lease_id)
        if current is not None:
            transaction.put_lease(suspension.request_resume(current, transaction.now))

    await core.ledger.change(edit)
