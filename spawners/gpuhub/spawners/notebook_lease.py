"""Requests, finds, awaits and releases a notebook's lease."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from gpuhub.broker_api.schemas import ClusterView, LeaseRequest, LeaseState, LeaseView, Purpose, StagingView
from gpuhub.common.errors import BrokerUnreachable, Conflict, NotFound

#: Length of a long poll, seconds; the broker drops requests of a spawner that polls less often than every 20 s.
POLL_S = 10.0
#: Length of a long poll while datasets are copied, whose progress the user sees, seconds.
_STAGE_POLL_S = 2.0
_RETRY_S = 1.0
_RELEASE_DEADLINE_S = 6.0
_LIVE_STATES = (LeaseState.REQUESTED, LeaseState.GRANTED, LeaseState.ACTIVE)
#: States at which waiting for a release stops. A quarantined lease may remain for days, and blocks only its own GPUs.
_FINAL_STATES = (LeaseState.QUARANTINED, LeaseState.RELEASED)
#: The broker's limits for a user's groups.
_MAX_GROUPS = 64
_MAX_GROUP_LENGTH = 200


class LeaseBroker(Protocol):
    """The broker's API as far as the hub uses it."""

    async def request_lease(self, request: LeaseRequest) -> LeaseView: ...

    async def leases(self) -> Sequence[LeaseView]:
        """Return all leases that have not ended."""

    async def get_lease(self, lease_id: str, *, wait_s: float = 0, version: int | None = None) -> LeaseView:
        """Return one lease, at once or when its version differs from `version`, after at most `wait_s` seconds."""

    async def activate(self, lease_id: str, container_id: str) -> LeaseView:
        """Report that the container exists."""

    async def stage(self, lease_id: str, *, wait_s: float = 0) -> StagingView:
        """Copy the lease's datasets to its node; return how far that is, at the latest after `wait_s` seconds."""

    async def release(self, lease_id: str) -> LeaseView: ...

    async def cluster(self, groups: Collection[str] = ()) -> ClusterView:
        """Return the current state of the cluster, as a user in these groups sees it."""


def choose_lease(
    leases: Sequence[LeaseView], owner: str, server: str, profile: str
) -> tuple[LeaseView | None, list[LeaseView]]:
    """Return the lease to continue with, if there is one, and the notebook's other live leases.

    Of the live leases of the same notebook and profile, the most advanced one is chosen, because the user keeps its
    place in the queue or its running container. The user no longer wants the notebook's other leases.
    """
    own = [
        lease
        for lease in leases
        if lease.purpose is Purpose.NOTEBOOK
        and lease.owner == owner
        and lease.subject == server
        and lease.state in _LIVE_STATES
    ]
    matching = sorted(
        (lease for lease in own if lease.profile == profile),
        key=lambda lease: (-_LIVE_STATES.index(lease.state), lease.created_at),
    )
    chosen = matching[0] if matching else None
    return chosen, [lease for lease in own if lease is not chosen]


async def claim_lease(
    broker: LeaseBroker,
    owner: str,
    server: str,
    profile: str,
    groups: Iterable[str] = (),
    *,
    persistent: bool = False,
    image: str | None = None,
    suspendable: bool = True,
) -> tuple[LeaseView, bool]:
    """Return the notebook's lease, and whether it existed before (for example after a restart of the hub).

    A quarantined lease of the same notebook does not change, and another one is requested.

    Args:
        groups: The owner's groups in the hub, for limits and reservations.
        persistent: Ask again for its GPUs when its container was lost.
        image: The image that was chosen, with which a start that is interrupted or repeated continues.
        suspendable: Whether it may be suspended for others while it is idle.

    Raises:
        GpuhubError: The broker refuses or does not answer.
    """
    existing, obsolete = choose_lease(await broker.leases(), owner, server, profile)
    for lease in obsolete:
        await release_lease(broker, lease.id, wait=True)
    if existing is not None:
        return existing, True
    request = LeaseRequest(
        profile=profile,
        server=server,
        key=f"nb-{uuid.uuid4().hex}",
        owner=owner,
        groups=select_groups(groups),
        persistent=persistent,
        image=image,
        suspendable=suspendable,
    )
    return await broker.request_lease(request), False


def select_groups(groups: Iterable[str]) -> tuple[str, ...]:
    """Return groups in the broker's form: sorted, without names that are too long for its settings."""
    return tuple(sorted(name for name in set(groups) if 0 < len(name) <= _MAX_GROUP_LENGTH))[:_MAX_GROUPS]


async def wait_for_grant(
    broker: LeaseBroker, lease: LeaseView, report: Callable[[LeaseView | None], None]
) -> LeaseView:
    """Wait until the lease is granted.

    Args:
        report: Called with each new version, and with None while the broker does not answer.

    Raises:
        Conflict: The lease ended instead; the text has the reason.
    """
    while lease.state is LeaseState.REQUESTED:
        report(lease)
        try:
            lease = await broker.get_lease(lease.id, wait_s=POLL_S, version=lease.version)
        except BrokerUnreachable:
            # The broker's database holds the place in the queue, so its restart only costs a moment.
            report(None)
            await asyncio.sleep(_RETRY_S)
    if lease.state not in _LIVE_STATES:
        raise Conflict(f"The wait for a GPU has ended: {lease.reason or 'stopped'}.")
    return lease


async def stage_datasets(broker: LeaseBroker, lease: LeaseView, report: Callable[[str], None]) -> dict[str, str]:
    """Wait until the node of a granted lease has its copies of datasets, and return their volumes by dataset.

    Args:
        report: Called with what is copied now, for the user.

    Raises:
        GpuhubError: A dataset cannot be copied; the text has the reason.
    """
    while True:
        try:
            view = await broker.stage(lease.id, wait_s=_STAGE_POLL_S)
        except BrokerUnreachable:
            await asyncio.sleep(_RETRY_S)
            continue
        if view.is_ready:
            return view.volumes
        report(view.message)


async def release_lease(broker: LeaseBroker, lease_id: str, *, wait: bool) -> None:
    """Release the lease; with `wait`, return when its GPUs are free or quarantined, or after some seconds.

    Raises:
        BrokerUnreachable: The broker does not answer; it will release the lease when no container has it.
    """
    try:
        lease = await broker.release(lease_id)
    except NotFound:
        return
    loop = asyncio.get_running_loop()
    end = loop.time() + _RELEASE_DEADLINE_S
    while wait and lease.state not in _FINAL_STATES and (left := end - loop.time()) > 0:
        lease = await broker.get_lease(lease.id, wait_s=left, version=lease.version)
