"""What the store forgets: ended jobs and leases after a time, and events by number and age.

Rows are deleted in batches, since nothing else can be written meanwhile. Of a deleted lease remains what others still
need: the GPU time of its owner by day, for fair share, and when the owner's last lease on each node ended.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from gpuhub.broker.db import tables, writer
from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common.gpu import GpuSpec
from gpuhub.domain.models import LeaseRow
from gpuhub.scheduler.interface import UsageRecord

#: Number of events that are kept of each owner; older ones are deleted.
MAX_OWNER_EVENTS = 2_000
#: Number of events without an owner that are kept; older ones are deleted.
MAX_UNOWNED_EVENTS = 10_000
#: Rows that are deleted in one transaction.
BATCH = 500
_DAY_S = 86400.0
#: The GPU seconds of deleted leases: by owner, day since 1970, model and memory in MiB.
_Usage = defaultdict[tuple[str, int, str, int], float]


def prune_events(connection: sa.Connection, owners: Collection[str | None]) -> None:
    """Delete the oldest events of these owners above their number; None stands for events without owner."""
    named = [{"_owner": owner} for owner in owners if owner is not None]
    if named:
        connection.execute(_prune(tables.events.c.owner == sa.bindparam("_owner"), MAX_OWNER_EVENTS), named)
    if None in owners:
        connection.execute(_prune(tables.events.c.owner.is_(None), MAX_UNOWNED_EVENTS))


def _prune(is_theirs: sa.ColumnElement[bool], kept: int) -> sa.Delete:
    seq = tables.events.c.seq
    newest_surplus = sa.select(seq).where(is_theirs).order_by(seq.desc()).limit(1).offset(kept)
    return sa.delete(tables.events).where(is_theirs, seq <= newest_surplus.scalar_subquery())


def delete_old_events(connection: sa.Connection, before: float) -> int:
    """Delete a batch of the events from before a time, and return their number."""
    event = tables.events.c
    # By number, which grows with time; where the clock was set back, younger events are first deleted later.
    oldest = sa.select(event.seq, event.at).order_by(event.seq).limit(BATCH)
    seqs = [seq for seq, at in connection.execute(oldest) if at < before]
    return _delete(connection, tables.events, event.seq, seqs)


def delete_ended_jobs(connection: sa.Connection, before: float) -> int:
    """Delete a batch of the jobs that ended before a time, and return their number."""
    job = tables.jobs.c
    ids = connection.execute(sa.select(job.id).where(job.ended_at < before).limit(BATCH)).scalars().all()
    _delete(connection, tables.workers, tables.workers.c.job_id, ids)
    return _delete(connection, tables.jobs, job.id, ids)


def delete_released_leases(connection: sa.Connection, before: float) -> int:
    """Delete a batch of the leases that were released before a time and have no job, and return their number."""
    lease = tables.leases.c
    has_job = sa.exists().where(tables.jobs.c.lease_id == lease.id)
    is_old = (lease.state == LeaseState.RELEASED.value) & (lease.released_at < before)
    found = connection.execute(sa.select(tables.leases).where(is_old, ~has_job).limit(BATCH)).mappings()
    rows: list[Mapping[str, Any]] = [dict(row) for row in found]
    if not rows:
        return 0
    ids = [row["id"] for row in rows]
    gpus = connection.execute(sa.select(tables.lease_gpus).where(tables.lease_gpus.c.lease_id.in_(ids))).mappings()
    _keep_usage(connection, {row["id"]: row for row in rows}, [dict(gpu) for gpu in gpus])
    _keep_ends(connection, rows)
    _delete(connection, tables.lease_gpus, tables.lease_gpus.c.lease_id, ids)
    return _delete(connection, tables.leases, lease.id, ids)


def delete_old_usage(connection: sa.Connection, before: float) -> int:
    """Delete the GPU time of deleted leases on days that ended before a time, and return the number of rows."""
    day = tables.usage_days.c.day
    return connection.execute(sa.delete(tables.usage_days).where(day < before // _DAY_S)).rowcount


def load_usage(connection: sa.Connection, since: float) -> list[UsageRecord]:
    """Return the usage of deleted leases on days that ended after `since`."""
    query = sa.select(tables.usage_days).where((tables.usage_days.c.day + 1) * _DAY_S > since)
    return [
        UsageRecord(
            owner=row["owner"],
            groups=frozenset(),
            card=GpuSpec(model=row["model"], memory_mib=row["memory_mib"]),
            share=1,
            gpus=row["gpu_s"] / _DAY_S,
            started_at=row["day"] * _DAY_S,
            ended_at=(row["day"] + 1) * _DAY_S,
        )
        for row in connection.execute(query).mappings()
    ]


def load_lease_ends(connection: sa.Connection) -> dict[tuple[str, str], float]:
    """Return when the last deleted lease of each owner on each node ended."""
    ends = tables.lease_ends.c
    return {(owner, node): at for owner, node, at in connection.execute(sa.select(ends.owner, ends.node, ends.at))}


def _keep_usage(
    connection: sa.Connection, leases: Mapping[str, Mapping[str, Any]], gpus: Iterable[Mapping[str, Any]]
) -> None:
    usage: _Usage = defaultdict(float)
    for gpu in gpus:
        lease = leases[gpu["lease_id"]]
        started_at = lease["granted_at"] if lease["held_from"] is None else lease["held_from"]
        if started_at is None:
            continue
        ended_at = min(
            at for at in (gpu["released_at"], lease["quarantined_at"], lease["released_at"]) if at is not None
        )
        _add_usage(usage, lease["owner"], gpu, started_at, ended_at)
    _merge(connection, tables.usage_days, usage, operator.add)


def keep_suspended_usage(connection: sa.Connection, lease: LeaseRow) -> None:
    """Keep what a suspended notebook has used, as it was before it holds its GPU again."""
    usage: _Usage = defaultdict(float)
    for gpu in lease.gpus:
        card = {"model": gpu.model, "memory_mib": gpu.memory_mib, "share": gpu.share}
        _add_usage(usage, lease.owner, card, lease.charged_from, gpu.released_at or lease.charged_from)
    _merge(connection, tables.usage_days, usage, operator.add)


def _add_usage(usage: _Usage, owner: str, gpu: Mapping[str, Any], started_at: float, ended_at: float) -> None:
    """Add the GPU seconds of a period, by day; a share of a GPU counts as its part."""
    for day, seconds in split_days(started_at, ended_at):
        usage[owner, day, gpu["model"], gpu["memory_mib"]] += seconds / gpu["share"]


def _keep_ends(connection: sa.Connection, leases: Iterable[Mapping[str, Any]]) -> None:
    ends: dict[tuple[str, str], float] = {}
    for lease in leases:
        for node in lease["nodes"]:
            key = (lease["owner"], node)
            ends[key] = max(lease["released_at"], ends.get(key, lease["released_at"]))
    _merge(connection, tables.lease_ends, ends, max)


def _merge(
    connection: sa.Connection, table: sa.Table, found: Mapping[Any, float], combine: Callable[[float, float], float]
) -> None:
    """Combine amounts, by primary key, with those that are stored in the table's last column."""
    keys, value = list(table.primary_key.columns), list(table.columns)[-1]
    records = []
    for key, amount in found.items():
        is_same = sa.and_(*(column == part for column, part in zip(keys, key, strict=True)))
        old = connection.execute(sa.select(value).where(is_same)).scalar_one_or_none()
        connection.execute(sa.delete(table).where(is_same))
        names = [column.name for column in keys]
        records.append({**dict(zip(names, key, strict=True)), value.name: combine(old or 0.0, amount)})
    writer.insert_rows(connection, table, records)


def split_days(started_at: float, ended_at: float) -> Iterator[tuple[int, float]]:
    """Yield the days since 1970 of a period (UTC), and its seconds in each."""
    while started_at < ended_at:
        day = int(started_at // _DAY_S)
        until = min(ended_at, (day + 1) * _DAY_S)
        yield day, until - started_at
        started_at = until


def _delete(connection: sa.Connection, table: sa.Table, column: sa.Column[Any], values: Iterable[Any]) -> int:
    wanted = list(values)
    return connection.execute(sa.delete(table).where(column.in_(wanted))).rowcount if wanted else 0
