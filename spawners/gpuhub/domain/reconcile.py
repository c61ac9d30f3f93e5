"""Reconciliation: compares leases with the containers that one node's daemon reports, and returns actions.

Only reports of the node's own daemon count: a node that cannot be read is not reconciled, so its leases stay. A missing
container proves something only if the daemon is the one under which the lease began, or if the machine was rebooted
since. That proof alone frees a GPU is a rule of `lease_states`; here is what counts as proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuhub.broker_api.schemas import JobState, LeaseState, Purpose, WorkerState
from gpuhub.common import names
from gpuhub.domain import lease_states, suspension
from gpuhub.domain.models import JobRow, LeaseRow
from gpuhub.nodes.status import NodeIdentity

#: A granted lease whose notebook container is not created within this time is released, seconds.
START_GRACE_S = 300.0
#: A created container that is not started within this time will not be started, seconds.
CREATED_GRACE_S = 120.0
#: Time for the hub to stop a notebook whose time limit is over, seconds.
HUB_GRACE_S = 60.0
_GONE, _ENDED = "its container is gone", "its container ended"
_LOSSES = frozenset({_GONE, _ENDED})
_LIVE_JOBS = frozenset({JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING})
#: Docker's states of a container whose program does not run and will not start.
_ENDED_CONTAINER = frozenset({"exited", "dead", "removing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedContainer:
    """One container of this instance in the daemon's list."""

    id: str
    kind: str
    lease: str
    epoch: int
    worker: int | None
    #: Docker's state: created, running, paused, restarting, removing, exited or dead.
    state: str
    #: The GPUs that it was created with; None if that is not known yet.
    devices: frozenset[str] | None = None

    @property
    def is_alive(self) -> bool:
        """True if its program runs or may still start."""
        return self.state not in _ENDED_CONTAINER


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """All containers of this instance on one node at one moment."""

    node: str
    #: The ids of the daemon that made the list and of the machine's boot.
    identity: NodeIdentity
    containers: tuple[ObservedContainer, ...]
    #: When the query began, seconds since 1970.
    observed_at: float
    #: Leases for which the broker was creating containers, or copying datasets, during the query.
    starting_leases: frozenset[str] = frozenset()
    #: Every process of the node had ended, so that no daemon has to confirm the list.
    has_stopped: bool = False


def parse_container(raw: Mapping[str, Any], devices: frozenset[str] | None = None) -> ObservedContainer:
    """Parse one entry of the daemon's list, such as `{"Id": "3f…", "State": "running", "Labels": {"gpuhub.lease": "l1",
    …}}`.
    """
    labels: Mapping[str, str] = raw.get("Labels") or {}
    return ObservedContainer(
        id=raw["Id"],
        kind=labels.get(names.LABEL_KIND, ""),
        lease=labels.get(names.LABEL_LEASE, ""),
        epoch=_parse_number(labels.get(names.LABEL_EPOCH)) or 0,
        worker=_parse_number(labels.get(names.LABEL_WORKER)),
        state=str(raw.get("State") or "").lower(),
        devices=devices,
    )


def parse_devices(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the GPUs that a container was created with, from `inspect`; `all` for a request without names."""
    requests = (raw.get("HostConfig") or {}).get("DeviceRequests") or ()
    return frozenset(device for request in requests for device in request.get("DeviceIDs") or ("all",))


def _parse_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveContainer:
    """Stop and remove a container."""

    container_id: str
    reason: str
    #: It belongs to no open lease: the node gets no work until it is gone.
    is_foreign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSigterm:
    """Send SIGTERM to a worker once, so that it writes its checkpoint and ends."""

    container_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveReleased:
    """The node proves that nothing of this lease, or nothing of what it releases there, runs any more."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkUnproven:
    """The node shows nothing of this lease, and that proves nothing."""

    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshIdentity:
    """The lease continues under the same daemon after a reboot: only a later reboot proves anything."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLease:
    """The lease must be released."""

    lease_id: str
    reason: str
    #: Its notebook's container ended or is gone, without an end of the lease before.
    is_loss: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWorkerExit:
    """A job's worker has ended; its container has the exit code, or is gone (`container_id` None)."""

    job_id: str
    index: int
    container_id: str | None


Action = (
    RemoveContainer | SendSigterm | ProveReleased | MarkUnproven | RefreshIdentity | ReleaseLease | RecordWorkerExit
)


def reconcile_node(
    observed_node: ObservedNode,
    *,
    leases: Mapping[str, LeaseRow],
    on_node: Iterable[LeaseRow],
    job_of: Mapping[str, JobRow],
    preempt_grace: float,
) -> list[Action]:
    """Return the actions for a node.

    Args:
        observed_node: The node's containers.
        leases: The open leases by id, read after the containers.
        on_node: Those of them that are for this node.
        job_of: The open jobs by lease.
        preempt_grace: Time for a checkpoint, seconds.
    """
    by_lease: dict[str, list[ObservedContainer]] = {}
    actions: list[Action] = []
    for container in observed_node.containers:
        if container.kind in names.KINDS_WITHOUT_LEASE:
            continue
        lease = leases.get(container.lease)
        foreign_reason = _explain_foreign(container, observed_node.node, lease, job_of.get(container.lease))
        if foreign_reason is not None:
            actions.append(RemoveContainer(container_id=container.id, reason=foreign_reason, is_foreign=True))
        else:
            by_lease.setdefault(container.lease, []).append(container)
    for lease in on_node:
        actions += _reconcile_lease(
            lease, job_of.get(lease.id), by_lease.get(lease.id, []), observed_node, preempt_grace
        )
    return actions


def explain_missing_proof(lease: LeaseRow, observed_node: ObservedNode) -> str | None:
    """Return why a missing container of the lease proves nothing; None if it proves that the container is gone."""
    if observed_node.has_stopped:
        return None
    return explain_identity_change(lease, observed_node.node, observed_node.identity)


def explain_identity_change(lease: LeaseRow, node: str, identity: NodeIdentity) -> str | None:
    """Return why the daemon that answers now cannot know all containers of the lease; None if it does."""
    daemon_then, boot_then = lease.identities.get(node, (None, None))
    daemon, boot = identity
    if daemon_then is None or daemon == daemon_then:
        # Leases of brokers that stored no identities were granted under the daemon that answers now.
        return None
    if daemon is not None and boot_then is not None and boot is not None and boot != boot_then:
        return None
    return f"another Docker daemon answers on {node} than when the lease began, and no restart of it is known"


def _has_rebooted(lease: LeaseRow, observed_node: ObservedNode) -> bool:
    """Return whether the machine was rebooted under the same daemon since the identity was stored."""
    daemon_then, boot_then = lease.identities.get(observed_node.node, (None, None))
    daemon, boot = observed_node.identity
    is_same = daemon is not None and daemon_then in {None, daemon}
    return is_same and boot is not None and boot != boot_then


def _reconcile_lease(
    lease: LeaseRow,
    job: JobRow | None,
    containers: Sequence[ObservedContainer],
    observed_node: ObservedNode,
    preempt_grace: float,
) -> list[Action]:
    """Return the actions for one lease and its containers on the node."""
    missing_proof = explain_missing_proof(lease, observed_node)
    actions: list[Action] = [] if missing_proof is None else [MarkUnproven(lease_id=lease.id, reason=missing_proof)]
    is_proof = missing_proof is None
    if _has_rebooted(lease, observed_node):
        actions.append(RefreshIdentity(lease_id=lease.id))
    if lease.state in lease_states.ENDING:
        return actions + _reconcile_ending(lease, containers, observed_node, is_proof=is_proof)
    if lease.purpose is Purpose.NOTEBOOK:
        is_starting = lease.id in observed_node.starting_leases
        return actions + _reconcile_notebook(
            lease, containers, observed_node.observed_at, is_proof=is_proof, is_starting=is_starting
        )
    if job is None or lease.id in observed_node.starting_leases:
        return actions
    actions += _reconcile_workers(job, observed_node.node, containers, is_proof=is_proof)
    return actions + _reconcile_shrinking(lease, containers, observed_node, preempt_grace, is_proof=is_proof)


def is_clean(actions: Sequence[Action]) -> bool:
    """Return whether no unknown container can use a GPU of the node."""
    return not any(isinstance(action, RemoveContainer) and action.is_foreign for action in actions)


def relies_on_absence(actions: Sequence[Action]) -> bool:
    """Return whether an action follows from a missing container: then the daemon's identity must be certain."""
    return any(
        isinstance(action, ProveReleased | ReleaseLease)
        or (isinstance(action, RecordWorkerExit) and action.container_id is None)
        for action in actions
    )


def _explain_foreign(container: ObservedContainer, node: str, lease: LeaseRow | None, job: JobRow | None) -> str | None:
    if lease is None:
        return f"its lease {container.lease or '(none)'} has ended or never was"
    if node not in lease.nodes:
        return f"its lease {lease.id} is for {', '.join(lease.nodes) or 'no node yet'}"
    if container.epoch != lease.epoch:
        return f"it is of epoch {container.epoch} of lease {lease.id}, which is in epoch {lease.epoch}"
    bound = suspension.list_bound_gpus(lease)
    if job is not None and container.worker not in {gpu.worker for gpu in bound if gpu.node == node}:
        return f"it is worker {container.worker} of job {job.id}, which has no such worker here"
    extra_gpus = (container.devices or frozenset()) - {gpu.uuid for gpu in lease.gpus if gpu.node == node}
    return f"it has GPU {min(extra_gpus)}, which is not in its lease {lease.id}" if extra_gpus else None


def _reconcile_ending(
    lease: LeaseRow, containers: Sequence[ObservedContainer], observed_node: ObservedNode, *, is_proof: bool
) -> list[Action]:
    if containers:
        return [
            RemoveContainer(container_id=container.id, reason=lease.reason or "released") for container in containers
        ]
    is_conclusive = (
        is_proof
        and lease.id not in observed_node.starting_leases
        and _is_in_state_since(lease, observed_node.observed_at)
    )
    return (
        [ProveReleased(lease_id=lease.id)]
        if is_conclusive and observed_node.node in lease_states.list_unproven_nodes(lease)
        else []
    )


def _reconcile_shrinking(
    lease: LeaseRow,
    containers: Sequence[ObservedContainer],
    observed_node: ObservedNode,
    preempt_grace: float,
    *,
    is_proof: bool,
) -> list[Action]:
    """Return the actions for nodes that an elastic job releases: SIGTERM, removal after the grace, then the proof."""
    shrink_times = {
        gpu.worker: gpu.shrink_requested_at
        for gpu in lease.held
        if gpu.node == observed_node.node and gpu.shrink_requested_at is not None
    }
    if not shrink_times:
        return []
    shrink_requested_at = max(shrink_times.values())
    releasing = [container for container in containers if container.worker in shrink_times]
    if not releasing:
        return (
            [ProveReleased(lease_id=lease.id)] if is_proof and shrink_requested_at < observed_node.observed_at else []
        )
    reason = f"lease {lease.id} gives its GPUs on {observed_node.node} back"
    is_over = shrink_requested_at + preempt_grace <= observed_node.observed_at
    return [
        RemoveContainer(container_id=container.id, reason=reason)
        if is_over or not container.is_alive
        else SendSigterm(container_id=container.id, reason=reason)
        for container in releasing
    ]


def _reconcile_notebook(
    lease: LeaseRow,
    containers: Sequence[ObservedContainer],
    observed_at: float,
    *,
    is_proof: bool,
    is_starting: bool,
) -> list[Action]:
    reason, is_loss = None, False
    is_late = lease.since + START_GRACE_S < observed_at and not is_starting
    if lease.state is LeaseState.GRANTED and is_late:
        reason = f"it was not started within {START_GRACE_S / 60:.0f} minutes"
    elif lease.state is LeaseState.ACTIVE and _is_in_state_since(lease, observed_at):
        reason = _explain_notebook_end(lease, containers, observed_at, is_proof=is_proof)
        is_loss = reason in _LOSSES and not lease_states.is_expired(lease, observed_at)
    return [] if reason is None else [ReleaseLease(lease_id=lease.id, reason=reason, is_loss=is_loss)]


def _explain_notebook_end(
    lease: LeaseRow, containers: Sequence[ObservedContainer], observed_at: float, *, is_proof: bool
) -> str | None:
    """Return why an active notebook's lease is over, given its containers; None if it is not."""
    if lease_states.is_expired(lease, observed_at - HUB_GRACE_S):
        return "its time limit was reached"
    if not containers:
        return _GONE if is_proof else None
    alive = {container.state for container in containers if container.is_alive}
    if not alive:
        return _ENDED
    if alive == {"created"} and lease.since + CREATED_GRACE_S < observed_at:
        return "its container was never started"
    return None


def _reconcile_workers(
    job: JobRow, node: str, containers: Sequence[ObservedContainer], *, is_proof: bool
) -> list[Action]:
    if job.state not in _LIVE_JOBS:
        return []
    by_index = {container.worker: container for container in containers}
    actions: list[Action] = []
    for worker in job.workers:
        if worker.node != node or worker.state is not WorkerState.RUNNING:
            continue
        container = by_index.get(worker.index)
        if container is None:
            if is_proof:
                actions.append(RecordWorkerExit(job_id=job.id, index=worker.index, container_id=None))
        elif not container.is_alive:
            actions.append(RecordWorkerExit(job_id=job.id, index=worker.index, container_id=container.id))
        elif job.state is JobState.PREEMPTING:
            actions.append(SendSigterm(container_id=container.id, reason=f"job {job.id} gives its GPUs to others"))
    return actions


def _is_in_state_since(lease: LeaseRow, observed_at: float) -> bool:
    """Return whether the lease was in its state before the containers were listed."""
    return lease.since < observed_at
