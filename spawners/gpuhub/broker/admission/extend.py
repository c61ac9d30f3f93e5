"""Extensions of running leases, within the owner's limit on the length of a lease."""

from __future__ import annotations

from collections.abc import Iterable

from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker_api.schemas import Purpose
from gpuhub.common.errors import Conflict, InvalidRequest
from gpuhub.common.units import format_span
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain import lease_states, owner_limits, scheduler_input
from gpuhub.domain.models import LeaseRow, ResourceRequest
from gpuhub.scheduler.interface import Quota, Scheduler


async def extend(core: BrokerState, lease_id: str, seconds: int) -> None:
    """Let a lease end `seconds` from now.

    Raises:
        InvalidRequest: That is beyond a limit.
        Conflict: The lease is not live, or other users wait for its GPUs.
    """

    def edit(transaction: Transaction) -> None:
        lease = transaction.put_lease(build_extended(core, lease_id, seconds, transaction))
        transaction.add_event(
            "lease.extended",
            f"{lease.purpose} lease of {lease.owner} now ends in {format_span(seconds)}",
            owner=lease.owner,
            lease=lease.id,
        )

    await core.ledger.change(edit)


def build_extended(core: BrokerState, lease_id: str, seconds: int, transaction: Transaction) -> LeaseRow:
    """Return the lease with the new end, without storing it.

    Raises:
        InvalidRequest, Conflict: See `extend`.
    """
    lease = transaction.leases.get(lease_id)
    if lease is None:
        raise Conflict(f"lease {lease_id} has ended")
    extended = lease_states.extend(lease, seconds, transaction.now)
    if lease.expires_at is None or lease.expires_at < transaction.now + seconds:
        check_length(core.cluster, core.scheduler_sync.get_quota(lease.owner), lease, seconds, transaction.now)
        check_no_waiters(core.scheduler, lease, _list_waiting(transaction))
    return extended


def check_length(cluster: ClusterSettings, quota: Quota, lease: LeaseRow, seconds: int, now: float) -> None:
    """Check an extension against the owner's limits and those of the lease's purpose.

    Raises:
        InvalidRequest: With the limit.
    """
    if lease.purpose is Purpose.JOB:
        usual_limit = cluster.jobs.time_limit
    else:
        profile = cluster.profile(lease.profile or "")
        usual_limit = None if profile is None else profile.time_limit
    if usual_limit is not None and seconds > usual_limit:
        raise InvalidRequest(f"at most {format_span(usual_limit)} from now are allowed")
    longest = owner_limits.find_max_lease_s(quota)
    granted_at = lease.granted_at if lease.granted_at is not None else now
    if longest is not None and now + seconds - granted_at > longest:
        left = max(0.0, granted_at + longest - now)
        raise InvalidRequest(
            f"one lease may last {format_span(longest)} in all; {format_span(left)} from now on are left"
        )


def check_no_waiters(scheduler: Scheduler, lease: LeaseRow, waiting: Iterable[LeaseRow]) -> None:
    """Check that no other user waits for the GPUs of a lease.

    Raises:
        Conflict: With the users who wait.
    """
    uuids = {gpu.uuid for gpu in lease.held}
    for usage in scheduler.report_circuits().values():
        # A request for other GPUs of a circuit may wait for the power that these have.
        uuids |= frozenset() if uuids.isdisjoint(usage.uuids) else usage.uuids
    could_use: dict[ResourceRequest, bool] = {}
    owners = set()
    for other in waiting if uuids else ():
        if other.owner == lease.owner:
            continue
        if other.resources not in could_use:
            could_use[other.resources] = not uuids.isdisjoint(
                scheduler.find_candidates(scheduler_input.build_request(other))
            )
        if could_use[other.resources]:
            owners.add(other.owner)
    if owners:
        raise Conflict(f"{', '.join(sorted(owners))} wait{'s' if len(owners) == 1 else ''} for such GPUs")


def _list_waiting(transaction: Transaction) -> list[LeaseRow]:
    return [transaction.leases[lease_id] for lease_id in transaction.index.find("waiting")]
