"""A lease's life: the only place where its state changes. Pure; time is passed in.

waiting ──grant──▶ granted ──activate──▶ active ──release──▶ releasing ──prove_gone (every node)──▶ released
   └──release──▶ released        └──release──▶ releasing

A GPU is given back by `prove_gone` alone: when its node's own daemon shows no container that carries the lease.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuhub.broker.rows import LeasedGpu, LeaseRow
from gpuhub.broker.schemas import LeaseState
from gpuhub.engines.base import Share
from gpuhub.errors import Conflict
from gpuhub.quantities import format_span

_NEXT: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.WAITING: frozenset({LeaseState.GRANTED, LeaseState.RELEASED}),
    LeaseState.GRANTED: frozenset({LeaseState.ACTIVE, LeaseState.RELEASING}),
    LeaseState.ACTIVE: frozenset({LeaseState.RELEASING}),
    LeaseState.RELEASING: frozenset({LeaseState.RELEASED}),
    LeaseState.RELEASED: frozenset(),
}


def grant(lease: LeaseRow, shares: Sequence[Share], now: float) -> LeaseRow:
    """A waiting lease gets its GPUs; its time limit begins."""
    return _enter(lease, LeaseState.GRANTED, now).evolve(
        granted_at=now,
        expires_at=None if lease.time_limit_s is None else now + lease.time_limit_s,
        epoch=lease.epoch + 1,
        nodes=tuple(share.node for share in shares),
        gpus=tuple(
            LeasedGpu(
                uuid=slot.uuid,
                node=slot.node,
                index=slot.index,
                model=slot.card.model,
                memory_mib=slot.card.memory_mib,
                worker=worker,
            )
            for worker, share in enumerate(shares)
            for slot in share.slots
        ),
    )


def activate(lease: LeaseRow, container_id: str | None, now: float) -> LeaseRow:
    """The container exists. Said again with the same container, nothing changes; a new one replaces one that ended."""
    if lease.state is LeaseState.ACTIVE:
        return lease if lease.container_id == container_id else lease.evolve(container_id=container_id, since=now)
    return _enter(lease, LeaseState.ACTIVE, now).evolve(container_id=container_id)


def release(lease: LeaseRow, reason: str, now: float) -> LeaseRow:
    """The lease is to end: at once while it waits, else as soon as its containers are gone."""
    if lease.state in {LeaseState.RELEASING, LeaseState.RELEASED}:
        return lease
    if lease.state is LeaseState.WAITING:
        return _enter(lease, LeaseState.RELEASED, now).evolve(reason=reason, released_at=now)
    if is_expired(lease, now) and lease.time_limit_s is not None:
        reason = f"its time limit of {format_span(lease.time_limit_s)} was reached"
    return _enter(lease, LeaseState.RELEASING, now).evolve(reason=reason)


def prove_gone(lease: LeaseRow, node: str, now: float) -> LeaseRow:
    """The node's daemon shows no container of a releasing lease: its GPUs there are free."""
    if lease.state is not LeaseState.RELEASING:
        raise Conflict(f"lease {lease.id} is {lease.state}, not releasing")
    gpus = tuple(gpu if gpu.node != node or gpu.released_at is not None else _released(gpu, now) for gpu in lease.gpus)
    if any(gpu.released_at is None for gpu in gpus):
        return lease.evolve(gpus=gpus)
    return _enter(lease, LeaseState.RELEASED, now).evolve(gpus=gpus, released_at=now)


def is_expired(lease: LeaseRow, now: float) -> bool:
    """Whether its time limit is over."""
    return lease.expires_at is not None and lease.expires_at <= now


def unproven_nodes(lease: LeaseRow) -> tuple[str, ...]:
    """Nodes of which it is not yet known that they are clear of the lease."""
    if lease.state is LeaseState.RELEASED:
        return ()
    if not lease.gpus:
        return lease.nodes
    return tuple(dict.fromkeys(gpu.node for gpu in lease.held))


def _released(gpu: LeasedGpu, now: float) -> LeasedGpu:
    return LeasedGpu(
        uuid=gpu.uuid,
        node=gpu.node,
        index=gpu.index,
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        worker=gpu.worker,
        released_at=now,
    )


def _enter(lease: LeaseRow, state: LeaseState, now: float) -> LeaseRow:
    if state not in _NEXT[lease.state]:
        reason = f" ({lease.reason})" if lease.reason else ""
        raise Conflict(f"lease {lease.id} is {lease.state}{reason} and cannot become {state}")
    return lease.evolve(state=state, since=now)
