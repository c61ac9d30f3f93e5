"""What follows from a change: jobs follow their leases and notebooks, and the engine's decisions become rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuhub.broker import job_rules, leases
from gpuhub.broker.drafts import Draft
from gpuhub.broker.job_rules import PREEMPTED
from gpuhub.broker.rows import Ask, JobRow, LeasedGpu, LeaseRow, new_id
from gpuhub.broker.schemas import JobState, LeaseState, Purpose
from gpuhub.engines.base import Decision, Grant, Holding, Preemption, Request, Share, Slot
from gpuhub.gpus import Card

_OVER = leases.ENDING | {LeaseState.RELEASED}

#: A node's Docker daemon and the start of its machine; see `LeaseRow.identities`.
IdentityOf = Callable[[str], tuple[str | None, str | None]]


# -- rows as the engine sees them -------------------------------------------------------------------------------------


def build_request(lease: LeaseRow) -> Request:
    """A waiting lease."""
    ask = lease.ask
    return Request(
        id=lease.id,
        owner=lease.owner,
        groups=frozenset(lease.groups),
        created_at=lease.created_at,
        seq=lease.seq,
        nodes=ask.nodes,
        least_nodes=ask.least_nodes,
        gpus_per_node=ask.gpus_per_node,
        spread=ask.spread,
        requirement=ask.requirement,
        share=ask.share,
        exclude=frozenset(ask.exclude),
        exclusive=ask.exclusive,
        same_model=ask.same_model,
        batch=ask.batch,
        scavenge=ask.scavenge,
        priority=ask.priority,
        time_limit_s=lease.time_limit_s,
        cpu_milli=ask.cpu_milli,
        memory_mib=ask.memory_mib,
        slurm_job=lease.slurm_job,
    )


def build_holding(lease: LeaseRow, job: JobRow | None) -> Holding:
    """A lease that holds something, and the job that it is for."""
    ends_soon = job is not None and job.state in {JobState.PREEMPTING, JobState.STOPPING}
    return Holding(
        request=build_request(lease),
        shares=_shares(lease),
        granted_at=lease.granted_at if lease.granted_at is not None else lease.created_at,
        ends_at=lease.expires_at,
        is_ending=lease.state in leases.ENDING or ends_soon,
        is_quarantined=lease.state is LeaseState.QUARANTINED,
        giving_up=frozenset(gpu.node for gpu in lease.held if gpu.shed_at is not None),
        leader=lease.nodes[0] if job is not None and job.detached else None,
    )


def _shares(lease: LeaseRow) -> tuple[Share, ...]:
    if not lease.gpus:
        return tuple(Share(node=node, slots=()) for node in lease.nodes)
    by_node: dict[str, list[Slot]] = {}
    for gpu in lease.held:
        by_node.setdefault(gpu.node, []).append(_slot(gpu))
    return tuple(Share(node=node, slots=tuple(slots)) for node, slots in by_node.items())


def _slot(gpu: LeasedGpu) -> Slot:
    card = Card(model=gpu.model, memory_mib=gpu.memory_mib)
    return Slot(uuid=gpu.uuid, node=gpu.node, index=gpu.index, card=card)


# -- what follows -----------------------------------------------------------------------------------------------------


def follow(draft: Draft, step: int) -> int:
    """Let jobs follow what changed since that step, until nothing more changes; returns the number of the next step."""
    while True:
        lease_ids, job_ids, step = draft.touched(step)
        if not lease_ids and not job_ids:
            return step
        todo = dict.fromkeys(job_ids)
        for lease_id in lease_ids:
            for tag in ("job of lease", "jobs of notebook"):
                todo.update(dict.fromkeys(sorted(draft.index.find(tag, lease_id))))
        for job in [draft.jobs[job_id] for job_id in job_ids]:
            todo.update(dict.fromkeys(sorted(draft.index.find("joining", job.owner, job.run_id))))
        for job_id in todo:
            if draft.jobs[job_id].is_open:
                follow_job(draft, draft.jobs[job_id])


def follow_job(draft: Draft, job: JobRow) -> None:
    """A job ends with the notebook that asked, with the job that it joined, and with its lease; its lease ends with it.

    A preempted one is asked for again as soon as nothing of it is left.
    """
    lease = draft.leases[job.lease_id]
    if job.notebook_lease is not None:
        notebook = draft.leases.get(job.notebook_lease)
        if notebook is None or notebook.state in _OVER:
            job = job_rules.stop(job, "the notebook that asked for it ended", draft.now)
    if job.joins is not None and job_rules.is_over(find_run(draft, job.owner, job.joins)):
        job = job_rules.stop(job, f"the run that it joined ended: {job.joins}", draft.now)
    if lease.state in _OVER and not (job.state is JobState.PREEMPTING and lease.reason == PREEMPTED):
        job = job_rules.stop(job, lease.reason or "its lease ended", draft.now)
    if lease.state in leases.LIVE and (lost := job_rules.given_up(job)):
        lease = draft.put_lease(leases.shed(lease, lost, draft.now))
    if job.state is JobState.PREEMPTING and job_rules.is_checkpointed(job, draft.now):
        lease = draft.put_lease(leases.release(lease, PREEMPTED, draft.now))
    if job.state is JobState.STOPPING:
        lease = draft.put_lease(leases.release(lease, job.reason or "stopped", draft.now))
    if lease.state is LeaseState.RELEASED:
        job = _ask_again(draft, job, lease) if job.state is JobState.PREEMPTING else job_rules.end(job, draft.now)
    draft.put_job(job)


def _ask_again(draft: Draft, job: JobRow, old: LeaseRow) -> JobRow:
    """The same request as before, as old as before: what it waited already counts."""
    lease_id = new_id("l")
    draft.put_lease(
        LeaseRow(
            id=lease_id,
            seq=draft.next_seq(),
            key=job_key(lease_id),
            owner=old.owner,
            groups=old.groups,
            purpose=old.purpose,
            subject=old.subject,
            profile=old.profile,
            ask=old.ask,
            created_at=old.created_at,
            since=draft.now,
            time_limit_s=old.time_limit_s,
        )
    )
    return job_rules.requeue(job, lease_id, draft.now)


def find_run(draft: Draft, owner: str, run_id: str) -> JobRow | None:
    """The job of an owner's run, unless it has ended."""
    job_id = draft.index.one("run", owner, run_id)
    return None if job_id is None else draft.jobs[job_id]


def job_key(lease_id: str) -> str:
    """The idempotency key of a job's lease: jobs have their run ids, and nobody can guess this one beforehand."""
    return f"job:{lease_id}"


# -- decisions --------------------------------------------------------------------------------------------------------


def apply(draft: Draft, decision: Decision, *, identity_of: IdentityOf, grace_s: float) -> None:
    """Make rows of what the engine decided. `grace_s` is the time for a checkpoint, seconds."""
    for lease_id, grant in decision.grants.items():
        _grant(draft, draft.leases[lease_id], grant, identity_of)
    for preemption in decision.preemptions:
        _preempt(draft, preemption, grace_s)


def _grant(draft: Draft, lease: LeaseRow, grant: Grant, identity_of: IdentityOf) -> None:
    lease = draft.put_lease(
        leases.grant(
            lease,
            grant.shares,
            draft.now,
            note=grant.note,
            parts=_choose_parts(draft, lease.ask, grant.shares),
            identities={share.node: identity_of(share.node) for share in grant.shares},
        )
    )
    job_id = draft.index.one("job of lease", lease.id)
    if lease.purpose is Purpose.JOB and job_id is not None:
        # The intent is stored before the first worker is created: after a crash its containers are known.
        lease = draft.put_lease(leases.activate(lease, None, draft.now))
        draft.put_job(job_rules.begin(draft.jobs[job_id], lease, draft.now))


def _choose_parts(draft: Draft, ask: Ask, shares: Sequence[Share]) -> dict[str, int]:
    if ask.share == 1:
        return {}
    return {slot.uuid: draft.index.free_part(slot.uuid) for share in shares for slot in share.slots}


def _preempt(draft: Draft, preemption: Preemption, grace_s: float) -> None:
    job_id = draft.index.one("job of lease", preemption.holding)
    if job_id is None:
        return
    job, lease = draft.jobs[job_id], draft.leases[preemption.holding]
    if job.state not in job_rules.UNDER_WAY or lease.state not in leases.LIVE:
        return
    if preemption.is_whole:
        draft.put_job(job_rules.preempt(job, draft.now + grace_s, draft.now))
        return
    draft.put_lease(leases.shed(lease, preemption.nodes, draft.now))
    draft.put_job(job_rules.shrink(job, preemption.nodes, draft.now))
