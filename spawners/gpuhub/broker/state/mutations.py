"""Changes of leases and jobs by controllers and administrators, as functions that edit a transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gpuhub.broker.state import effects, persistent_notebooks
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker_api.schemas import JobState, LeaseState, WorkerState
from gpuhub.domain import job_states, lease_states
from gpuhub.domain.models import JobRow, LeaseRow
from gpuhub.domain.reconcile import ObservedNode, explain_missing_proof

Edit = Callable[[Transaction], None]


def end_leases(reasons: Mapping[str, str], *, lost: Collection[str] = ()) -> Edit:
    """Release leases, each for its reason; ended leases do not change.

    A persistent notebook among the `lost` ones requests its GPUs again.
    """

    def edit(transaction: Transaction) -> None:
        for lease_id, reason in reasons.items():
            lease = transaction.leases.get(lease_id)
            if lease is None:
                continue
            is_lost = lease_id in lost and lease.is_persistent and lease.state is LeaseState.ACTIVE
            transaction.put_lease(lease_states.release(lease, reason, transaction.now))
            if is_lost:
                persistent_notebooks.request_again(transaction, lease)

    return edit


def change_jobs(changes: Sequence[tuple[str, Callable[[JobRow, float], JobRow]]]) -> Edit:
    """Change jobs; ended jobs do not change."""

    def edit(transaction: Transaction) -> None:
        for job_id, change in changes:
            if job_id in transaction.jobs and transaction.jobs[job_id].is_open:
                transaction.put_job(change(transaction.jobs[job_id], transaction.now))

    return edit


def wake(job_id: str) -> Edit:
    """Let a job that is asleep wait for GPUs from this moment on; nothing happens to any other."""

    def edit(transaction: Transaction) -> None:
        job = transaction.jobs.get(job_id)
        if job is not None and job_states.is_asleep(job, lease := transaction.leases[job.lease_id]):
            transaction.put_lease(lease.evolve(is_held=False, created_at=transaction.now))

    return edit


def prove_released(lease_ids: Sequence[str], node: str) -> Edit:
    """Prove that a node is clear of these leases, or of what they release there; other leases do not change."""

    def edit(transaction: Transaction) -> None:
        for lease_id in lease_ids:
            lease = transaction.leases.get(lease_id)
            if lease is not None and node in lease_states.list_unproven_nodes(lease):
                transaction.put_lease(lease_states.prove_released(lease, node, transaction.now))

    return edit


def end_stopped_work(observed_node: ObservedNode) -> Edit:
    """End the notebooks and workers of a node without containers; those for which that proves nothing do not change."""
    reason = f"`gpuhub down` has ended it on {observed_node.node}"

    def edit(transaction: Transaction) -> None:
        for lease in _list_provable(transaction, observed_node):
            job_id = transaction.index.find_one("job of lease", lease.id)
            if job_id is None:
                transaction.put_lease(lease_states.release(lease, reason, transaction.now))
                continue
            for worker in transaction.jobs[job_id].workers:
                if worker.node == observed_node.node and worker.state is WorkerState.RUNNING:
                    job = transaction.jobs[job_id]
                    transaction.put_job(job_states.record_worker_exit(job, worker.index, None, reason, transaction.now))

    return edit


def prove_stopped(observed_node: ObservedNode) -> Edit:
    """Prove that a node without containers is clear of the leases that end, or of what they release there."""

    def edit(transaction: Transaction) -> None:
        proven = [lease.id for lease in _list_provable(transaction, observed_node)]
        prove_released(proven, observed_node.node)(transaction)

    return edit


def _list_provable(transaction: Transaction, observed_node: ObservedNode) -> list[LeaseRow]:
    """Return the open leases of a node for which a missing container proves something."""
    leases = (transaction.leases[lease_id] for lease_id in transaction.index.find("node", observed_node.node))
    return [lease for lease in leases if lease.is_open and explain_missing_proof(lease, observed_node) is None]


def set_slurm_jobs(jobs: Mapping[str, int]) -> Edit:
    """Set the Slurm jobs of leases; a lease that has one, or has ended, does not change."""

    def edit(transaction: Transaction) -> None:
        for lease_id, job in jobs.items():
            lease = transaction.leases.get(lease_id)
            if lease is not None and lease.is_open and lease.slurm_job is None:
                transaction.put_lease(lease.evolve(slurm_job=job))

    return edit


def change_leases(changes: Sequence[tuple[str, Callable[[LeaseRow], LeaseRow]]]) -> Edit:
    """Change leases; ended leases do not change."""

    def edit(transaction: Transaction) -> None:
        for lease_id, change in changes:
            if lease_id in transaction.leases and transaction.leases[lease_id].is_open:
                transaction.put_lease(change(transaction.leases[lease_id]))

    return edit


def shrink(lease_id: str, nodes: Collection[str]) -> Edit:
    """Remove some nodes from a live lease and from its job."""

    def edit(transaction: Transaction) -> None:
        lease, job_id = transaction.leases.get(lease_id), transaction.index.find_one("job of lease", lease_id)
        if lease is None or lease.state not in lease_states.LIVE or job_id is None:
            return
        transaction.put_lease(lease_states.shrink(lease, nodes, transaction.now))
        transaction.put_job(job_states.shrink(transaction.jobs[job_id], nodes, transaction.now))

    return edit


def quarantine(reasons: Mapping[str, str]) -> Edit:
    """Quarantine ending leases, each with the missing proof; other leases do not change."""

    def edit(transaction: Transaction) -> None:
        for lease_id, why in reasons.items():
            lease = transaction.leases.get(lease_id)
            if lease is not None and lease.state in lease_states.ENDING:
                transaction.put_lease(lease_states.quarantine(lease, why, transaction.now))

    return edit


def force_release(lease_id: str, by: str) -> Edit:
    """Free the GPUs of an ending lease without proof, on an administrator's responsibility."""

    def edit(transaction: Transaction) -> None:
        lease = transaction.leases.get(lease_id)
        if lease is None:
            return
        transaction.put_lease(lease_states.force_release(lease, by, transaction.now))
        text = f"{by} freed the GPUs of {lease.owner}'s lease without proof that its containers are gone"
        transaction.add_event("lease.forced", text, owner=lease.owner, lease=lease.id)

    return edit


def preempt_jobs(node: str, grace_s: float) -> Edit:
    """Preempt the detached jobs on a node: SIGTERM, the grace for a checkpoint, and then they wait again."""

    def edit(transaction: Transaction) -> None:
        for lease_id in sorted(transaction.index.find("node", node)):
            job_id = transaction.index.find_one("job of lease", lease_id)
            if job_id is not None and transaction.jobs[job_id].detached:
                job = transaction.jobs[job_id]
                transaction.put_job(job_states.preempt(job, transaction.now + grace_s, transaction.now))

    return edit


def requeue_unstarted(lease_id: str, reason: str, *, may_run: bool) -> Edit:
    """Let a starting job wait again with its age, because a node does not answer; its lease ends, and needs proof.

    Args:
        may_run: A container of it may run. Then a detached job waits again only when nothing of it is left, and any
            other, whose user waits for it, ends.
    """

    def edit(transaction: Transaction) -> None:
        job_id, now = transaction.index.find_one("job of lease", lease_id), transaction.now
        if job_id is None or (job := transaction.jobs[job_id]).state is not JobState.STARTING:
            return
        if may_run:
            transaction.put_job(
                job_states.preempt(job, now, now, reason=reason) if job.detached else job_states.stop(job, reason, now)
            )
            return
        lease = transaction.put_lease(lease_states.release(transaction.leases[lease_id], reason, now))
        new_lease = effects.request_again(transaction, lease, created_at=lease.created_at)
        transaction.put_job(job_states.requeue_unstarted(job, new_lease, reason, now))

    return edit


def note_lost_devices(node: str) -> Edit:
    """Note for the owners of GPUs on a node that their containers have lost access to them, and the remedy."""

    def edit(transaction: Transaction) -> None:
        note = f"its container on {node} has lost its GPU, as when systemd is reloaded there: restart your server"
        for lease in list(transaction.leases.values()):
            if lease.state in lease_states.LIVE and any(gpu.node == node for gpu in lease.held):
                transaction.put_lease(lease_states.set_note(lease, note))
                transaction.add_event("gpu.lost", note, owner=lease.owner, lease=lease.id)

    return edit


def report_gpu_problems(node: str, problems: Mapping[str, str]) -> Edit:
    """Report problems of GPUs on a node, by UUID, to the owners of the live leases on them."""

    def edit(transaction: Transaction) -> None:
        for lease in list(transaction.leases.values()):
            if lease.state not in lease_states.LIVE:
                continue
            for gpu in lease.held:
                if gpu.node == node and gpu.uuid in problems:
                    text = f"GPU {gpu.index} ({gpu.model}) of {node}: {problems[gpu.uuid]}"
                    transaction.add_event("gpu.problem", text, owner=lease.owner, lease=lease.id)

    return edit


def release_removed_nodes(known: Collection[str]) -> Edit:
    """Release the leases on nodes that are no longer in the settings."""

    def edit(transaction: Transaction) -> None:
        for lease_id, lease in list(transaction.leases.items()):
            for node in sorted(set(lease.nodes) - set(known)):
                _release_removed_node(transaction, lease_id, node)

    return edit


def _release_removed_node(transaction: Transaction, lease_id: str, node: str) -> None:
    reason = f"node {node} is no longer in cluster.toml"
    job_id = transaction.index.find_one("job of lease", lease_id)
    if job_id is not None:
        transaction.put_job(job_states.fail(transaction.jobs[job_id], reason, transaction.now))
    lease = transaction.put_lease(lease_states.release(transaction.leases[lease_id], reason, transaction.now))
    if node in lease_states.list_unproven_nodes(lease):
        transaction.put_lease(lease_states.prove_released(lease, node, transaction.now))


def apply_clock_jump(transaction: Transaction, seconds: float) -> None:
    """Move all times of open leases and jobs by a jump of the clock, so that they keep the time they had left."""
    _shift_all(transaction, seconds)
    transaction.add_event(
        "clock.jumped", f"the head node's clock was set by {seconds:+.0f} s: leases keep the time they had left"
    )
    # Later edits of the same transaction are not moved, so they must get times of the new clock: a release in the
    # future could not be proven before the clock catches up.
    transaction.now += seconds


def clamp_future_timestamps(transaction: Transaction) -> None:
    """Move the times of everything open back if something began in the future.

    The machine's clock was then set back while no broker ran; ending leases could not be proven free before the clock
    catches up.
    """
    rows: list[LeaseRow | JobRow] = [*transaction.leases.values(), *transaction.jobs.values()]
    ahead = max((row.since for row in rows), default=transaction.now) - transaction.now
    if ahead > 0:
        _shift_all(transaction, -ahead)
        transaction.add_event(
            "clock.jumped", f"the head node's clock was set back by {ahead:.0f} s or more while no broker ran"
        )


def _shift_all(transaction: Transaction, seconds: float) -> None:
    for lease in list(transaction.leases.values()):
        transaction.put_lease(lease_states.shift_times(lease, seconds))
    for job in list(transaction.jobs.values()):
        transaction.put_job(job_states.shift_times(job, seconds))
