"""The states of a lease; only these functions change them.

requested ──grant──▶ granted ──activate──▶ active ──release──▶ releasing ──prove_released (every node)──▶ released
    └──release──▶ released  └──release──▶ releasing                 ├──force_release──▶ released
                                                                    └──quarantine──▶ quarantined
                                    quarantined ──prove_released (every node), or force_release──▶ released

A GPU is free on proof alone (`prove_released`): its node's own daemon, the same as at the grant, shows no container of
the lease; or the node was rebooted since and shows none. Time brings about an end (`release`), never a proof: a lease
that ends while its node cannot prove it is quarantined, and its GPUs stay blocked until there is proof, or until an
administrator overrides it (`force_release`).

An elastic job's lease may release nodes while it continues: `shrink` marks their GPUs, `prove_released` frees them.
A notebook may lend its GPU while it is idle (`suspension`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gpuhub.broker_api.schemas import LeaseState, Purpose
from gpuhub.common.errors import Conflict
from gpuhub.common.units import format_span
from gpuhub.domain import suspension
from gpuhub.domain.models import ContainerSize, LeasedGpu, LeaseRow
from gpuhub.scheduler.interface import NodeAllocation

#: Has its GPUs and was not asked to end.
LIVE = frozenset({LeaseState.GRANTED, LeaseState.ACTIVE})
#: States of a lease that was asked to end and whose GPUs are not proven free.
ENDING = frozenset({LeaseState.RELEASING, LeaseState.QUARANTINED})

_NEXT: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.REQUESTED: frozenset({LeaseState.GRANTED, LeaseState.RELEASED}),
    LeaseState.GRANTED: frozenset({LeaseState.ACTIVE, LeaseState.RELEASING}),
    LeaseState.ACTIVE: frozenset({LeaseState.RELEASING}),
    LeaseState.RELEASING: frozenset({LeaseState.QUARANTINED, LeaseState.RELEASED}),
    LeaseState.QUARANTINED: frozenset({LeaseState.RELEASED}),
    LeaseState.RELEASED: frozenset(),
}


def grant(
    lease: LeaseRow,
    shares: Sequence[NodeAllocation],
    now: float,
    *,
    note: str | None = None,
    parts: Mapping[str, int] | None = None,
    identities: Mapping[str, tuple[str | None, str | None]] | None = None,
) -> LeaseRow:
    """Grant a waiting lease its GPUs, and start its time limit.

    Args:
        parts: Which share of a shared GPU it gets, by UUID.
        identities: The ids of daemon and boot that later proofs are compared with, by node.
    """
    parts = parts or {}
    return _enter(lease, LeaseState.GRANTED, now).evolve(
        granted_at=now,
        expires_at=None if lease.time_limit_s is None else now + lease.time_limit_s,
        epoch=lease.epoch + 1,
        note=note,
        nodes=tuple(share.node for share in shares),
        identities=dict(identities or {}),
        sizes={share.node: size for share in shares if (size := _find_granted_size(lease, share)) is not None},
        gpus=tuple(
            LeasedGpu(
                uuid=slot.uuid,
                node=slot.node,
                index=slot.index,
                model=slot.card.model,
                memory_mib=slot.card.memory_mib,
                worker=worker,
                share=lease.resources.share,
                part=parts.get(slot.uuid, 0),
            )
            for worker, share in enumerate(shares)
            for slot in share.slots
        ),
    )


def _find_granted_size(lease: LeaseRow, share: NodeAllocation) -> ContainerSize | None:
    """Return what a container was granted; None on a node of unknown size."""
    if share.cpu_milli is None and share.memory_mib is None:
        return None
    usual = lease.find_size(share.node)
    return ContainerSize(
        cpu_milli=usual.cpu_milli if share.cpu_milli is None else share.cpu_milli,
        memory_mib=usual.memory_mib if share.memory_mib is None else share.memory_mib,
    )


def activate(lease: LeaseRow, container_id: str | None, now: float) -> LeaseRow:
    """Report the container of a granted lease; repeated calls change nothing, and a new container replaces an ended
    one.
    """
    if lease.state is LeaseState.ACTIVE:
        return lease if lease.container_id == container_id else lease.evolve(container_id=container_id, since=now)
    return _enter(lease, LeaseState.ACTIVE, now).evolve(container_id=container_id)


def extend(lease: LeaseRow, seconds: int, now: float) -> LeaseRow:
    """Set the end of a live lease to `seconds` from now."""
    if lease.state not in LIVE or lease.granted_at is None:
        raise Conflict(f"lease {lease.id} is {lease.state}: only a lease that continues has a time to change")
    if lease.reason is not None:
        raise Conflict(f"lease {lease.id} cannot be extended: {lease.reason}")
    if is_expired(lease, now):
        raise Conflict(f"lease {lease.id} is over, and is being ended")
    expires_at = now + seconds
    extended = lease.evolve(time_limit_s=round(expires_at - lease.granted_at))
    if suspension.is_time_stopped(lease):
        return suspension.set_time_left(extended, seconds)
    return extended.evolve(expires_at=expires_at)


def shorten(lease: LeaseRow, until: float, reason: str) -> LeaseRow:
    """End a live lease at `until` at the latest, for a reason; other leases do not change."""
    if lease.state not in LIVE or (lease.expires_at is not None and lease.expires_at <= until):
        return lease
    return lease.evolve(expires_at=until, reason=reason)


def restore_time(lease: LeaseRow) -> LeaseRow:
    """Undo `shorten`: a live lease ends by its own time limit again.

    What is left to a job that was suspended before is not known any more: it gets its whole limit from then on.
    """
    if lease.state not in LIVE or lease.reason is None or lease.granted_at is None:
        return lease
    limit = lease.time_limit_s
    if limit is None or suspension.is_time_stopped(lease):
        return lease.evolve(expires_at=None, reason=None)
    began = lease.charged_from if lease.purpose is Purpose.JOB else lease.granted_at
    return lease.evolve(expires_at=began + limit, reason=None)


def set_end(lease: LeaseRow, ends_at: float | None) -> LeaseRow:
    """Set the end of a live lease that has no time limit; other leases do not change."""
    if lease.state not in LIVE or lease.time_limit_s is not None or lease.expires_at == ends_at:
        return lease
    return lease.evolve(expires_at=ends_at)


def release(lease: LeaseRow, reason: str, now: float) -> LeaseRow:
    """End the lease: at once while it waits, else as soon as its containers are gone."""
    if lease.state in ENDING or lease.state is LeaseState.RELEASED:
        return lease
    if lease.state is LeaseState.REQUESTED:
        return _enter(lease, LeaseState.RELEASED, now).evolve(reason=reason, released_at=now)
    if is_expired(lease, now):
        # A lease without a limit follows Slurm's.
        limit = "" if lease.time_limit_s is None else f" of {format_span(lease.time_limit_s)}"
        reason = lease.reason or f"its time limit{limit} was reached"
    return _enter(lease, LeaseState.RELEASING, now).evolve(reason=reason)


def shrink(lease: LeaseRow, nodes: Collection[str], now: float) -> LeaseRow:
    """Mark nodes for release by a live lease that continues with the others.

    Raises:
        Conflict: The lease is not live, or no node of it would remain.
    """
    if lease.state not in LIVE:
        raise Conflict(f"lease {lease.id} is {lease.state} and cannot release only some of its nodes")
    if not set(list_live_nodes(lease)) - set(nodes):
        raise Conflict(f"lease {lease.id} would have no node left")
    return lease.evolve(
        gpus=tuple(
            replace(gpu, shrink_requested_at=now)
            if gpu.node in nodes and gpu.shrink_requested_at is None and gpu.released_at is None
            else gpu
            for gpu in lease.gpus
        )
    )


def set_note(lease: LeaseRow, note: str | None) -> LeaseRow:
    """Set the note for the owner of a lease; None removes it."""
    return lease.evolve(note=note)


def quarantine(lease: LeaseRow, why: str, now: float) -> LeaseRow:
    """Quarantine a lease that lacks proof of its release: its GPUs stay blocked until there is proof."""
    if lease.state is LeaseState.QUARANTINED:
        return lease
    return _enter(lease, LeaseState.QUARANTINED, now).evolve(quarantined_at=now, note=f"quarantined: {why}")


def prove_released(lease: LeaseRow, node: str, now: float) -> LeaseRow:
    """Free the lease's GPUs on a node whose daemon shows no container of it.

    Of a live lease, only the GPUs marked by `shrink` are freed.
    """
    if lease.state in LIVE:
        return _prove_shrunk(lease, node, now)
    if lease.state not in ENDING:
        raise Conflict(f"lease {lease.id} is {lease.state}, not releasing")
    gpus = tuple(_release_gpu(gpu, now) if gpu.node == node else gpu for gpu in lease.gpus)
    if any(gpu.released_at is None for gpu in gpus):
        return lease.evolve(gpus=gpus)
    return _enter(lease, LeaseState.RELEASED, now).evolve(gpus=gpus, released_at=now)


def force_release(lease: LeaseRow, by: str, now: float) -> LeaseRow:
    """Free all GPUs of an ending lease without proof, on an administrator's responsibility.

    Raises:
        Conflict: The lease was not asked to end.
    """
    if lease.state is LeaseState.RELEASED:
        return lease
    if lease.state not in ENDING:
        raise Conflict(f"lease {lease.id} is {lease.state}: end it first; only then its GPUs can be freed by force")
    gpus = tuple(_release_gpu(gpu, now) for gpu in lease.gpus)
    note = f"freed without proof by {by}"
    return _enter(lease, LeaseState.RELEASED, now).evolve(gpus=gpus, released_at=now, note=note)


def shift_times(lease: LeaseRow, seconds: float) -> LeaseRow:
    """Move all times of a lease by a jump of the machine's clock."""
    moments = ("created_at", "since", "granted_at", "expires_at", "kept_from", "kept_until", "quarantined_at")
    known = {name: getattr(lease, name) for name in moments}
    gpus = tuple(
        gpu if gpu.shrink_requested_at is None else replace(gpu, shrink_requested_at=gpu.shrink_requested_at + seconds)
        for gpu in lease.gpus
    )
    losses = tuple(at + seconds for at in lease.losses)
    return suspension.shift_times(lease, seconds).evolve(
        gpus=gpus, losses=losses, **{name: at + seconds for name, at in known.items() if at is not None}
    )


def is_expired(lease: LeaseRow, now: float) -> bool:
    return lease.expires_at is not None and lease.expires_at <= now


def list_live_nodes(lease: LeaseRow) -> tuple[str, ...]:
    """Return the nodes on which a live lease may have containers, in worker order, except those marked by `shrink`."""
    if not lease.gpus:
        return lease.nodes
    bound = suspension.list_bound_gpus(lease)
    return tuple(dict.fromkeys(gpu.node for gpu in bound if gpu.shrink_requested_at is None))


def refresh_identity(lease: LeaseRow, node: str, identity: tuple[str | None, str | None]) -> LeaseRow:
    """Note that the same daemon answers after a reboot of the machine: from now on this boot counts."""
    return lease.evolve(identities={**lease.identities, node: identity})


def list_unproven_nodes(lease: LeaseRow) -> tuple[str, ...]:
    """Return the nodes that have not proven yet that they are clear of an ending lease, or of what it releases."""
    if lease.state in {LeaseState.RELEASED, LeaseState.REQUESTED}:
        return ()
    if lease.state in LIVE:
        return tuple(dict.fromkeys(gpu.node for gpu in lease.held if gpu.shrink_requested_at is not None))
    if not lease.gpus or not lease.held:
        # Without GPU, or suspended: its container is what has to be gone.
        return lease.nodes
    return tuple(dict.fromkeys(gpu.node for gpu in lease.held))


def _prove_shrunk(lease: LeaseRow, node: str, now: float) -> LeaseRow:
    if node not in list_unproven_nodes(lease):
        raise Conflict(f"lease {lease.id} is {lease.state}, not releasing")
    return lease.evolve(gpus=tuple(_release_gpu(gpu, now) if gpu.node == node else gpu for gpu in lease.gpus))


def _release_gpu(gpu: LeasedGpu, now: float) -> LeasedGpu:
    return gpu if gpu.released_at is not None else replace(gpu, released_at=now)


def _enter(lease: LeaseRow, state: LeaseState, now: float) -> LeaseRow:
    if state not in _NEXT[lease.state]:
        reason = f" ({lease.reason})" if lease.reason else ""
        raise Conflict(f"lease {lease.id} is {lease.state}{reason} and cannot become {state}")
    return lease.evolve(state=state, since=now)
