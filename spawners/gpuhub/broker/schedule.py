"""What follows from a change: jobs follow their leases and notebooks, and the queue is served. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuhub.broker import job_rules, leases
from gpuhub.broker.ledger import Draft
from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import JobState, LeaseState, Purpose
from gpuhub.engines.base import Engine, Request, Supply, Wait
from gpuhub.nodes.inventory import Inventory

_ENDING = {LeaseState.RELEASING, LeaseState.RELEASED}


def settle(
    draft: Draft, *, engine: Engine, inventory: Inventory, max_gpus: int | None, monotonic: float
) -> Mapping[str, Wait]:
    """Make the draft consistent and grant what can be granted; returns why each waiting lease waits."""
    for job in list(draft.jobs.values()):
        if job.is_open:
            follow(draft, job)
    queue = [build_request(lease) for lease in waiting(draft.leases.values())]
    supply = build_supply(draft.leases.values(), inventory, max_gpus, monotonic)
    decision = engine.decide(queue, supply)
    jobs = {job.lease_id: job for job in draft.jobs.values()}
    for lease_id, shares in decision.grants.items():
        lease = draft.put_lease(leases.grant(draft.leases[lease_id], shares, draft.now))
        if lease.purpose is Purpose.JOB:
            # The intent is stored before the first worker is created: after a crash its containers are known.
            draft.put_lease(leases.activate(lease, None, draft.now))
            draft.put_job(job_rules.begin(jobs[lease_id], lease, draft.now))
    return decision.waits


def follow(draft: Draft, job: JobRow) -> None:
    """A job ends with the notebook that asked and with its lease; its lease ends with it."""
    lease = draft.leases[job.lease_id]
    if job.notebook_lease is not None:
        notebook = draft.leases.get(job.notebook_lease)
        if notebook is None or notebook.state in _ENDING:
            job = job_rules.stop(job, "the notebook that asked for it ended", draft.now)
    if lease.state in _ENDING:
        job = job_rules.stop(job, lease.reason or "its lease ended", draft.now)
    if job.state is JobState.STOPPING:
        lease = draft.put_lease(leases.release(lease, job.reason or "stopped", draft.now))
    if lease.state is LeaseState.RELEASED:
        job = job_rules.end(job, draft.now)
    draft.put_job(job)


def waiting(rows: Iterable[LeaseRow]) -> list[LeaseRow]:
    """The queue, in its order."""
    return sorted((row for row in rows if row.state is LeaseState.WAITING), key=lambda row: row.seq)


def build_request(lease: LeaseRow) -> Request:
    """A lease as the engine sees it."""
    return Request(
        id=lease.id,
        owner=lease.owner,
        nodes=lease.ask.nodes,
        gpus_per_node=lease.ask.gpus_per_node,
        requirement=lease.ask.requirement,
        exclude=frozenset(lease.ask.exclude),
    )


def build_supply(rows: Iterable[LeaseRow], inventory: Inventory, max_gpus: int | None, monotonic: float) -> Supply:
    """What there is, given who holds what."""
    notebooks = {name: 0 for name, node in inventory.nodes.items() if node.takes_work()}
    held: dict[str, str] = {}
    for lease in rows:
        for gpu in lease.held:
            held[gpu.uuid] = lease.owner
        if lease.is_open:
            for node in lease.nodes:
                if node in notebooks:
                    notebooks[node] += 1
    return Supply(slots=inventory.slots(monotonic), held=held, notebooks=notebooks, max_gpus=max_gpus)
