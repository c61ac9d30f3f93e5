"""Changes that the keeper's loops and administrators make, as functions of a draft. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gpuhub.broker import job_rules, leases
from gpuhub.broker.drafts import Draft
from gpuhub.broker.rows import JobRow, LeaseRow

Edit = Callable[[Draft], None]


def end(reasons: Mapping[str, str]) -> Edit:
    """Let leases end, each for its reason; those that have ended are left alone."""

    def edit(draft: Draft) -> None:
        for lease_id, reason in reasons.items():
            if lease_id in draft.leases:
                draft.put_lease(leases.release(draft.leases[lease_id], reason, draft.now))

    return edit


def change_jobs(changes: Sequence[tuple[str, Callable[[JobRow, float], JobRow]]]) -> Edit:
    """Change jobs; those that have ended are left alone."""

    def edit(draft: Draft) -> None:
        for job_id, change in changes:
            if job_id in draft.jobs and draft.jobs[job_id].is_open:
                draft.put_job(change(draft.jobs[job_id], draft.now))

    return edit


def prove_gone(lease_ids: Sequence[str], node: str) -> Edit:
    """A node is clear of these leases, or of what they are to give back there; others are left alone."""

    def edit(draft: Draft) -> None:
        for lease_id in lease_ids:
            lease = draft.leases.get(lease_id)
            if lease is not None and node in leases.unproven_nodes(lease):
                draft.put_lease(leases.prove_gone(lease, node, draft.now))

    return edit


def set_slurm_jobs(jobs: Mapping[str, int]) -> Edit:
    """These Slurm jobs stand for these leases; one that has another, or has ended, is left alone."""

    def edit(draft: Draft) -> None:
        for lease_id, job in jobs.items():
            lease = draft.leases.get(lease_id)
            if lease is not None and lease.is_open and lease.slurm_job is None:
                draft.put_lease(lease.evolve(slurm_job=job))

    return edit


def change_leases(changes: Sequence[tuple[str, Callable[[LeaseRow], LeaseRow]]]) -> Edit:
    """Change leases; those that have ended are left alone."""

    def edit(draft: Draft) -> None:
        for lease_id, change in changes:
            if lease_id in draft.leases and draft.leases[lease_id].is_open:
                draft.put_lease(change(draft.leases[lease_id]))

    return edit


def give_back(lease_id: str, nodes: Collection[str]) -> Edit:
    """A lease that goes on, and the job that it is for, lose some nodes."""

    def edit(draft: Draft) -> None:
        lease, job_id = draft.leases.get(lease_id), draft.index.one("job of lease", lease_id)
        if lease is None or lease.state not in leases.LIVE or job_id is None:
            return
        draft.put_lease(leases.shed(lease, nodes, draft.now))
        draft.put_job(job_rules.shrink(draft.jobs[job_id], nodes, draft.now))

    return edit


def quarantine(reasons: Mapping[str, str]) -> Edit:
    """Releasing leases lack proof for too long, each with why; others are left alone."""

    def edit(draft: Draft) -> None:
        for lease_id, why in reasons.items():
            lease = draft.leases.get(lease_id)
            if lease is not None and lease.state in leases.ENDING:
                draft.put_lease(leases.quarantine(lease, why, draft.now))

    return edit


def force(lease_id: str, by: str) -> Edit:
    """An administrator frees the GPUs of an ending lease without proof; one that has ended is left alone."""

    def edit(draft: Draft) -> None:
        lease = draft.leases.get(lease_id)
        if lease is None:
            return
        draft.put_lease(leases.force(lease, by, draft.now))
        text = f"{by} freed the GPUs of {lease.owner}'s lease without proof that its containers are gone"
        draft.note("lease.forced", text, owner=lease.owner, lease=lease.id)

    return edit


def warn_of_lost_devices(node: str) -> Edit:
    """Containers on a node cannot open their GPUs any more: who has a lease there with a GPU is told what to do."""

    def edit(draft: Draft) -> None:
        told = f"its container on {node} has lost its GPU, as when systemd is reloaded there: restart your server"
        for lease in list(draft.leases.values()):
            if lease.state in leases.LIVE and any(gpu.node == node for gpu in lease.held):
                draft.put_lease(leases.warn(lease, told))
                draft.note("gpu.lost", told, owner=lease.owner, lease=lease.id)

    return edit


def give_up_nodes(known: Collection[str]) -> Edit:
    """Nodes that are in the settings no more give their leases back."""

    def edit(draft: Draft) -> None:
        for lease_id, lease in list(draft.leases.items()):
            for node in sorted(set(lease.nodes) - set(known)):
                _give_up_node(draft, lease_id, node)

    return edit


def _give_up_node(draft: Draft, lease_id: str, node: str) -> None:
    reason = f"node {node} is no longer in cluster.toml"
    lease = draft.put_lease(leases.release(draft.leases[lease_id], reason, draft.now))
    if node in leases.unproven_nodes(lease):
        draft.put_lease(leases.prove_gone(lease, node, draft.now))


def follow_clock(draft: Draft, seconds: float) -> None:
    """The machine's clock was set by so much: everything that is open keeps the time it had left."""
    _shift(draft, seconds)
    draft.note("clock.jumped", f"the head node's clock was set by {seconds:+.0f} s: leases keep the time they had left")


def leave_the_future(draft: Draft) -> None:
    """The machine's clock was set back while no broker ran, if something began later than now: then everything that is
    open is moved back, at least by as much. Else what is ending could not be proven gone before the clock caught up.
    """
    rows: list[LeaseRow | JobRow] = [*draft.leases.values(), *draft.jobs.values()]
    ahead = max((row.since for row in rows), default=draft.now) - draft.now
    if ahead > 0:
        _shift(draft, -ahead)
        draft.note("clock.jumped", f"the head node's clock was set back by {ahead:.0f} s or more while no broker ran")


def _shift(draft: Draft, seconds: float) -> None:
    for lease in list(draft.leases.values()):
        draft.put_lease(leases.shift(lease, seconds))
    for job in list(draft.jobs.values()):
        draft.put_job(job_rules.shift(job, seconds))
