"""Slurm on the machines: its jobs start and end, and its Epilog cleans nodes as the real one does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from gpuhub.common import names
from gpuhub.common.errors import NotAllowed
from gpuhub.slurm_client.interface import SlurmClient
from gpuhub.slurm_client.models import LIVE_STATES, SlurmJob, SlurmJobState, SlurmSubmission, Submitter
from tests.integration.gpuhub.broker.stateful.boxes import Box, Link
from tests.integration.gpuhub.broker.stateful.virtual import VirtualLoop
from tests.support.slurm.scripted_slurm import ScriptedSlurm

INSTANCE = "ghtest"
PREFIX = names.slurm_job_name(INSTANCE, "")
TYPES = {"rig1": ("rtx5090", "rtx5090"), "rig2": ("rtx5070", "rtx5070"), "rig3": ("rtx5060",)}
UIDS = {"ada": 71001, "ben": 71002, "cleo": 71003, "eve": 71004}
#: The interval of slurmctld's scheduling, seconds.
TURN_S = 0.25


async def find_submitter(owner: str) -> Submitter:
    if owner not in UIDS:
        raise NotAllowed(f"user {owner!r} has no account on the head node")
    return Submitter(name=owner, uid=UIDS[owner], gid=UIDS[owner])


class SlurmSystem(ScriptedSlurm):
    """A Slurm whose nodes are the boxes."""

    def __init__(self, loop: VirtualLoop, boxes: Mapping[str, Box]) -> None:
        super().__init__(TYPES)
        self._loop = loop
        self._boxes = boxes
        self._loop.call_later(TURN_S, self._turn)

    def client(self, gate: Callable[[], None]) -> SlurmClient:
        """Return the Slurm client of one process, which passes `gate` before and after each call."""
        return _GatedSlurm(self, self._loop, gate)  # type: ignore[return-value]

    # -- what Slurm does by itself --------------------------------------------------------------------------------

    def _turn(self) -> None:
        if not self.is_silent:
            for job in list(self.jobs.values()):
                if job.state not in LIVE_STATES and job.id in self.held:
                    self.clean(job.id)
            self.start()
        self._loop.call_later(TURN_S, self._turn)

    def clean(self, job_id: int) -> None:
        """Run the Epilog; it waits for a daemon that hangs."""
        if self._run_epilog(job_id):
            super().clean(job_id)
            if job_id not in self.held and job_id in self.jobs:
                # Slurm lists GPUs only for jobs that have some.
                self.change(job_id, gpus={})

    def requeue(self, job_id: int) -> None:
        if self._run_epilog(job_id):
            super().requeue(job_id)

    def _run_epilog(self, job_id: int) -> bool:
        boxes = [self._boxes[node] for node in self.jobs[job_id].nodes] if job_id in self.jobs else []
        if any(box.link is Link.HUNG for box in boxes):
            return False
        for box in boxes:
            for found in list(box.node.containers.values()):
                if found["Labels"].get(names.LABEL_SLURM_JOB) == str(job_id):
                    del box.node.containers[found["Id"]]
        return True

    # -- what others do -------------------------------------------------------------------------------------------

    def sbatch(self, gpus: int, nice: int) -> None:
        """Submit a job that is not gpuhub's, as another user."""
        submitter = Submitter(name="eve", uid=UIDS["eve"], gid=UIDS["eve"])
        self.add(SlurmSubmission(name="train", submitter=submitter, script="", gpus_per_node=gpus, nice=nice))

    def lose_node(self, node: str) -> None:
        """Restart a node: jobs on it end, except those that survive a lost node."""
        for job in self.live():
            if node in job.nodes:
                self.end(job.id, SlurmJobState.NODE_FAIL)

    def heal(self) -> None:
        """Let Slurm respond, execute late requests, and end other users' jobs."""
        self.is_silent = False
        self.late = self.lost_answers = 0
        self.arrive()
        self.drained.clear()
        for job in self.live():
            if not job.name.startswith(PREFIX):
                self.scancel(job.id)
            elif job.state is SlurmJobState.SUSPENDED:
                self.change(job.id, state=SlurmJobState.RUNNING)

    # -- the truth ------------------------------------------------------------------------------------------------

    def own_jobs(self) -> list[SlurmJob]:
        """Return the jobs of leases that wait or run."""
        return [job for job in self.live() if job.name.startswith(PREFIX)]

    def find_gpus(self, job_id: int) -> set[str]:
        """Return the UUIDs of a job's GPUs, also while its nodes are cleaned. No box has GPUs of two types."""
        places = self.held.get(job_id, {})
        return {f"GPU-{node}-{number}" for node, numbers in places.items() for number in numbers}


class _GatedSlurm:
    """A Slurm client in a process that may die before or after each call; sent requests are executed."""

    def __init__(self, slurm: SlurmSystem, loop: VirtualLoop, gate: Callable[[], None]) -> None:
        self._slurm = slurm
        self._loop = loop
        self._gate = gate

    async def close(self) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._slurm, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._gate()
            answer: asyncio.Future[Any] = self._loop.create_future()
            self._loop.call_later(self._loop.latency(), self._arrive, method, args, kwargs, answer)
            result = await answer
            self._gate()
            return result

        return call

    def _arrive(self, method: Any, args: Any, kwargs: Any, answer: asyncio.Future[Any]) -> None:
        work = method(*args, **kwargs)
        result: Any = None
        try:
            # It contains no await that waits.
            work.send(None)
        except StopIteration as done:
            result = done.value
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            result = error
        self._loop.call_later(self._loop.latency(), _answer, answer, result)


def _answer(answer: asyncio.Future[Any], result: Any) -> None:
    if answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)
