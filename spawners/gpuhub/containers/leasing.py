"""A notebook's lease: asked for or found again, waited for, given back."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from gpuhub.broker.schemas import ClusterView, Lease, LeaseRequest, LeaseState, Purpose
from gpuhub.errors import BrokerUnreachable, Conflict, NotFound

#: One long poll; the broker takes a spawner that asks less often than every 20 s for gone.
POLL_S = 10.0
_RETRY_S = 1.0
_RELEASE_DEADLINE_S = 6.0
_LIVE = (LeaseState.REQUESTED, LeaseState.GRANTED, LeaseState.ACTIVE)
#: Waiting for the end of one of these helps nobody: a quarantined lease may stay for days, and blocks its GPUs alone.
_OVER = (LeaseState.QUARANTINED, LeaseState.RELEASED)
#: What the broker takes of a user's groups in the hub.
_GROUPS = 64
_GROUP_LENGTH = 64


class Broker(Protocol):
    """What the hub asks of the broker."""

    async def request_lease(self, request: LeaseRequest) -> Lease:
        """Ask for a lease."""

    async def leases(self) -> Sequence[Lease]:
        """All leases that have not ended."""

    async def get_lease(self, lease_id: str, *, wait_s: float = 0, version: int | None = None) -> Lease:
        """One lease, at once or when it has another version."""

    async def activate(self, lease_id: str, container_id: str) -> Lease:
        """Say that the container exists."""

    async def release(self, lease_id: str) -> Lease:
        """End a lease."""

    async def cluster(self) -> ClusterView:
        """Everything at this moment."""


def choose_lease(leases: Sequence[Lease], owner: str, server: str, profile: str) -> tuple[Lease | None, list[Lease]]:
    """The lease to go on with, and those in its way.

    A live lease of the same notebook and profile is gone on with, the furthest one first: its place in the queue, or
    its running container, is the user's. Other leases of that notebook are what the user does not want any more.
    """
    own = [
        lease
        for lease in leases
        if lease.purpose is Purpose.NOTEBOOK
        and lease.owner == owner
        and lease.subject == server
        and lease.state in _LIVE
    ]
    fitting = sorted(
        (lease for lease in own if lease.profile == profile),
        key=lambda lease: (-_LIVE.index(lease.state), lease.created_at),
    )
    chosen = fitting[0] if fitting else None
    return chosen, [lease for lease in own if lease is not chosen]


async def claim(
    broker: Broker, owner: str, server: str, profile: str, groups: Iterable[str] = ()
) -> tuple[Lease, bool]:
    """The notebook's lease, and whether it was there before (after a restart of the hub, say).

    `groups` are the owner's in the hub: limits and reservations go by them. A quarantined lease of the same notebook
    stays what it is, and another one is asked for.

    Raises:
        GpuhubError: the broker refuses, or does not answer.
    """
    found, in_the_way = choose_lease(await broker.leases(), owner, server, profile)
    for lease in in_the_way:
        await give_back(broker, lease.id, wait=True)
    if found is not None:
        return found, True
    request = LeaseRequest(
        profile=profile, server=server, key=f"nb-{uuid.uuid4().hex}", owner=owner, groups=wire_groups(groups)
    )
    return await broker.request_lease(request), False


def wire_groups(groups: Iterable[str]) -> tuple[str, ...]:
    """Groups as the broker takes them: in order, without names that none of its settings can have."""
    return tuple(sorted(name for name in set(groups) if 0 < len(name) <= _GROUP_LENGTH))[:_GROUPS]


async def wait_granted(broker: Broker, lease: Lease, tell: Callable[[Lease | None], None]) -> Lease:
    """Wait until the lease is granted; `tell` gets each new version, and None while the broker does not answer.

    Raises:
        Conflict: the lease ended instead, with the reason.
    """
    while lease.state is LeaseState.REQUESTED:
        tell(lease)
        try:
            lease = await broker.get_lease(lease.id, wait_s=POLL_S, version=lease.version)
        except BrokerUnreachable:
            # The place in the queue is in the broker's store: a restart of it costs a moment only.
            tell(None)
            await asyncio.sleep(_RETRY_S)
    if lease.state not in _LIVE:
        raise Conflict(f"The wait for a GPU has ended: {lease.reason or 'stopped'}.")
    return lease


async def give_back(broker: Broker, lease_id: str, *, wait: bool) -> None:
    """End the lease; with `wait`, until its GPUs are free, quarantined, or some seconds have passed.

    Raises:
        BrokerUnreachable: it will find out by itself that no container carries the lease.
    """
    try:
        lease = await broker.release(lease_id)
    except NotFound:
        return
    loop = asyncio.get_running_loop()
    end = loop.time() + _RELEASE_DEADLINE_S
    while wait and lease.state not in _OVER and (left := end - loop.time()) > 0:
        lease = await broker.get_lease(lease.id, wait_s=left, version=lease.version)
