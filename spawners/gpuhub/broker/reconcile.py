"""Leases against the containers that one node really has → what to do. Pure.

Only what the node's own daemon says counts: a node that cannot be read gets no call, so its leases stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuhub import names
from gpuhub.broker import leases as rules
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import JobState, LeaseState, WorkerState

#: A granted lease whose notebook was not created for so long is given up, seconds.
START_GRACE_S = 300.0
#: A created container that is not started for so long will not be, seconds.
CREATED_GRACE_S = 120.0
#: The hub gets so long to stop a notebook whose time is over, seconds.
HUB_GRACE_S = 60.0

_ENDED = frozenset({"exited", "dead", "removing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container of ours as the daemon lists it."""

    id: str
    kind: str
    lease: str
    epoch: int
    worker: int | None
    #: Docker's word: created, running, paused, restarting, removing, exited or dead.
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Stop and remove a container."""

    container_id: str
    why: str
    #: It belongs to no open lease: until it is gone the node gets no work.
    is_foreign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Nothing on the node carries this releasing lease."""

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


Action = Remove | Gone | End | WorkerEnded


def parse_container(raw: Mapping[str, Any]) -> Container:
    """One entry of the daemon's list, such as
    `{"Id": "3f…", "State": "running", "Labels": {"gpuhub.lease": "l1", …}}`.
    """
    labels: Mapping[str, str] = raw.get("Labels") or {}
    return Container(
        id=raw["Id"],
        kind=labels.get(names.LABEL_KIND, ""),
        lease=labels.get(names.LABEL_LEASE, ""),
        epoch=_number(labels.get(names.LABEL_EPOCH)) or 0,
        worker=_number(labels.get(names.LABEL_WORKER)),
        state=str(raw.get("State") or "").lower(),
    )


def reconcile_node(
    *,
    node: str,
    containers: Iterable[Container],
    leases: Mapping[str, LeaseRow],
    jobs: Mapping[str, JobRow],
    listed_at: float,
    busy: frozenset[str] = frozenset(),
) -> list[Action]:
    """What to do on a node whose containers were listed at `listed_at` (when the listing began).

    `leases` and `jobs` are the open ones, read after the listing. `busy` are leases whose containers the broker was
    making while the list was made.
    """
    mine = [container for container in containers if container.kind != names.KIND_AGENT]
    by_lease: dict[str, list[Container]] = {}
    actions: list[Action] = []
    for container in mine:
        foreign = _why_foreign(container, node, leases)
        if foreign is not None:
            actions.append(Remove(container_id=container.id, why=foreign, is_foreign=True))
        else:
            by_lease.setdefault(container.lease, []).append(container)
    job_of = {job.lease_id: job for job in jobs.values()}
    for lease in leases.values():
        if node not in lease.nodes:
            continue
        there = by_lease.get(lease.id, [])
        if lease.state is LeaseState.RELEASING:
            actions += _release(lease, node, there, listed_at, is_busy=lease.id in busy)
        elif lease.id in job_of:
            if lease.id not in busy:
                actions += _watch_workers(job_of[lease.id], node, there)
        else:
            actions += _watch_notebook(lease, there, listed_at)
    return actions


def is_settled(actions: Sequence[Action]) -> bool:
    """Whether nothing unknown can hold a GPU on the node."""
    return not any(isinstance(action, Remove) and action.is_foreign for action in actions)


def _why_foreign(container: Container, node: str, leases: Mapping[str, LeaseRow]) -> str | None:
    lease = leases.get(container.lease)
    if lease is None:
        return f"its lease {container.lease or '(none)'} has ended or never was"
    if node not in lease.nodes:
        return f"its lease {lease.id} is for {', '.join(lease.nodes) or 'no node yet'}"
    if container.epoch != lease.epoch:
        return f"it is of epoch {container.epoch} of lease {lease.id}, which is in epoch {lease.epoch}"
    return None


def _release(
    lease: LeaseRow, node: str, there: Sequence[Container], listed_at: float, *, is_busy: bool
) -> list[Action]:
    if there:
        return [Remove(container_id=container.id, why=lease.reason or "released") for container in there]
    if is_busy or node not in rules.unproven_nodes(lease) or not _is_older(lease, listed_at):
        return []
    return [Gone(lease_id=lease.id)]


def _watch_notebook(lease: LeaseRow, there: Sequence[Container], listed_at: float) -> list[Action]:
    reason = None
    if lease.state is LeaseState.GRANTED and lease.since + START_GRACE_S < listed_at:
        reason = f"it was not started within {START_GRACE_S / 60:.0f} minutes"
    elif lease.state is LeaseState.ACTIVE and _is_older(lease, listed_at):
        reason = _why_over(lease, [container.state for container in there], listed_at)
    return [] if reason is None else [End(lease_id=lease.id, reason=reason)]


def _why_over(lease: LeaseRow, states: Sequence[str], listed_at: float) -> str | None:
    """Why an active notebook's lease is over, given the states of its containers; None when it is not."""
    if rules.is_expired(lease, listed_at - HUB_GRACE_S):
        return "its time limit was reached"
    if not states:
        return "its container is gone"
    alive = [state for state in states if state not in _ENDED]
    if not alive:
        return "its container ended"
    if set(alive) == {"created"} and lease.since + CREATED_GRACE_S < listed_at:
        return "its container was never started"
    return None


def _watch_workers(job: JobRow, node: str, there: Sequence[Container]) -> list[Action]:
    if job.state not in {JobState.STARTING, JobState.RUNNING}:
        return []
    by_index = {container.worker: container for container in there}
    actions: list[Action] = []
    for worker in job.workers:
        if worker.node != node or worker.state is not WorkerState.RUNNING:
            continue
        container = by_index.get(worker.index)
        if container is None or container.state in _ENDED:
            container_id = None if container is None else container.id
            actions.append(WorkerEnded(job_id=job.id, index=worker.index, container_id=container_id))
    return actions


def _is_older(lease: LeaseRow, listed_at: float) -> bool:
    """Whether the lease was in its state before the list was made."""
    return lease.since < listed_at


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
