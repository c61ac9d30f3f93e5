"""More time for a lease that goes on."""

from __future__ import annotations

from collections.abc import Iterable

from gpuhub.broker import allowances, leases, schedule
from gpuhub.broker.core import Core
from gpuhub.broker.drafts import Draft
from gpuhub.broker.rows import Ask, LeaseRow
from gpuhub.broker.schemas import Purpose
from gpuhub.engines.base import Engine, Rights
from gpuhub.errors import Conflict, InvalidRequest
from gpuhub.quantities import format_span
from gpuhub.settings import Cluster


async def extend(core: Core, lease_id: str, seconds: int) -> None:
    """Let a lease end so many seconds from now.

    Raises:
        InvalidRequest: that is beyond a limit.
        Conflict: the lease does not go on, or somebody waits who could use its GPUs.
    """

    def edit(draft: Draft) -> None:
        lease = draft.put_lease(check(core, lease_id, seconds, draft))
        draft.note(
            "lease.extended",
            f"{lease.purpose} lease of {lease.owner} now ends in {format_span(seconds)}",
            owner=lease.owner,
            lease=lease.id,
        )

    await core.ledger.change(edit)


def check(core: Core, lease_id: str, seconds: int, draft: Draft) -> LeaseRow:
    """The lease as it would be; nothing is changed.

    Raises:
        InvalidRequest, Conflict: see `extend`.
    """
    lease = draft.leases.get(lease_id)
    if lease is None:
        raise Conflict(f"lease {lease_id} has ended")
    extended = leases.extend(lease, seconds, draft.now)
    if lease.expires_at is None or lease.expires_at < draft.now + seconds:
        refuse_beyond(core.cluster, core.rights(lease.owner), lease, seconds, draft.now)
        refuse_waited_for(core.engine, lease, _waiting(draft))
    return extended


def refuse_beyond(cluster: Cluster, rights: Rights, lease: LeaseRow, seconds: int, now: float) -> None:
    """Refuse an extension beyond the owner's limits or those of what the lease is for.

    Raises:
        InvalidRequest: with the limit.
    """
    if lease.purpose is Purpose.JOB:
        usual = cluster.jobs.time_limit
    else:
        profile = cluster.profile(lease.profile or "")
        usual = None if profile is None else profile.time_limit
    if usual is not None and seconds > usual:
        raise InvalidRequest(f"time_limit_s: at most {format_span(usual)} from now on can be had")
    longest = allowances.longest_lease(rights)
    began = lease.granted_at if lease.granted_at is not None else now
    if longest is not None and now + seconds - began > longest:
        left = max(0.0, began + longest - now)
        raise InvalidRequest(
            f"time_limit_s: one lease may last {format_span(longest)} in all; {format_span(left)} from now on are left"
        )


def refuse_waited_for(engine: Engine, lease: LeaseRow, waiting: Iterable[LeaseRow]) -> None:
    """Refuse an extension of GPUs that somebody else waits for.

    Raises:
        Conflict: naming who waits.
    """
    mine = {gpu.uuid for gpu in lease.held}
    could_use: dict[Ask, bool] = {}
    owners = set()
    for other in waiting if mine else ():
        if other.owner == lease.owner:
            continue
        if other.ask not in could_use:
            could_use[other.ask] = not mine.isdisjoint(engine.candidates(schedule.build_request(other)))
        if could_use[other.ask]:
            owners.add(other.owner)
    if owners:
        raise Conflict(f"{', '.join(sorted(owners))} wait{'s' if len(owners) == 1 else ''} for such GPUs")


def _waiting(draft: Draft) -> list[LeaseRow]:
    return [draft.leases[lease_id] for lease_id in draft.index.find("waiting")]
