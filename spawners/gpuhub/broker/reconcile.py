"""Leases against the containers that one node really has → what to do. Pure.

Only what the node's own daemon says counts: a node that cannot be read gets no call, so its leases stay. That a
container is not listed proves something only where the daemon is the one under which the lease began, or the machine
was started anew since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuhub import names
from gpuhub.broker import leases as rules
from gpuhub.broker.found import Container, Listing
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import JobState, LeaseState, Purpose, WorkerState
from gpuhub.nodes.records import Identity

#: A granted lease whose notebook was not created for so long is given up, seconds.
START_GRACE_S = 300.0
#: A created container that is not started for so long will not be, seconds.
CREATED_GRACE_S = 120.0
#: The hub gets so long to stop a notebook whose time is over, seconds.
HUB_GRACE_S = 60.0

_LIVE_JOBS = frozenset({JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Stop and remove a container."""

    container_id: str
    why: str
    #: It belongs to no open lease: until it is gone the node gets no work.
    is_foreign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Tell a worker to write its checkpoint and end: SIGTERM, once."""

    container_id: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Proof that nothing on the node carries this lease any more, or nothing of what it is to give back there."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Nothing on the node carries this lease, and that proves nothing."""

    lease_id: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """The lease goes on under the same daemon after a restart of the machine: only a later restart proves anything."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The lease is to be released."""

    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    """A job's worker ended; its container is to be asked why, or is gone (`container_id` None)."""

    job_id: str
    index: int
    container_id: str | None


Action = Remove | Signal | Gone | Doubt | Renew | End | WorkerEnded


def reconcile_node(
    listing: Listing,
    *,
    leases: Mapping[str, LeaseRow],
    on_node: Iterable[LeaseRow],
    job_of: Mapping[str, JobRow],
    preempt_grace: float,
) -> list[Action]:
    """What to do on a node.

    `leases` are the open ones by id, `on_node` those of them that are for this node, `job_of` open jobs by lease; all
    read after the listing.
    """
    by_lease: dict[str, list[Container]] = {}
    actions: list[Action] = []
    for container in listing.containers:
        if container.kind in names.LEASELESS:
            continue
        lease = leases.get(container.lease)
        foreign = _why_foreign(container, listing.node, lease, job_of.get(container.lease))
        if foreign is not None:
            actions.append(Remove(container_id=container.id, why=foreign, is_foreign=True))
        else:
            by_lease.setdefault(container.lease, []).append(container)
    for lease in on_node:
        actions += _judge(lease, job_of.get(lease.id), by_lease.get(lease.id, []), listing, preempt_grace)
    return actions


def why_no_proof(lease: LeaseRow, listing: Listing) -> str | None:
    """Why it proves nothing that a container of the lease is not listed; None when it proves that there is none."""
    return why_another(lease, listing.node, listing.identity)


def why_another(lease: LeaseRow, node: str, identity: Identity) -> str | None:
    """Why the daemon that answers on a node now cannot know all containers of the lease; None when it does."""
    daemon_then, boot_then = lease.identities.get(node, (None, None))
    daemon, boot = identity
    if daemon_then is None or daemon == daemon_then:
        # Brokers that kept no identities had asked the daemon that is asked now.
        return None
    if daemon is not None and boot_then is not None and boot is not None and boot != boot_then:
        return None
    return f"another Docker daemon answers on {node} than when the lease began, and no restart of it is known"


def _is_renewed(lease: LeaseRow, listing: Listing) -> bool:
    """Whether what is stored of daemon and boot is older than what they are, and the daemon is still the same."""
    daemon_then, boot_then = lease.identities.get(listing.node, (None, None))
    daemon, boot = listing.identity
    is_same = daemon is not None and daemon_then in {None, daemon}
    return is_same and boot is not None and boot != boot_then


def _judge(
    lease: LeaseRow, job: JobRow | None, there: Sequence[Container], listing: Listing, preempt_grace: float
) -> list[Action]:
    """What one lease and its containers on the node call for."""
    doubt = why_no_proof(lease, listing)
    actions: list[Action] = [] if doubt is None else [Doubt(lease_id=lease.id, why=doubt)]
    if _is_renewed(lease, listing):
        actions.append(Renew(lease_id=lease.id))
    if lease.state in rules.ENDING:
        return actions + _release(lease, there, listing, is_proof=doubt is None)
    if lease.purpose is Purpose.NOTEBOOK:
        return actions + _watch_notebook(lease, there, listing.at, is_proof=doubt is None)
    if job is None or lease.id in listing.busy:
        return actions
    actions += _watch_workers(job, listing.node, there, is_proof=doubt is None)
    return actions + _shed(lease, there, listing, preempt_grace, is_proof=doubt is None)


def is_settled(actions: Sequence[Action]) -> bool:
    """Whether nothing unknown can hold a GPU on the node."""
    return not any(isinstance(action, Remove) and action.is_foreign for action in actions)


def rests_on_absence(actions: Sequence[Action]) -> bool:
    """Whether something is concluded from what is not listed: then it must be sure which daemon made the list."""
    return any(
        isinstance(action, Gone | End) or (isinstance(action, WorkerEnded) and action.container_id is None)
        for action in actions
    )


def _why_foreign(container: Container, node: str, lease: LeaseRow | None, job: JobRow | None) -> str | None:
    if lease is None:
        return f"its lease {container.lease or '(none)'} has ended or never was"
    if node not in lease.nodes:
        return f"its lease {lease.id} is for {', '.join(lease.nodes) or 'no node yet'}"
    if container.epoch != lease.epoch:
        return f"it is of epoch {container.epoch} of lease {lease.id}, which is in epoch {lease.epoch}"
    if job is not None and container.worker not in {gpu.worker for gpu in lease.held if gpu.node == node}:
        return f"it is worker {container.worker} of job {job.id}, which has no such worker here"
    extra = (container.devices or frozenset()) - {gpu.uuid for gpu in lease.gpus if gpu.node == node}
    return f"it has GPU {min(extra)}, which is not in its lease {lease.id}" if extra else None


def _release(lease: LeaseRow, there: Sequence[Container], listing: Listing, *, is_proof: bool) -> list[Action]:
    if there:
        return [Remove(container_id=container.id, why=lease.reason or "released") for container in there]
    is_judged = is_proof and lease.id not in listing.busy and _is_older(lease, listing.at)
    return [Gone(lease_id=lease.id)] if is_judged and listing.node in rules.unproven_nodes(lease) else []


def _shed(
    lease: LeaseRow, there: Sequence[Container], listing: Listing, preempt_grace: float, *, is_proof: bool
) -> list[Action]:
    """An elastic job gives GPUs back: its workers there are told, removed after the grace, and then proven gone."""
    shed = {gpu.worker: gpu.shed_at for gpu in lease.held if gpu.node == listing.node and gpu.shed_at is not None}
    if not shed:
        return []
    shed_at = max(shed.values())
    leaving = [container for container in there if container.worker in shed]
    if not leaving:
        return [Gone(lease_id=lease.id)] if is_proof and shed_at < listing.at else []
    why = f"lease {lease.id} gives its GPUs on {listing.node} back"
    is_over = shed_at + preempt_grace <= listing.at
    return [
        Remove(container_id=container.id, why=why)
        if is_over or not container.is_alive
        else Signal(container_id=container.id, why=why)
        for container in leaving
    ]


def _watch_notebook(lease: LeaseRow, there: Sequence[Container], listed_at: float, *, is_proof: bool) -> list[Action]:
    reason = None
    if lease.state is LeaseState.GRANTED and lease.since + START_GRACE_S < listed_at:
        reason = f"it was not started within {START_GRACE_S / 60:.0f} minutes"
    elif lease.state is LeaseState.ACTIVE and _is_older(lease, listed_at):
        reason = _why_over(lease, there, listed_at, is_proof=is_proof)
    return [] if reason is None else [End(lease_id=lease.id, reason=reason)]


def _why_over(lease: LeaseRow, there: Sequence[Container], listed_at: float, *, is_proof: bool) -> str | None:
    """Why an active notebook's lease is over, given its containers; None when it is not."""
    if rules.is_expired(lease, listed_at - HUB_GRACE_S):
        return "its time limit was reached"
    if not there:
        return "its container is gone" if is_proof else None
    alive = {container.state for container in there if container.is_alive}
    if not alive:
        return "its container ended"
    if alive == {"created"} and lease.since + CREATED_GRACE_S < listed_at:
        return "its container was never started"
    return None


def _watch_workers(job: JobRow, node: str, there: Sequence[Container], *, is_proof: bool) -> list[Action]:
    if job.state not in _LIVE_JOBS:
        return []
    by_index = {container.worker: container for container in there}
    actions: list[Action] = []
    for worker in job.workers:
        if worker.node != node or worker.state is not WorkerState.RUNNING:
            continue
        container = by_index.get(worker.index)
        if container is None:
            if is_proof:
                actions.append(WorkerEnded(job_id=job.id, index=worker.index, container_id=None))
        elif not container.is_alive:
            actions.append(WorkerEnded(job_id=job.id, index=worker.index, container_id=container.id))
        elif job.state is JobState.PREEMPTING:
            actions.append(Signal(container_id=container.id, why=f"job {job.id} gives its GPUs to others"))
    return actions


def _is_older(lease: LeaseRow, listed_at: float) -> bool:
    """Whether the lease was in its state before the list was made."""
    return lease.since < listed_at
