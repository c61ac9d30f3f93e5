"""The scheduler that follows Slurm: it grants what Slurm has allocated, and shows Slurm's queue.

Each request has a Slurm job, and is granted what that job has as soon as it runs. Which job goes first, what may be
held and for how long is decided by Slurm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpuhub.backends.external_scheduler import ExternalScheduler
from gpuhub.common import names
from gpuhub.common.units import format_size
from gpuhub.config.slurm import SlurmSettings
from gpuhub.scheduler.interface import (
    GpuSlot,
    NodeAllocation,
    NodeCapacity,
    SchedulingParameters,
    SchedulingRequest,
)
from gpuhub.slurm_client import messages
from gpuhub.slurm_client.gpu_selection import GpuSelection, count_cpus, is_available_now, select_gpus
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState, SlurmNode, SlurmSnapshot

#: Slurm counts a job without a limit as one of a year: a start that is predicted so late is not known, seconds.
_FAR_S = 30 * 86400.0
_MIB = 1024**2


class SlurmScheduler(ExternalScheduler):
    """A `Scheduler` that grants what Slurm has allocated; `observe` sets Slurm's state."""

    title = "Slurm"

    def __init__(
        self,
        rules: SchedulingParameters | None = None,
        *,
        instance: str,
        node_names: Mapping[str, str],
        table: SlurmSettings | None = None,
    ) -> None:
        """Begin without any job.

        Args:
            rules: How usage is counted.
            instance: The prefix of the names of gpuhub's jobs.
            node_names: gpuhub's names of nodes by Slurm's.
            table: Where the types of GPUs are.
        """
        super().__init__(rules)
        self._instance = instance
        self._node_names = dict(node_names)
        self._table = table or SlurmSettings()
        self._snapshot = SlurmSnapshot(jobs=(), nodes=())
        self._jobs: dict[int, SlurmJob] = {}
        self._nodes: dict[str, SlurmNode] = {}
        #: Numbers of pending jobs, in Slurm's order.
        self._queue: list[int] = []
        #: Request id → start time of the Slurm job at the time of the grant; filled only for grants since this broker
        #: started.
        self._started_at: dict[str, float | None] = {}

    def observe(self, snapshot: SlurmSnapshot) -> None:
        """Store all jobs and nodes of one moment; Slurm answers."""
        self._snapshot = snapshot
        self._jobs = {job.id: job for job in snapshot.jobs}
        self._nodes = {node.name: node for node in snapshot.nodes}
        pending = [job for job in snapshot.jobs if job.state is SlurmJobState.PENDING]
        self._queue = [job.id for job in sorted(pending, key=lambda job: (-job.priority, job.id))]
        self.note_answer()

    def remove(self, request_id: str, now: float) -> None:
        super().remove(request_id, now)
        self._started_at.pop(request_id, None)

    # -- requests -------------------------------------------------------------------------------------------------

    def find_allocation(self, request: SchedulingRequest) -> tuple[NodeAllocation, ...] | None:
        job = self.find_job(request.slurm_job)
        if job is None or job.state is not SlurmJobState.RUNNING or self._explain_running(request, job):
            return None
        return self._find_nodes(request, job)

    def note_grant(self, request: SchedulingRequest) -> None:
        job = self.find_job(request.slurm_job)
        self._started_at[request.id] = None if job is None else job.started_at

    def order_requests(self, now: float) -> list[str]:
        """Return the waiting requests in Slurm's order; other users' jobs are in it as `slurm-` and a number."""
        by_job = {request.slurm_job: request.id for request in self._state.requests.values()}
        started = sorted(request for job, request in by_job.items() if self._is_running(job))
        ranked = started + [by_job.get(job, f"slurm-{job}") for job in self._queue]
        known = set(ranked)
        return ranked + [request.id for request in self.list_waiting() if request.id not in known]

    def explain(self, request: SchedulingRequest) -> str:
        job = self.find_job(request.slurm_job)
        if job is None:
            return self._explain_unsubmitted(request)
        return self._explain_running(request, job) or messages.explain_pending(job)

    def predict_start(self, request: SchedulingRequest, now: float) -> float | None:
        job = self.find_job(request.slurm_job)
        start = None if job is None or job.state is not SlurmJobState.PENDING else job.expected_start
        return start if start is not None and start - now < _FAR_S else None

    def can_start_now(self, request: SchedulingRequest, now: float) -> bool:
        choice = self.choose(request)
        return choice is not None and is_available_now(request, choice, self._snapshot.nodes)

    # -- Slurm's jobs and nodes -----------------------------------------------------------------------------------

    def find_job(self, job_id: int | None) -> SlurmJob | None:
        """Return a job as the last poll showed it."""
        return None if job_id is None else self._jobs.get(job_id)

    def choose(self, request: SchedulingRequest) -> GpuSelection | None:
        """Return the GPUs on which a request may run; None where that is not known yet."""
        return select_gpus(request, self._capacities(), self._snapshot.nodes, self._table)

    def find_start(self, request_id: str) -> float | None:
        """Return when the job had started by which a request was granted, seconds since 1970.

        None where it was granted in another run of the broker.
        """
        return self._started_at.get(request_id)

    def explain_misfit(self, request: SchedulingRequest, job: SlurmJob) -> str | None:
        """Return why a running job's allocation can never serve its request; None where it can, or may."""
        unknown = [name for name in job.nodes if name not in self._node_names]
        if unknown:
            return f"Slurm allocated it {', '.join(unknown)}, which cluster.toml does not name"
        if not _has_shape(request, job):
            return "Slurm allocated it another number of nodes or GPUs than it requested"
        lack = next(_list_lacks(request, job), None)
        if lack is not None:
            return lack
        slots = [slot for node in self._find_nodes(request, job) or () for slot in node.slots]
        unwanted = [slot for slot in slots if not request.requirement.accepts(slot.card)]
        if unwanted:
            return f"Slurm allocated it {unwanted[0].card.model} on {unwanted[0].node}, which does not meet its request"
        return None

    def find_external_jobs(self) -> Mapping[str, SlurmJob]:
        """Return by UUID the GPUs of other jobs than gpuhub's, and those that a lease released but its job has."""
        waiting = {request.slurm_job for request in self._state.requests.values()}
        held = {
            allocation.request.slurm_job: {slot.uuid for node in allocation.node_allocations for slot in node.slots}
            for allocation in self._state.capacity.allocations.values()
        }
        return {
            slot.uuid: job
            for job in self._snapshot.jobs
            if job.gpus and job.id not in waiting and (job.id in held or not self._is_lease_job(job))
            for node in job.nodes
            for slot in self._find_slots(node, job) or ()
            if slot.uuid not in held.get(job.id, ())
        }

    def list_external_pending(self) -> list[SlurmJob]:
        """Return the pending jobs that belong to no waiting request, in Slurm's order."""
        ours = {request.slurm_job for request in self._state.requests.values()}
        return [self._jobs[job] for job in self._queue if job not in ours]

    def find_unavailable(self) -> Mapping[str, str]:
        """Return gpuhub's nodes to which Slurm gives no work, with Slurm's reason."""
        return {
            self._node_names[node.name]: f"{node.state}: {node.reason}" if node.reason else node.state
            for node in self._snapshot.nodes
            if node.name in self._node_names and not node.takes_work
        }

    def _is_lease_job(self, job: SlurmJob) -> bool:
        """Return whether a job has a lease's name; jobs that others name so are cancelled, see `find_unwanted`."""
        return names.find_slurm_lease(self._instance, job.name) is not None

    # -- inside ---------------------------------------------------------------------------------------------------

    def _capacities(self) -> dict[str, NodeCapacity]:
        nodes = self._state.capacity.nodes
        return {theirs: nodes[ours].capacity for theirs, ours in self._node_names.items() if ours in nodes}

    def _is_running(self, job_id: int | None) -> bool:
        job = self.find_job(job_id)
        return job is not None and job.state is SlurmJobState.RUNNING

    def _explain_unsubmitted(self, request: SchedulingRequest) -> str:
        if self._snapshot.nodes and self.choose(request) is None:
            return "no node that both Slurm and gpuhub know meets the request yet"
        return "it is being submitted"

    def _explain_running(self, request: SchedulingRequest, job: SlurmJob) -> str | None:
        """Return why a request whose job runs is not granted; None where it is, or its job does not run."""
        if job.state is not SlurmJobState.RUNNING:
            return None
        return self.explain_misfit(request, job) or next(self._list_pending_reasons(job), None)

    def _list_pending_reasons(self, job: SlurmJob) -> Iterator[str]:
        for theirs in job.nodes:
            name = self._node_names[theirs]
            node = self._state.capacity.nodes.get(name)
            if node is None or not node.capacity.takes_work:
                problem = "gpuhub has not read its GPUs yet" if node is None else node.capacity.unavailable_reason
                yield f"it was allocated {name}, where no container can be started now: {problem}"
                continue
            slots = self._find_slots(theirs, job)
            if slots is None:
                yield f"it was allocated GPUs on {name} that the node's GPU agent has not reported yet"
                continue
            held = self.find_held(name)
            for slot in slots:
                if slot.uuid in held:
                    gpu = f"GPU {slot.index} of {slot.node}"
                    yield f"it was allocated {gpu}; what ran there before is still being removed"

    def _find_slots(self, theirs: str, job: SlurmJob) -> tuple[GpuSlot, ...] | None:
        """GPUs of a job on a node; None where they are not (yet) known."""
        node = self._state.capacity.nodes.get(self._node_names.get(theirs, ""))
        if node is None or theirs not in self._nodes:
            return None
        slots = number_slots(node.capacity.slots, self._nodes[theirs], self._table)
        numbers = job.gpus.get(theirs, ())
        return tuple(slots[number] for number in numbers) if all(number in slots for number in numbers) else None

    def _find_nodes(self, request: SchedulingRequest, job: SlurmJob) -> tuple[NodeAllocation, ...] | None:
        """A running job's allocation in its order of nodes; None where some of it is not (yet) known."""
        slots_of = [(self._node_names[theirs], self._find_slots(theirs, job)) for theirs in job.nodes]
        nodes = [NodeAllocation(node=name, slots=slots) for name, slots in slots_of if slots is not None]
        if len(nodes) < len(slots_of):
            return None
        if request.exclusive:
            nodes = _select_requested(request, nodes)
        # A job with GPUs anywhere may have been given a node for its processes alone.
        return tuple(node for node in nodes if node.slots or not request.size)


def number_slots(slots: Sequence[GpuSlot], node: SlurmNode, table: SlurmSettings) -> dict[int, GpuSlot]:
    """Return a node's GPUs by Slurm's numbers.

    Slurm counts type by type, in the order in which its node names them, and within a type as gres.conf does. GPUs of
    types that Slurm does not have there are left out; without types all count.
    """
    by_index = sorted(slots, key=lambda slot: slot.index)
    ordered: list[GpuSlot | None] = []
    for kind, count in node.gpus.items():
        of_kind = [slot for slot in by_index if not kind or table.gpu_type(slot.card.model) == kind]
        # Slurm has more of them than the node reports, or fewer: then none of them can be identified.
        ordered += of_kind if len(of_kind) == count else [None] * count
    return {number: slot for number, slot in enumerate(ordered) if slot is not None}


def _select_requested(request: SchedulingRequest, nodes: Sequence[NodeAllocation]) -> list[NodeAllocation]:
    """Return as many suitable GPUs as requested: an exclusive job has all GPUs of its nodes."""
    models = [Counter(slot.card.model for slot in node.slots) for node in nodes]

    def rank(slot: GpuSlot) -> tuple[bool, int]:
        common = min(counts[slot.card.model] for counts in models) if request.same_model else 0
        return not request.requirement.accepts(slot.card), -common

    selected: list[NodeAllocation] = []
    for node in nodes:
        count = request.gpus_per_node
        if request.spread is not None:
            count = request.spread - sum(len(before.slots) for before in selected)
        selected.append(replace(node, slots=tuple(sorted(node.slots, key=rank)[:count])))
    return selected


def _has_shape(request: SchedulingRequest, job: SlurmJob) -> bool:
    counts: Sequence[int] = [len(job.gpus.get(node, ())) for node in job.nodes]
    # An exclusive job has all GPUs of its nodes, whatever it requested.
    if request.spread is not None:
        return sum(counts) == request.spread or (request.exclusive and sum(counts) > request.spread)
    is_each = all(
        count == request.gpus_per_node or (request.exclusive and count > request.gpus_per_node) for count in counts
    )
    return is_each and request.least_nodes <= len(counts) <= request.nodes


def _list_lacks(request: SchedulingRequest, job: SlurmJob) -> Iterator[str]:
    """Yield what a running job was allocated less of than its containers may use."""
    cpus, memory_mib = count_cpus(request) * len(job.nodes), request.memory_mib * len(job.nodes)
    if job.cpus is not None and job.cpus < cpus:
        yield f"Slurm allocated it fewer CPUs than it requested: {job.cpus} of {cpus}"
    if job.memory_mib is not None and job.memory_mib < memory_mib:
        sizes = " of ".join(format_size(mib * _MIB) for mib in (job.memory_mib, memory_mib))
        yield f"Slurm allocated it less memory than it requested: {sizes}"
