"""The loop that keeps leases and the jobs of an external scheduling backend in agreement.

A backend only observes and acts on its jobs; every change of a lease is made here. While it gives no answer nothing is
concluded. Everything follows from a poll and the ledger, so that a restarted broker continues where the last one ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from gpuhub.backends.interface import BackendHost, LeaseRejected, Observation, SchedulingBackend, raise_first
from gpuhub.broker.controllers.nodes.condition_events import ConditionEvents
from gpuhub.broker.state import mutations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas import LeaseState, Purpose
from gpuhub.common.errors import GpuhubError, SchedulerUnreachable, Unavailable
from gpuhub.domain import job_states, lease_states
from gpuhub.domain.clock import Clock, wait_event
from gpuhub.domain.models import JobRow, LeaseRow
from gpuhub.nodes.power_status import record_switch
from gpuhub.nodes.status import NodeStatus

log = logging.getLogger(__name__)

#: Minimum interval between two polls, seconds.
MIN_PERIOD_S = 0.1
#: Maximum interval between two polls while a job may start at any moment, seconds.
EAGER_PERIOD_S = 0.5
#: A job is expected to start for this long after its lease was requested, seconds.
YOUNG_S = 15.0
#: Submissions that are made at the same time.
_CONCURRENCY = 8


class CoreHost(BackendHost):
    """What a backend may read of the broker's state."""

    def __init__(self, core: BrokerState) -> None:
        self._core = core

    @property
    def clock(self) -> Clock:
        return self._core.clock

    def leases(self) -> Mapping[str, LeaseRow]:
        return self._core.ledger.snapshot.leases

    def jobs(self) -> Mapping[str, JobRow]:
        return self._core.ledger.snapshot.jobs

    def nodes(self) -> Mapping[str, NodeStatus]:
        return self._core.capacity.inventory.nodes


class BackendController:
    """Polls a backend, changes leases as it observes, and lets it submit and cancel jobs."""

    def __init__(self, core: BrokerState, backend: SchedulingBackend) -> None:
        self._core = core
        self._backend = backend
        self._conditions = ConditionEvents(core)
        #: Lease → its job: jobs of open leases, and of ended ones whose jobs are not cancelled yet.
        self._jobs: dict[str, int] = {}
        #: Leases whose submission was tried last.
        self._tried: frozenset[str] = frozenset()
        #: The backend did not answer last time; the last poll had no failure.
        self._is_unreachable = False
        self._is_well = True

    # -- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            began = self._core.clock.monotonic()
            await self.step()
            await asyncio.sleep(MIN_PERIOD_S)
            await self._until_due(began + self._period())

    async def step(self) -> None:
        """Poll once and do all that follows; failures are logged, and what they left undone is done next time."""
        self._is_well = False
        try:
            observation = await self._backend.observe()
        except SchedulerUnreachable as error:
            self._note_unreachable(error)
            return
        except Exception:
            log.exception("%s could not be polled", self._backend.title)
            return
        self._note_answer()
        self._is_well = observation.may_submit
        await self._try(partial(self._follow_nodes, observation))
        is_assigned = await self._try(partial(self._assign_jobs, observation))
        await self._try(partial(self._follow_jobs, observation))
        await self._try(self._schedule)
        if is_assigned and observation.may_submit:
            # Otherwise a job that exists might be submitted again.
            await self._try(self._submit_all)
        await self._try(self._cancel_ended)
        await self._try(self._backend.reconcile)

    async def _try(self, act: Callable[[], Awaitable[None]]) -> bool:
        """Return whether it went well; nothing more is tried once the backend is unreachable."""
        if self._is_unreachable:
            return False
        try:
            await act()
        except SchedulerUnreachable as error:
            self._note_unreachable(error)
        except GpuhubError as error:
            log.warning("%s: %s", self._backend.title, error)
        except Exception:
            log.exception("a step of the poll of %s failed unexpectedly", self._backend.title)
        else:
            return True
        self._is_well = False
        return False

    async def _until_due(self, deadline: float) -> None:
        """Wait for the deadline, or for something new to submit or to cancel."""
        while (left := deadline - self._core.clock.monotonic()) > 0:
            changed = self._core.ledger.changed
            if self._is_well and (self._has_new_request() or self._find_ended()):
                return
            await wait_event(changed, left)

    def _period(self) -> float:
        """Seconds from one poll to the next."""
        now = self._core.clock.now()
        ages = [now - lease.created_at for lease in self._waiting() if lease.slurm_job is not None]
        return choose_period(self._backend.poll_s or EAGER_PERIOD_S, ages if self._is_well else [])

    # -- what was observed ----------------------------------------------------------------------------------------

    async def _follow_nodes(self, observation: Observation) -> None:
        core = self._core
        for name, state in observation.power.items():
            power = core.capacity.power.get(name)
            if power is not None and power.state is not state:
                await core.set_power(record_switch(power, state, core.clock.now()))
        for node in observation.nodes:
            before = core.capacity.inventory.nodes[node.name]
            await core.observe(node)
            self._conditions.report(node.name)
            if node.has_readings and [gpu.card for gpu in node.gpus] != [gpu.card for gpu in before.gpus]:
                await core.capacity.save_seen_gpus(node)
        for name, lease_ids in observation.cleared.items():
            await core.ledger.change(mutations.prove_released(lease_ids, name))

    async def _assign_jobs(self, observation: Observation) -> None:
        if observation.jobs:
            await self._core.ledger.change(mutations.set_slurm_jobs(observation.jobs))

    async def _follow_jobs(self, observation: Observation) -> None:
        core = self._core
        leases = core.ledger.snapshot.leases
        self._jobs |= {lease.id: lease.slurm_job for lease in leases.values() if lease.slurm_job is not None}
        for lease_id, nodes in observation.lost_nodes.items():
            await core.ledger.change(mutations.shrink(lease_id, nodes))
        exits = [
            (leases[lease_id].subject, partial(job_states.record_leader_exit, exit_code=end.exit_code))
            for lease_id, end in observation.ended.items()
            if end.exit_code is not None and lease_id in leases
        ]
        if exits:
            await core.ledger.change(mutations.change_jobs(exits))
        ends = {lease_id: end.reason for lease_id, end in observation.ended.items()}
        if ends:
            log.info("leases end with their jobs: %s", ends)
            await core.ledger.change(mutations.end_leases(ends))
        changes = [(lease, partial(lease_states.set_end, ends_at=end)) for lease, end in observation.ends_at.items()]
        notes = [(lease, partial(lease_states.set_note, note=note)) for lease, note in observation.notes.items()]
        if changes or notes:
            await core.ledger.change(mutations.change_leases([*changes, *notes]))

    async def _schedule(self) -> None:
        """Let the backend's scheduler grant what was observed."""
        if self._core.ledger.index.find("waiting"):
            await self._core.ledger.change(lambda _: None)

    # -- jobs -----------------------------------------------------------------------------------------------------

    def _waiting(self) -> list[LeaseRow]:
        return self._core.ledger.find_leases("waiting")

    def _find_unsubmitted(self) -> list[LeaseRow]:
        """Waiting leases without a job, the oldest first. Without containers the spawner submits those of notebooks."""
        has_containers = self._backend.capabilities.containers
        due = [lease for lease in self._waiting() if has_containers or lease.purpose is Purpose.JOB]
        return sorted(filter(_is_unsubmitted, due), key=lambda lease: lease.seq)

    def _has_new_request(self) -> bool:
        return any(lease.id not in self._tried for lease in self._find_unsubmitted())

    async def _submit_all(self) -> None:
        due = self._find_unsubmitted()
        self._tried = frozenset(lease.id for lease in due)
        for start in range(0, len(due), _CONCURRENCY):
            batch = map(self._submit, due[start : start + _CONCURRENCY])
            raise_first(await asyncio.gather(*batch, return_exceptions=True))

    async def _submit(self, lease: LeaseRow) -> None:
        try:
            job = await self._backend.submit(lease)
        except SchedulerUnreachable:
            raise
        except Unavailable as error:
            log.warning("lease %s is submitted later: %s", lease.id, error)
            return
        except LeaseRejected as error:
            await self._core.ledger.change(mutations.end_leases({lease.id: str(error)}))
            return
        if job is not None:
            # Should the lease end before the number is stored, this cancels the job.
            self._jobs[lease.id] = job
            await self._core.ledger.change(mutations.set_slurm_jobs({lease.id: job}))

    async def _cancel_ended(self) -> None:
        """Cancel the jobs of leases that have ended: their containers are proven gone by then."""
        ended = self._find_ended()
        if ended:
            await self._backend.cancel({lease: self._jobs[lease] for lease in ended})
        for lease in ended:
            del self._jobs[lease]

    def _find_ended(self) -> list[str]:
        leases = self._core.ledger.snapshot.leases
        return [lease for lease in self._jobs if lease not in leases]

    # -- reachability ---------------------------------------------------------------------------------------------

    def _note_unreachable(self, error: SchedulerUnreachable) -> None:
        self._backend.note_unreachable(error)
        if not self._is_unreachable:
            title = self._backend.title
            log.warning("%s does not answer: %s", title, error)
            self._core.add_event(
                f"{self._backend.name}.unreachable", f"{title} does not answer: {error}; what runs continues"
            )
        self._is_unreachable = True

    def _note_answer(self) -> None:
        if self._is_unreachable:
            log.info("%s answers again", self._backend.title)
            self._core.add_event(f"{self._backend.name}.answers", f"{self._backend.title} answers again")
        self._is_unreachable = False


def choose_period(poll_s: float, ages_s: Sequence[float]) -> float:
    """Return the seconds from one poll to the next: fewer while a submitted lease is young, as its user waits.

    Most jobs start at once or not for long, so that the first polls follow each other most closely.

    Args:
        poll_s: The backend's own period.
        ages_s: Time since each request whose job has not started.
    """
    youngest_s = min(ages_s, default=YOUNG_S)
    return min(poll_s, EAGER_PERIOD_S, youngest_s / 4) if youngest_s < YOUNG_S else poll_s


def _is_unsubmitted(lease: LeaseRow) -> bool:
    return lease.state is LeaseState.REQUESTED and lease.slurm_job is None
