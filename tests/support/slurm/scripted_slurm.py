"""Slurm in memory: a `SlurmClient` whose jobs start and end when a test decides so. It has no clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpuhub.slurm_client.interface import SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.models import (
    LIVE_STATES,
    GpuTime,
    SlurmJob,
    SlurmJobState,
    SlurmNode,
    SlurmPartition,
    SlurmSite,
    SlurmSnapshot,
    SlurmSubmission,
)

#: UIDs of the tests' users.
UIDS = {"ada": 71001, "ben": 71002, "eve": 71003}
#: GPU types of the practice closet.
CLOSET = {"rig1": ("rtx5090",), "rig2": ("rtx5070",), "rig3": ("rtx5060",)}


class ScriptedSlurm:
    """Gives whole GPUs by type; in place of times it has a count of events."""

    def __init__(self, nodes: Mapping[str, Sequence[str]] = CLOSET) -> None:
        self.nodes = {name: tuple(types) for name, types in nodes.items()}
        self.jobs: dict[int, SlurmJob] = {}
        self.asked: dict[int, SlurmSubmission] = {}
        #: slurmctld does not respond, and requests have no effect.
        self.is_silent = False
        #: Flags of nodes' states, such as `powered_down`.
        self.flags: dict[str, str] = {}
        #: The number of next submissions that succeed although their responses are lost.
        self.lost_answers = 0
        #: The number of next submissions without a response, which succeed at `arrive`.
        self.late = 0
        self.late_ones: list[SlurmSubmission] = []
        #: The error of submissions; None accepts them.
        self.refusal: str | None = None
        #: The number of changes of jobs and nodes that were refused.
        self.refused = 0
        #: Nodes that an administrator has drained.
        self.drained: set[str] = set()
        #: Reasons of the nodes that gpuhub has drained.
        self.reasons: dict[str, str] = {}
        #: GPUs by node that jobs have, including jobs whose nodes are still being cleaned.
        self.held: dict[int, dict[str, tuple[int, ...]]] = {}
        self.limits: dict[int, int] = {}
        self.kept: list[int] = []
        self.cancelled: list[tuple[int, bool]] = []
        self.polls = 0
        self.submitted = 0
        self._ids = itertools.count(101)
        self._moments = itertools.count(1000)

    # -- a SlurmClient --------------------------------------------------------------------------------------------

    async def read_snapshot(self) -> SlurmSnapshot:
        """Return all jobs and nodes."""
        self._answer()
        self.polls += 1
        return SlurmSnapshot(jobs=tuple(self.jobs.values()), nodes=tuple(self._nodes()))

    async def find_job(self, job_id: int, *, name: str | None = None) -> SlurmJob | None:
        """Return one job."""
        self._answer()
        return self.jobs[job_id] if self._is_there(job_id, name) else None

    async def submit(self, submission: SlurmSubmission) -> int:
        """Submit a job."""
        self._answer()
        if self.refusal is not None:
            raise SlurmRefused(self.refusal)
        if self.late:
            self.late -= 1
            self.late_ones.append(submission)
            raise SlurmUnreachable("slurmctld did not answer in time")
        self.submitted += 1
        job = self.add(submission)
        if self.lost_answers:
            self.lost_answers -= 1
            raise SlurmUnreachable("slurmctld did not answer in time")
        return job

    async def cancel(self, job_id: int, *, name: str | None = None, at_once: bool = False) -> None:
        """End a job."""
        self._answer()
        if job_id in self.jobs and not self._is_there(job_id, name):
            return
        self.cancelled.append((job_id, at_once))
        self.scancel(job_id)
        if at_once:
            self.clean(job_id)

    async def persist_job(self, job_id: int, *, name: str | None = None) -> None:
        """Store the data of a job."""
        self._answer()
        self.kept.append(job_id)

    async def set_time_limit(self, job_id: int, seconds: int, *, name: str | None = None) -> None:
        """Change a job's limit."""
        self._answer()
        if self.refusal is not None:
            raise SlurmRefused(self.refusal)
        self.limits[job_id] = seconds

    async def shrink(self, job_id: int, nodes: Sequence[str], *, name: str | None = None) -> None:
        """Remove nodes from a job."""
        self._answer()
        if self.refusal is not None:
            self.refused += 1
            raise SlurmRefused(self.refusal)
        job = self.jobs[job_id]
        assert nodes[0] == job.nodes[0], "no node is taken away on which a job's script runs"
        self.held[job_id] = {node: self.held[job_id][node] for node in nodes}
        self.change(job_id, nodes=tuple(nodes), gpus={node: job.gpus[node] for node in nodes})

    async def drain_node(self, node: str, reason: str) -> None:
        """Drain a node."""
        self._answer()
        if self.refusal is not None:
            self.refused += 1
            raise SlurmRefused(self.refusal)
        assert node not in self.drained, "an administrator's drain is not changed"
        self.reasons[node] = reason

    async def undrain_node(self, node: str) -> None:
        """End the drain of a node."""
        self._answer()
        del self.reasons[node]

    async def read_site(self) -> SlurmSite:
        """Return one partition with all nodes."""
        self._answer()
        nodes = tuple(self._nodes())
        main = SlurmPartition(name="main", is_default=True, max_time_s=86400, nodes=tuple(self.nodes))
        return SlurmSite(version=(22, 5, 8), cluster="test", partitions=(main,), nodes=nodes, has_accounting=False)

    async def read_gpu_time(self, since: float, until: float) -> Sequence[GpuTime]:
        """Return nothing: there is no accounting."""
        raise SlurmRefused("there is no accounting")

    async def close(self) -> None:
        """Do nothing."""

    # -- what tests do --------------------------------------------------------------------------------------------

    def add(self, submission: SlurmSubmission) -> int:
        """Add a waiting job, submitted by any user."""
        number = next(self._ids)
        self.asked[number] = submission
        self.jobs[number] = SlurmJob(
            id=number,
            name=submission.name,
            user_id=submission.submitter.uid,
            user_name=submission.submitter.name,
            state=SlurmJobState.PENDING,
            reason="Resources",
            partition=submission.partition or "main",
            priority=1000 - submission.nice,
            time_limit_s=submission.time_limit_s,
        )
        return number

    def arrive(self) -> None:
        """Let late submissions succeed."""
        late, self.late_ones = self.late_ones, []
        for submission in late:
            self.add(submission)

    def start(self, job_id: int | None = None) -> list[int]:
        """Start the jobs that fit, by priority, or this one job if it fits; return their numbers."""
        waiting = [job for job in self.jobs.values() if job.state is SlurmJobState.PENDING and job_id in {None, job.id}]
        started = []
        for job in sorted(waiting, key=lambda one: (-one.priority, one.id)):
            places = self._place(self.asked[job.id])
            if places is not None:
                self.held[job.id] = places
                gpus = {node: numbers for node, numbers in places.items() if numbers}
                began = float(next(self._moments))
                asked = self.asked[job.id]
                self.change(
                    job.id,
                    state=SlurmJobState.RUNNING,
                    reason="",
                    nodes=tuple(places),
                    gpus=gpus,
                    cpus=asked.cpus * len(places),
                    memory_mib=asked.memory_mib * len(places),
                    started_at=began,
                )
                started.append(job.id)
        return started

    def change(self, job_id: int, **fields: object) -> None:
        """Change a job as an administrator would."""
        self.jobs[job_id] = replace(self.jobs[job_id], **fields)  # type: ignore[arg-type]

    def update(self, job_id: int, **fields: object) -> None:
        """Change what a waiting job asks for, as its owner may by `scontrol update`."""
        assert self.jobs[job_id].state is SlurmJobState.PENDING, "Job is no longer pending execution"
        self.asked[job_id] = replace(self.asked[job_id], **fields)  # type: ignore[arg-type]

    def end(self, job_id: int, state: SlurmJobState, reason: str = "") -> None:
        """End a job; its GPUs are free when its nodes are clean, see `clean`."""
        if self.jobs[job_id].state in LIVE_STATES:
            self.change(job_id, state=state, reason=reason, is_completing=job_id in self.held)

    def scancel(self, job_id: int) -> None:
        """Cancel a job as its user would."""
        if job_id in self.jobs:
            self.end(job_id, SlurmJobState.CANCELLED)

    def clean(self, job_id: int) -> None:
        """End the Epilog of a job that has ended."""
        if job_id in self.jobs and self.jobs[job_id].state not in LIVE_STATES:
            self.held.pop(job_id, None)
            self.change(job_id, is_completing=False)

    def requeue(self, job_id: int) -> None:
        """Run `scontrol requeue`: the job waits again under the same number."""
        self.held.pop(job_id, None)
        self.change(job_id, state=SlurmJobState.PENDING, reason="BeginTime", nodes=(), gpus={}, started_at=None)

    def forget(self, job_id: int) -> None:
        """Forget a job that ended long ago."""
        if self.jobs[job_id].state not in LIVE_STATES and job_id not in self.held:
            del self.jobs[job_id]

    def live(self) -> list[SlurmJob]:
        """Return the jobs that wait or run."""
        return [job for job in self.jobs.values() if job.state in LIVE_STATES]

    def only(self) -> SlurmJob:
        """Return the only job that waits or runs."""
        (job,) = self.live()
        return job

    # -- inside ---------------------------------------------------------------------------------------------------

    def _is_there(self, job_id: int, name: str | None) -> bool:
        return job_id in self.jobs and name in {None, self.jobs[job_id].name}

    def _answer(self) -> None:
        if self.is_silent:
            raise SlurmUnreachable("slurmctld does not answer")

    def _nodes(self) -> Iterator[SlurmNode]:
        for name, types in self.nodes.items():
            has = {kind: types.count(kind) for kind in types}
            taken = [self._kinds(name)[number] for number in self._used_gpus(name)]
            is_drained = name in self.drained or name in self.reasons
            yield SlurmNode(
                name=name,
                state="+".join(
                    ["drained" if is_drained else "mixed" if taken else "idle", *filter(None, [self.flags.get(name)])]
                ),
                takes_work=not is_drained,
                reason="fans" if name in self.drained else self.reasons.get(name, ""),
                gpus=has,
                used={kind: taken.count(kind) for kind in has},
                cpus=64,
                memory_mib=1 << 20,
                partitions=("main",),
            )

    def _kinds(self, name: str) -> list[str]:
        """Return GPU types in the order of Slurm's numbers, which group by type."""
        types = self.nodes[name]
        return [kind for kind in dict.fromkeys(types) for _ in range(types.count(kind))]

    def _used_gpus(self, name: str) -> set[int]:
        return {number for places in self.held.values() for number in places.get(name, ())}

    def _free(self, name: str, kind: str | None) -> list[int]:
        taken = self._used_gpus(name)
        return [at for at, one in enumerate(self._kinds(name)) if at not in taken and kind in {None, one}]

    def _place(self, asked: SlurmSubmission) -> dict[str, tuple[int, ...]] | None:
        refusing = {*asked.exclude, *self.drained, *self.reasons}
        usable = [name for name in self.nodes if name not in refusing]
        if asked.spread is not None:
            every = [(name, number) for name in usable for number in self._free(name, asked.gpu_type)][: asked.spread]
            spread = {name: tuple(number for node, number in every if node == name) for name, _ in every}
            return spread if len(every) == asked.spread else None
        fitting = {
            name: free for name in usable if len(free := self._free(name, asked.gpu_type)) >= asked.gpus_per_node
        }
        chosen = list(fitting)[: asked.nodes]
        if len(chosen) < asked.min_nodes:
            return None
        return {name: tuple(fitting[name][: asked.gpus_per_node]) for name in chosen}
