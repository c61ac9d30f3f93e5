"""Slurm as the engine: it decides who gets what, and gpuhub follows.

Each request has a Slurm job, and is granted what that job has as soon as it runs. Who goes first, what may be held and
for how long is Slurm's: its queue is what people are shown. What there is, is held and was used is mirrored as the
embedded engine does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuhub.engines.base import Decision, Grant, Holding, NodeSupply, Request, Rules, Share, Slot, Why
from gpuhub.engines.builtin import BuiltinEngine
from gpuhub.engines.gangs import note
from gpuhub.slurm import reasons
from gpuhub.slurm.choice import Choice, choose, is_free
from gpuhub.slurm.table import Slurm
from gpuhub.slurm.values import Job, Look, Node, Site, State

#: Jobs without a limit count as a year to Slurm: what is said to start so late has no known start, seconds.
_FAR_S = 30 * 86400.0


class SlurmEngine(BuiltinEngine):
    """An `Engine` that grants what Slurm has given; `observe` tells it what that is."""

    def __init__(
        self, rules: Rules | None = None, *, instance: str, node_names: Mapping[str, str], table: Slurm | None = None
    ) -> None:
        """`node_names` are ours by Slurm's; `table` has the types of GPUs."""
        super().__init__(rules)
        self._prefix = f"{instance}-lease-"
        self._ours = dict(node_names)
        self._table = table or Slurm()
        self._look = Look(jobs=(), nodes=())
        self._jobs: dict[int, Job] = {}
        self._nodes: dict[str, Node] = {}
        #: Numbers of jobs that wait, in Slurm's order.
        self._queue: list[int] = []
        self._silence: str | None = None
        #: When the jobs had started by which requests were granted in this run.
        self._began: dict[str, float | None] = {}
        #: What an administrator of Slurm has set up; None before it was asked.
        self.site: Site | None = None

    # -- told -----------------------------------------------------------------------------------------------------

    def observe(self, look: Look) -> None:
        """All jobs and nodes at one moment, and that Slurm answers."""
        self._look = look
        self._jobs = {job.id: job for job in look.jobs}
        self._nodes = {node.name: node for node in look.nodes}
        pending = [job for job in look.jobs if job.state is State.PENDING]
        self._queue = [job.id for job in sorted(pending, key=lambda job: (-job.priority, job.id))]
        self._silence = None

    def drop(self, request_id: str, now: float) -> None:
        """A request or a holding is over; what was held is free from now on, its time is spent until now."""
        super().drop(request_id, now)
        self._began.pop(request_id, None)

    def note_silence(self, why: str) -> None:
        """Slurm does not answer: what it said last counts, and whoever waits is told."""
        self._silence = why

    # -- asked ----------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        """Grant what runs, where all of its GPUs are known and nobody has them."""
        grants: dict[str, Grant] = {}
        requests = sorted(self._mirror.requests.values(), key=lambda one: (one.created_at, one.seq, one.id))
        for request in requests:
            job = self._job_of(request)
            if job is None or job.state is not State.RUNNING or self._why_not(request, job):
                continue
            shares = self._shares(request, job)
            if shares:
                self._began[request.id] = job.started_at
                grants[request.id] = Grant(shares=shares, note=note(shares))
                ends_at = None if request.time_limit_s is None else now + request.time_limit_s
                self.put_holding(Holding(request=request, shares=shares, granted_at=now, ends_at=ends_at))
        return Decision(grants=grants)

    def order(self, now: float) -> list[str]:
        """All waiting requests in Slurm's order. Others' jobs have places there too, as `slurm-` and a number."""
        by_job = {request.slurm_job: request.id for request in self._mirror.requests.values()}
        started = sorted(one for job, one in by_job.items() if self._is_running(job))
        ranked = started + [by_job.get(job, f"slurm-{job}") for job in self._queue]
        known = set(ranked)
        new = [request for request in self._mirror.requests.values() if request.id not in known]
        return ranked + [one.id for one in sorted(new, key=lambda one: (one.created_at, one.seq, one.id))]

    def why(self, request_id: str, now: float, *, in_full: bool = False) -> Why:
        """Why a request waits; KeyError when it does not wait. Slurm does not tell what would be without a demand."""
        request = self._mirror.requests[request_id]
        job = self._job_of(request)
        text = self._why_no_job(request) if job is None else self._why_not(request, job) or reasons.explain(job)
        if self._silence is not None:
            text = f"{self._silence}; the last that is known: {text}"
        start = None if job is None or job.state is not State.PENDING else job.expected_start
        expected = start if start is not None and start - now < _FAR_S else None
        return Why(position=self.order(now).index(request_id) + 1, text=f"Slurm: {text}", expected_start=expected)

    def starts_now(self, request: Request, now: float) -> bool:
        """Whether all that is asked for is free, as Slurm says; those who wait may still get it."""
        choice = self.choose(request)
        return choice is not None and is_free(request, choice, self._look.nodes)

    # -- asked by what talks with Slurm ---------------------------------------------------------------------------

    def job(self, job_id: int | None) -> Job | None:
        """A job as Slurm told of it last."""
        return None if job_id is None else self._jobs.get(job_id)

    def choose(self, request: Request) -> Choice | None:
        """On which GPUs the request may run; None where that is not known yet."""
        return choose(request, self._supplies(), self._look.nodes, self._table)

    def began_at(self, request_id: str) -> float | None:
        """When the job had started by which a request was granted. None where that was in another run of the broker:
        should the job have started anew since, Slurm's Epilog has removed what the old start had.
        """
        return self._began.get(request_id)

    def misfit(self, request: Request, job: Job) -> str | None:
        """Why what a running job has can never serve the request; None where it can, or may."""
        unknown = [name for name in job.nodes if name not in self._ours]
        if unknown:
            return f"Slurm gave it {', '.join(unknown)}, which cluster.toml does not name"
        if not _has_shape(request, job):
            return "Slurm gave it another number of nodes or GPUs than was asked for"
        slots = [slot for share in self._shares(request, job) or () for slot in share.slots]
        unwanted = [slot for slot in slots if not request.requirement.accepts(slot.card)]
        if unwanted:
            return f"Slurm gave it a {unwanted[0].card.model} on {unwanted[0].node}, which will not do"
        return None

    def outside(self) -> Mapping[str, Job]:
        """By UUID, GPUs of jobs that are not gpuhub's, and what a lease has given back and its job still has."""
        waiting = {request.slurm_job for request in self._mirror.requests.values()}
        held = {
            holding.request.slurm_job: {slot.uuid for share in holding.shares for slot in share.slots}
            for holding in self._mirror.stock.holdings.values()
        }
        return {
            slot.uuid: job
            for job in self._look.jobs
            if job.gpus and job.id not in waiting and (job.id in held or not job.name.startswith(self._prefix))
            for theirs in job.nodes
            for slot in self._slots(theirs, job) or ()
            if slot.uuid not in held.get(job.id, ())
        }

    def away(self) -> Mapping[str, str]:
        """Our nodes to which Slurm gives no work, and why, in its words."""
        return {
            self._ours[node.name]: f"{node.state}: {node.reason}" if node.reason else node.state
            for node in self._look.nodes
            if node.name in self._ours and not node.takes_work
        }

    # -- inside ---------------------------------------------------------------------------------------------------

    def _supplies(self) -> dict[str, NodeSupply]:
        nodes = self._mirror.stock.nodes
        return {theirs: nodes[ours].supply for theirs, ours in self._ours.items() if ours in nodes}

    def _job_of(self, request: Request) -> Job | None:
        return self.job(request.slurm_job)

    def _is_running(self, job_id: int | None) -> bool:
        job = self.job(job_id)
        return job is not None and job.state is State.RUNNING

    def _why_no_job(self, request: Request) -> str:
        if self._look.nodes and self.choose(request) is None:
            return "no node that it knows and that gpuhub has read would do yet"
        return "it is being submitted"

    def _why_not(self, request: Request, job: Job) -> str | None:
        """Why a request whose job runs is not granted; None where it is, or its job does not run."""
        if job.state is not State.RUNNING:
            return None
        return self.misfit(request, job) or next(self._obstacles(job), None)

    def _obstacles(self, job: Job) -> Iterator[str]:
        for theirs in job.nodes:
            node = self._mirror.stock.nodes.get(self._ours[theirs])
            if node is None or not node.supply.takes_work:
                trouble = "it has not been read yet" if node is None else node.supply.trouble
                yield f"it is given {self._ours[theirs]}, where no container can be started at present: {trouble}"
                continue
            slots = self._slots(theirs, job)
            if slots is None:
                yield f"it is given GPUs of {node.supply.name} that its agent does not report (yet)"
                continue
            held = {node.supply.slots[at].uuid for use in node.uses.values() for at in use.positions}
            for slot in slots:
                if slot.uuid in held:
                    yield f"it is given GPU {slot.index} of {slot.node}; what ran there before is being removed"

    def _slots(self, theirs: str, job: Job) -> tuple[Slot, ...] | None:
        """What a job has on a node; None where that is not (yet) known."""
        node = self._mirror.stock.nodes.get(self._ours.get(theirs, ""))
        if node is None or theirs not in self._nodes:
            return None
        slots = number_slots(node.supply.slots, self._nodes[theirs], self._table)
        numbers = job.gpus.get(theirs, ())
        return tuple(slots[number] for number in numbers) if all(number in slots for number in numbers) else None

    def _shares(self, request: Request, job: Job) -> tuple[Share, ...] | None:
        """What a running job has, in its order of nodes; None where some of it is not (yet) known."""
        found = [(self._ours[theirs], self._slots(theirs, job)) for theirs in job.nodes]
        shares = [Share(node=node, slots=slots) for node, slots in found if slots is not None]
        if len(shares) < len(found):
            return None
        # A job with GPUs anywhere may have been given a node for its processes alone.
        return tuple(share for share in shares if share.slots or not request.size)


def number_slots(slots: Sequence[Slot], node: Node, table: Slurm) -> dict[int, Slot]:
    """A node's GPUs by Slurm's numbers: it counts type by type, in the order in which its node names them, and within a
    type as gres.conf does. GPUs of types that Slurm does not have there are left out; without types all count.
    """
    by_index = sorted(slots, key=lambda slot: slot.index)
    ordered: list[Slot | None] = []
    for kind, count in node.gpus.items():
        found = [slot for slot in by_index if not kind or table.gpu_type(slot.card.model) == kind]
        # Slurm has more of them than the node reports, or fewer: then none of them can be told.
        ordered += found if len(found) == count else [None] * count
    return {number: slot for number, slot in enumerate(ordered) if slot is not None}


def _has_shape(request: Request, job: Job) -> bool:
    counts: Sequence[int] = [len(job.gpus.get(node, ())) for node in job.nodes]
    if request.spread is not None:
        return sum(counts) == request.spread
    is_each = all(count == request.gpus_per_node for count in counts)
    return is_each and request.least_nodes <= len(counts) <= request.nodes
