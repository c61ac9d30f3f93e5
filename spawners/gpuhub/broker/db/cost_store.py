"""The part of the store that keeps what jobs and notebooks used: a record of each of them, and sums by day.

Records are deleted some time after their end; the sums stay, and the number of their rows depends on users and days
alone, not on how many jobs there were.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import sqlalchemy as sa

from gpuhub.broker.db import tables, writer
from gpuhub.broker.db.engine import READ_ONLY, Connect
from gpuhub.broker_api.schemas import Purpose
from gpuhub.domain.costs import CostRecord, DayKey, EnergySample, GpuMeter, UsedAmounts

#: Maximum number of characters of the JSON list of an owner's groups.
MAX_GROUPS_LENGTH = 1000
#: Rows that are deleted in one transaction.
_BATCH = 500
_AMOUNTS = tuple(field.name for field in fields(UsedAmounts))
#: 1970 began on a Thursday, and weeks begin on Monday.
_WEEK_OFFSET = 3
Dimension = Literal["user", "group", "profile", "model", "week", "day"]


@dataclass(frozen=True, slots=True)
class CostSum:
    """A sum over days."""

    #: The user, profile, model, or the JSON list of groups; for days and weeks the first day since 1970.
    key: str | int
    currency: str
    used: UsedAmounts


class CostStore:
    """Reads and writes what was used; `connect` opens a transaction of the store."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    def save(self, records: Sequence[CostRecord], days: Mapping[DayKey, UsedAmounts]) -> None:
        """Replace records, and add amounts to the sums of days; all or nothing."""
        with self._connect(None) as connection:
            _replace(connection, [_build_record(record) for record in records])
            _add_days(connection, days)

    def load_open(self) -> list[CostRecord]:
        """Return the records of what has not ended."""
        with self._connect(READ_ONLY) as connection:
            return _read(connection, tables.cost_records.c.ended_at.is_(None))

    def find(self, ids: Collection[str]) -> dict[str, CostRecord]:
        """Return the records with these ids, at most some hundreds, as far as they exist."""
        with self._connect(READ_ONLY) as connection:
            return {record.id: record for record in _read(connection, tables.cost_records.c.id.in_(list(ids)))}

    def list_ended(self, owner: str | None, limit: int) -> list[CostRecord]:
        """Return the `limit` records that ended last, of one owner or of all, newest first."""
        record = tables.cost_records.c
        condition = record.ended_at.is_not(None)
        with self._connect(READ_ONLY) as connection:
            return _read(
                connection,
                condition if owner is None else condition & (record.owner == owner),
                sa.select(tables.cost_records).order_by(record.ended_at.desc(), record.id).limit(limit),
            )

    def sum_days(self, by: Dimension | None, *, since: int, until: int, owner: str | None, limit: int) -> list[CostSum]:
        """Return the sums from day `since` to day `until`, for each value of `by` and each currency; at most `limit`.

        Args:
            by: None for the total.
            owner: Only what this user used; None for all users.
        """
        day = tables.cost_days.c
        keys: dict[Dimension | None, sa.ColumnElement[Any]] = {
            "user": day.owner,
            "group": day.groups,
            "profile": day.profile,
            "model": day.model,
            "day": day.day,
            "week": (day.day + _WEEK_OFFSET) // 7 * 7 - _WEEK_OFFSET,
            None: sa.literal(""),
        }
        key = keys[by].label("key")
        sums = [(sa.func.max if name == "peak_memory_mib" else sa.func.sum)(day[name]).label(name) for name in _AMOUNTS]
        query = sa.select(key, day.currency, *sums).where(day.day >= since, day.day <= until)
        if owner is not None:
            query = query.where(day.owner == owner)
        group_by = [day.currency] if by is None else [sa.text("key"), day.currency]
        query = query.group_by(*group_by).order_by(*group_by).limit(limit)
        with self._connect(READ_ONLY) as connection:
            return [
                CostSum(row["key"], row["currency"], UsedAmounts(**{name: row[name] for name in _AMOUNTS}))
                for row in connection.execute(query).mappings()
            ]

    def delete_ended(self, before: float) -> int:
        """Delete some of the records that ended before a time, and return their number; 0 when none is left."""
        record = tables.cost_records.c
        with self._connect(None) as connection:
            ids = connection.execute(sa.select(record.id).where(record.ended_at < before).limit(_BATCH)).scalars().all()
            if not ids:
                return 0
            return connection.execute(sa.delete(tables.cost_records).where(record.id.in_(ids))).rowcount

    def delete_days(self, before: int) -> None:
        """Delete the sums of the days before a day."""
        with self._connect(None) as connection:
            connection.execute(sa.delete(tables.cost_days).where(tables.cost_days.c.day < before))


def encode_groups(groups: Collection[str]) -> str:
    """Return the JSON list of groups as it is stored; of too many, the first ones."""
    kept = sorted(groups)
    while len(text := json.dumps(kept, ensure_ascii=False)) > MAX_GROUPS_LENGTH:
        kept.pop()
    return text


def _replace(connection: sa.Connection, records: writer.Records) -> None:
    if not records:
        return
    ids = [{"_id": record["id"]} for record in records]
    connection.execute(sa.delete(tables.cost_records).where(tables.cost_records.c.id == sa.bindparam("_id")), ids)
    writer.insert_rows(connection, tables.cost_records, records)


def _add_days(connection: sa.Connection, days: Mapping[DayKey, UsedAmounts]) -> None:
    table = tables.cost_days
    new: writer.Records = []
    for day, used in days.items():
        key = {**asdict(day), "groups": encode_groups(day.groups)}
        is_same = sa.and_(*(table.c[name] == value for name, value in key.items()))
        values: dict[str, Any] = {
            name: table.c[name] + getattr(used, name) for name in _AMOUNTS if name != "peak_memory_mib"
        }
        peak = table.c.peak_memory_mib
        values["peak_memory_mib"] = sa.case((peak < used.peak_memory_mib, used.peak_memory_mib), else_=peak)
        if not connection.execute(sa.update(table).where(is_same).values(values)).rowcount:
            new.append({**key, **asdict(used)})
    writer.insert_rows(connection, table, new)


def _build_record(record: CostRecord) -> dict[str, Any]:
    row = asdict(record)
    return {
        **{name: value for name, value in row.items() if name != "used"},
        **row["used"],
        "groups": list(record.groups),
        "purpose": record.purpose.value,
        "meters": list(row["meters"]),
    }


def _read(
    connection: sa.Connection, condition: sa.ColumnElement[bool], query: sa.Select[Any] | None = None
) -> list[CostRecord]:
    query = sa.select(tables.cost_records) if query is None else query
    return [_parse_record(dict(row)) for row in connection.execute(query.where(condition)).mappings()]


def _parse_record(row: dict[str, Any]) -> CostRecord:
    used = UsedAmounts(**{name: row.pop(name) for name in _AMOUNTS})
    meters = tuple(
        GpuMeter(**{**meter, "energy": None if meter["energy"] is None else EnergySample(**meter["energy"])})
        for meter in row["meters"]
    )
    return CostRecord(
        **{**row, "groups": tuple(row["groups"]), "purpose": Purpose(row["purpose"]), "meters": meters}, used=used
    )
