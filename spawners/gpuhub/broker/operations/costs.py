"""Operations on costs: what jobs and notebooks used one by one, and reports by user, group, profile, model or time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

from gpuhub.backends.interface import AccountedHours, SchedulingBackend
from gpuhub.broker import audit
from gpuhub.broker.db.cost_store import CostSum
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.views import serializers
from gpuhub.broker_api.schemas import CostView, ReportDimension, ReportRow, ReportView
from gpuhub.common.errors import InvalidRequest, NotAllowed
from gpuhub.domain.costs import UsedAmounts
from gpuhub.domain.models import Identity

#: Days of a report without a beginning.
DEFAULT_DAYS = 28
#: Maximum number of rows of a report.
MAX_ROWS = 10_000
TOTAL, NO_GROUP, JOBS = "total", "no group", "jobs"
_EPOCH = date(1970, 1, 1)


class CostOperations:
    """What users and administrators ask about costs."""

    def __init__(self, core: BrokerState, backend: SchedulingBackend) -> None:
        self._core = core
        self._backend = backend

    async def list_recent(self, caller: Identity, owner: str | None, limit: int) -> Iterator[CostView]:
        """Return what holds GPUs now, and then what ended last, newest first; at most `limit`.

        Raises:
            NotAllowed: the owner is another user, and the caller is not an administrator.
        """
        whose = _check_owner(caller, owner)
        return (serializers.build_costs(record) for record in await self._core.costs.list_recent(whose, limit))

    async def report(
        self, caller: Identity, by: ReportDimension, since: date | None, until: date | None, owner: str | None
    ) -> ReportView:
        """Return sums: the caller's own, or those of `owner` or of all users for an administrator.

        Raises:
            NotAllowed: the owner is another user, and the caller is not an administrator.
            InvalidRequest: the report would begin after its end.
        """
        whose = _check_owner(caller, owner)
        last = until or datetime.fromtimestamp(self._core.clock.now(), UTC).date()
        first = since or last - timedelta(days=min(DEFAULT_DAYS - 1, (last - date.min).days))
        if first > last:
            raise InvalidRequest(f"since: {first} is after {last}, where the report ends: choose an earlier day")
        rows, total = await asyncio.to_thread(self._read, by, first, last, whose)
        # Users get no hours by Slurm: each of them could make slurmdbd count one period after the other.
        hours = await self._count_hours(by, first, last) if caller.sees_all else None
        return ReportView(
            by=by,
            since=first.isoformat(),
            until=last.isoformat(),
            owner=whose,
            rows=_add_accounted(rows, _choose_hours(hours, by, whose)),
            total=_add_total(total, hours, whose),
        )

    def _read(
        self, by: ReportDimension, first: date, last: date, owner: str | None
    ) -> tuple[list[ReportRow], list[ReportRow]]:
        since, until = (first - _EPOCH).days, (last - _EPOCH).days
        read = self._core.store.costs.sum_days
        sums = read(by.value, since=since, until=until, owner=owner, limit=MAX_ROWS)
        totals = read(None, since=since, until=until, owner=owner, limit=MAX_ROWS)
        rows = [build_row(key, currency, used) for (key, currency), used in merge_sums(by, sums).items()]
        return rows, [build_row(TOTAL, total.currency, total.used) for total in totals]

    async def _count_hours(self, by: ReportDimension, first: date, last: date) -> AccountedHours | None:
        if by not in {ReportDimension.USER, ReportDimension.GROUP}:
            return None
        begin = datetime(first.year, first.month, first.day, tzinfo=UTC).timestamp()
        end = datetime(last.year, last.month, last.day, tzinfo=UTC).timestamp() + 86400
        return await self._backend.count_gpu_hours(begin, min(end, self._core.clock.now()))


def _check_owner(caller: Identity, owner: str | None) -> str | None:
    """Return whose figures the caller gets; None for those of all users."""
    if owner is not None:
        audit.note_owner(owner)
    if caller.sees_all:
        return owner
    if owner not in {None, caller.name}:
        raise NotAllowed(f"{caller.name} may not see what {owner} uses")
    return caller.name


def merge_sums(by: ReportDimension, sums: Sequence[CostSum]) -> Mapping[tuple[str, str], UsedAmounts]:
    """Return the sums by the name of their row and the currency; who is in several groups counts in each of them."""
    merged: dict[tuple[str, str], UsedAmounts] = {}
    for entry in sums:
        for name in _list_names(by, entry.key):
            key = (name, entry.currency)
            merged[key] = merged.get(key, UsedAmounts()) + entry.used
    return dict(sorted(merged.items()))


def _list_names(by: ReportDimension, key: str | int) -> Sequence[str]:
    if isinstance(key, int):
        return ((_EPOCH + timedelta(days=key)).isoformat(),)
    if by is ReportDimension.GROUP:
        return json.loads(key) or (NO_GROUP,)
    return (key or JOBS,)


def build_row(key: str, currency: str, used: UsedAmounts) -> ReportRow:
    """Return a row of a report."""
    return ReportRow(
        key=key,
        gpu_hours=round(used.gpu_hours, 3),
        busy_percent=None if used.busy_percent is None else round(used.busy_percent, 1),
        peak_memory_mib=used.peak_memory_mib or None,
        energy_kwh=None if used.energy_kwh is None else round(used.energy_kwh, 4),
        is_energy_estimated=used.estimated_j > 0,
        cost=round(used.amount, 2) if currency else None,
        currency=currency,
    )


def _choose_hours(hours: AccountedHours | None, by: ReportDimension, owner: str | None) -> Mapping[str, float] | None:
    """Return the hours of the other scheduler by the names of the rows; None where there are none."""
    if hours is None:
        return None
    if by is ReportDimension.USER:
        return hours.by_user if owner is None else {owner: hours.by_user.get(owner, 0.0)}
    return hours.by_account if owner is None else None


def _add_accounted(rows: Sequence[ReportRow], hours: Mapping[str, float] | None) -> tuple[ReportRow, ...]:
    """Return the rows with the other scheduler's hours, and rows for users and accounts that only it knows."""
    if hours is None:
        return tuple(rows)
    added = [build_row(name, "", UsedAmounts()) for name in hours.keys() - {row.key for row in rows}]
    merged = sorted([*rows, *added], key=lambda row: (row.key, row.currency))
    return tuple(row.model_copy(update={"accounted_gpu_hours": round(hours.get(row.key, 0.0), 3)}) for row in merged)


def _add_total(totals: Sequence[ReportRow], hours: AccountedHours | None, owner: str | None) -> tuple[ReportRow, ...]:
    chosen = _choose_hours(hours, ReportDimension.USER, owner)
    if chosen is None or not (totals or sum(chosen.values())):
        return tuple(totals)
    first, *others = totals or [build_row(TOTAL, "", UsedAmounts())]
    return (first.model_copy(update={"accounted_gpu_hours": round(sum(chosen.values()), 3)}), *others)
