"""A lease's life: the only place where its state changes. Pure; time is passed in, in seconds since 1970.

requested ──grant──▶ granted ──activate──▶ active ──release──▶ releasing ──prove_gone (every node)──▶ released
    └──release──▶ released  └──release──▶ releasing                 ├──force──▶ released
                                                                    └──quarantine──▶ quarantined
                                              quarantined ──prove_gone (every node), or force──▶ released

A GPU is given back on proof alone (`prove_gone`): its node's own daemon, the same one as at the grant, shows no
container of the lease; or the node was started anew since and shows none. What time brings about is an end
(`release`), never a proof: a lease that ends while its node cannot prove it is quarantined, and its GPUs stay blocked.
An administrator who knows better says so (`force`).

An elastic job's lease may give nodes back while it goes on: `shed` marks their GPUs, `prove_gone` frees them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gpuhub.broker.rows import LeasedGpu, LeaseRow
from gpuhub.broker.schemas import LeaseState
from gpuhub.engines.base import Share
from gpuhub.errors import Conflict
from gpuhub.quantities import format_span

#: Holding what it was given, and not asked to end.
LIVE = frozenset({LeaseState.GRANTED, LeaseState.ACTIVE})
#: Asked to end; what it was given is not proven free.
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
    shares: Sequence[Share],
    now: float,
    *,
    note: str | None = None,
    parts: Mapping[str, int] | None = None,
    identities: Mapping[str, tuple[str | None, str | None]] | None = None,
) -> LeaseRow:
    """A waiting lease gets its GPUs; its time limit begins.

    `parts` says which part of a shared GPU, by UUID; `identities` whose word counts, by node.
    """
    parts = parts or {}
    return _enter(lease, LeaseState.GRANTED, now).evolve(
        granted_at=now,
        expires_at=None if lease.time_limit_s is None else now + lease.time_limit_s,
        epoch=lease.epoch + 1,
        note=note,
        nodes=tuple(share.node for share in shares),
        identities=dict(identities or {}),
        gpus=tuple(
            LeasedGpu(
                uuid=slot.uuid,
                node=slot.node,
                index=slot.index,
                model=slot.card.model,
                memory_mib=slot.card.memory_mib,
                worker=worker,
                share=lease.ask.share,
                part=parts.get(slot.uuid, 0),
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


def extend(lease: LeaseRow, seconds: int, now: float) -> LeaseRow:
    """A live lease now ends so many seconds from now."""
    if lease.state not in LIVE or lease.granted_at is None:
        raise Conflict(f"lease {lease.id} is {lease.state}: only a lease that goes on has a time to change")
    if lease.reason is not None:
        raise Conflict(f"lease {lease.id} cannot be extended: {lease.reason}")
    if is_expired(lease, now):
        raise Conflict(f"lease {lease.id} is over, and is being ended")
    expires_at = now + seconds
    return lease.evolve(expires_at=expires_at, time_limit_s=round(expires_at - lease.granted_at))


def cut_short(lease: LeaseRow, until: float, reason: str) -> LeaseRow:
    """A live lease ends by then at the latest, and says why; others are left alone."""
    if lease.state not in LIVE or (lease.expires_at is not None and lease.expires_at <= until):
        return lease
    return lease.evolve(expires_at=until, reason=reason)


def restore_time(lease: LeaseRow) -> LeaseRow:
    """Take `cut_short` back: a live lease ends when its own time limit says."""
    if lease.state not in LIVE or lease.reason is None or lease.granted_at is None:
        return lease
    limit = lease.time_limit_s
    return lease.evolve(expires_at=None if limit is None else lease.granted_at + limit, reason=None)


def follow_end(lease: LeaseRow, ends_at: float | None) -> LeaseRow:
    """A live lease without a limit of its own ends when somebody else says; others are left alone."""
    if lease.state not in LIVE or lease.time_limit_s is not None or lease.expires_at == ends_at:
        return lease
    return lease.evolve(expires_at=ends_at)


def release(lease: LeaseRow, reason: str, now: float) -> LeaseRow:
    """The lease is to end: at once while it waits, else as soon as its containers are gone."""
    if lease.state in ENDING or lease.state is LeaseState.RELEASED:
        return lease
    if lease.state is LeaseState.REQUESTED:
        return _enter(lease, LeaseState.RELEASED, now).evolve(reason=reason, released_at=now)
    if is_expired(lease, now):
        # Without one of its own it follows Slurm's.
        limit = "" if lease.time_limit_s is None else f" of {format_span(lease.time_limit_s)}"
        reason = lease.reason or f"its time limit{limit} was reached"
    return _enter(lease, LeaseState.RELEASING, now).evolve(reason=reason)


def shed(lease: LeaseRow, nodes: Collection[str], now: float) -> LeaseRow:
    """A live lease is to give these nodes back and goes on with the others.

    Raises:
        Conflict: it does not go on, or nothing would be left of it.
    """
    if lease.state not in LIVE:
        raise Conflict(f"lease {lease.id} is {lease.state} and has nothing to give back while it goes on")
    if not set(live_nodes(lease)) - set(nodes):
        raise Conflict(f"lease {lease.id} would have no node left")
    return lease.evolve(
        gpus=tuple(
            replace(gpu, shed_at=now) if gpu.node in nodes and gpu.shed_at is None and gpu.released_at is None else gpu
            for gpu in lease.gpus
        )
    )


def warn(lease: LeaseRow, note: str | None) -> LeaseRow:
    """The owner of a lease that goes on is to know this; None: nothing any more."""
    return lease.evolve(note=note)


def quarantine(lease: LeaseRow, why: str, now: float) -> LeaseRow:
    """Proof is lacking that a releasing lease is gone: its GPUs stay blocked until there is."""
    if lease.state is LeaseState.QUARANTINED:
        return lease
    return _enter(lease, LeaseState.QUARANTINED, now).evolve(quarantined_at=now, note=f"quarantined: {why}")


def prove_gone(lease: LeaseRow, node: str, now: float) -> LeaseRow:
    """The node's daemon shows no container of the lease: its GPUs there are free.

    Of a lease that goes on, only GPUs that were to be given back.
    """
    if lease.state in LIVE:
        return _prove_shed(lease, node, now)
    if lease.state not in ENDING:
        raise Conflict(f"lease {lease.id} is {lease.state}, not releasing")
    gpus = tuple(_freed(gpu, now) if gpu.node == node else gpu for gpu in lease.gpus)
    if any(gpu.released_at is None for gpu in gpus):
        return lease.evolve(gpus=gpus)
    return _enter(lease, LeaseState.RELEASED, now).evolve(gpus=gpus, released_at=now)


def force(lease: LeaseRow, by: str, now: float) -> LeaseRow:
    """An administrator answers for it that nothing of an ending lease runs any more.

    Raises:
        Conflict: it was not asked to end.
    """
    if lease.state is LeaseState.RELEASED:
        return lease
    if lease.state not in ENDING:
        raise Conflict(f"lease {lease.id} is {lease.state}: end it first; only then its GPUs can be freed by force")
    gpus = tuple(_freed(gpu, now) for gpu in lease.gpus)
    note = f"freed without proof by {by}"
    return _enter(lease, LeaseState.RELEASED, now).evolve(gpus=gpus, released_at=now, note=note)


def shift(lease: LeaseRow, seconds: float) -> LeaseRow:
    """The machine's clock was set by so much: moments from before are told by the new clock."""
    moments = ("created_at", "since", "granted_at", "expires_at", "quarantined_at")
    known = {name: getattr(lease, name) for name in moments}
    gpus = tuple(gpu if gpu.shed_at is None else replace(gpu, shed_at=gpu.shed_at + seconds) for gpu in lease.gpus)
    return lease.evolve(gpus=gpus, **{name: at + seconds for name, at in known.items() if at is not None})


def is_expired(lease: LeaseRow, now: float) -> bool:
    """Whether its time limit is over."""
    return lease.expires_at is not None and lease.expires_at <= now


def live_nodes(lease: LeaseRow) -> tuple[str, ...]:
    """Nodes where containers of the lease may be while it goes on: all but those given back, in worker order."""
    if not lease.gpus:
        return lease.nodes
    return tuple(dict.fromkeys(gpu.node for gpu in lease.held if gpu.shed_at is None))


def renew_identity(lease: LeaseRow, node: str, identity: tuple[str | None, str | None]) -> LeaseRow:
    """The same daemon answers there after a restart of the machine: from now on this boot counts."""
    return lease.evolve(identities={**lease.identities, node: identity})


def unproven_nodes(lease: LeaseRow) -> tuple[str, ...]:
    """Nodes of which it is not yet known that they are clear of an ending lease, or of what it gives back."""
    if lease.state in {LeaseState.RELEASED, LeaseState.REQUESTED}:
        return ()
    if lease.state in LIVE:
        return tuple(dict.fromkeys(gpu.node for gpu in lease.held if gpu.shed_at is not None))
    if not lease.gpus:
        return lease.nodes
    return tuple(dict.fromkeys(gpu.node for gpu in lease.held))


def _prove_shed(lease: LeaseRow, node: str, now: float) -> LeaseRow:
    if node not in unproven_nodes(lease):
        raise Conflict(f"lease {lease.id} is {lease.state}, not releasing")
    return lease.evolve(gpus=tuple(_freed(gpu, now) if gpu.node == node else gpu for gpu in lease.gpus))


def _freed(gpu: LeasedGpu, now: float) -> LeasedGpu:
    return gpu if gpu.released_at is not None else replace(gpu, released_at=now)


def _enter(lease: LeaseRow, state: LeaseState, now: float) -> LeaseRow:
    if state not in _NEXT[lease.state]:
        reason = f" ({lease.reason})" if lease.reason else ""
        raise Conflict(f"lease {lease.id} is {lease.state}{reason} and cannot become {state}")
    return lease.evolve(state=state, since=now)
