"""Operations on leases and jobs, each one change of the ledger or one view of it.

A long poll answers as soon as its lease or job changes, without waking the clients of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker.admission import access
from gpuhub.broker.admission import extend as extensions
from gpuhub.broker.admission.submit import AdmissionController
from gpuhub.broker.admission.users import UserDirectory, require_user
from gpuhub.broker.operations.admin import require_admin
from gpuhub.broker.operations.long_polls import ReadVersion, wait_for_change
from gpuhub.broker.state import mutations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker.views import views
from gpuhub.broker.views.explanations import PendingExplainer
from gpuhub.broker_api.schemas import (
    ActivationRequest,
    ArrayRequest,
    ExtensionRequest,
    GroupRequest,
    JobCheckRequest,
    JobRequest,
    JobState,
    JobView,
    LeaseRequest,
    LeaseState,
    LeaseView,
    PendingReasonView,
    Purpose,
)
from gpuhub.common.errors import Conflict, InvalidRequest
from gpuhub.domain import job_states
from gpuhub.domain import lease_states as leases
from gpuhub.domain.models import Identity, JobRow, LeaseRow

#: Maximum number of jobs in a list that includes ended ones.
MAX_JOBS = 200


class BrokerOperations:
    """What callers may do with leases and jobs, with the checks of their rights."""

    def __init__(self, core: BrokerState, backend: SchedulingBackend, users: UserDirectory) -> None:
        """`users` are the hub's."""
        self._core = core
        self._backend = backend
        self._users = users
        self._admission = AdmissionController(core, backend.admit)
        self._streams = access.ConcurrencyLimiter()
        self._explainer = PendingExplainer(core)

    # -- leases ---------------------------------------------------------------------------------------------------

    async def request_lease(self, caller: Identity, request: LeaseRequest, wait_s: float = 0.0) -> LeaseView:
        """Request a lease for a notebook, and wait for the grant for at most `wait_s` seconds.

        A server that has a lease already gets that one, and a repeated key the lease of its first use, ended or not.

        Raises:
            Conflict: the server runs with another profile, or the key was used for another request.
            NotAllowed, InvalidRequest, TooManyWaiting, TooManyStreams: the request is refused.
        """
        self._backend.validate_request(request)
        capabilities = self._backend.capabilities
        if request.persistent and not capabilities.persistent_notebooks:
            raise InvalidRequest(
                f"keep: {capabilities.scheduler} decides what happens to a job whose node reboots; start the notebook "
                "without it"
            )
        lease = await self._admission.submit_notebook(caller, request)
        self._note_poll(caller, lease)
        if wait_s:
            await self._wait_state(caller, lease.id, lambda row: row.state is not LeaseState.REQUESTED, wait_s)
        return await self.lease(caller, lease.id)

    async def lease(self, caller: Identity, lease_id: str) -> LeaseView:
        """Return a lease, ended or not.

        Raises:
            NotFound: the lease does not exist, or it belongs to another user.
        """
        lease = await access.find_lease(self._core, caller, lease_id)
        self._note_poll(caller, lease)
        return views.view_lease(self._core, lease)

    async def wait_lease(self, caller: Identity, lease_id: str, version: int | None, wait_s: float) -> LeaseView:
        """Return the lease as soon as its version differs from `version`, at the latest after `wait_s` seconds.

        Raises:
            NotFound, TooManyStreams: the lease cannot be watched.
        """

        async def read_version() -> tuple[int, bool]:
            row = await access.find_lease(self._core, caller, lease_id)
            self._note_poll(caller, row)
            return self._core.queue_positions.find_version(row), row.state is LeaseState.REQUESTED

        await self._poll(caller, lease_id, read_version, version, wait_s)
        return await self.lease(caller, lease_id)

    def leases(
        self, caller: Identity, *, owner: str | None = None, state: LeaseState | None = None, node: str | None = None
    ) -> Iterator[LeaseView]:
        """Yield leases that have not ended: the caller's own, or all for an administrator.

        With `owner`, `state` or `node` only those of this owner, in this state, or with containers on this node.
        """
        ledger = self._core.ledger
        rows = ledger.snapshot.leases.values() if caller.sees_all else ledger.find_leases("owner", caller.name)
        found = (
            row
            for row in rows
            if owner in (None, row.owner) and state in (None, row.state) and (node is None or node in row.nodes)
        )
        leases = sorted(found, key=lambda row: row.seq)
        return (views.view_lease(self._core, lease) for lease in leases)

    async def activate(self, caller: Identity, lease_id: str, activation: ActivationRequest) -> LeaseView:
        """Record the notebook's container, which may be started after this succeeds.

        Raises:
            NotFound, Conflict: the lease is not granted, or has ended.
        """
        lease = await access.find_lease(self._core, caller, lease_id)
        if lease.purpose is not Purpose.NOTEBOOK:
            raise Conflict("only the broker activates a job's lease")
        if lease.state in leases.LIVE:
            await self._backend.confirm(lease)

        def edit(transaction: Transaction) -> None:
            current = _open_lease(transaction, lease_id)
            transaction.put_lease(leases.activate(current, activation.container_id, transaction.now))

        await self._core.ledger.change(edit)
        return await self.lease(caller, lease_id)

    async def release(self, caller: Identity, lease_id: str, wait_s: float = 0.0) -> LeaseView:
        """Release a lease, and wait for the proof that its GPUs are free for at most `wait_s` seconds.

        A repeated call changes nothing. A job's lease ends with its job.
        """
        lease = await access.find_lease(self._core, caller, lease_id)
        reason = "stopped" if caller.name == lease.owner or caller.any_owner else f"ended by {caller.name}"
        await self._core.ledger.change(mutations.end_leases({lease_id: reason}))
        if wait_s:
            await self._wait_state(caller, lease_id, lambda row: not row.is_open, wait_s)
        return await self.lease(caller, lease_id)

    async def extend(self, caller: Identity, lease_id: str, extension: ExtensionRequest) -> LeaseView:
        """Extend a lease.

        Raises:
            InvalidRequest: the new end exceeds a limit.
            Conflict: the lease is ending, or other requests wait for its GPUs.
            NotFound: the lease does not exist.
        """
        lease = await access.find_lease(self._core, caller, lease_id)
        if self._backend.capabilities.external_jobs:
            # Nothing is asked of the backend that gpuhub would refuse.
            await self._core.ledger.change(
                partial(extensions.build_extended, self._core, lease_id, extension.time_limit_s)
            )
            await self._backend.extend(lease, extension.time_limit_s)
        await extensions.extend(self._core, lease_id, extension.time_limit_s)
        return await self.lease(caller, lease_id)

    async def why(self, caller: Identity, lease_id: str) -> PendingReasonView:
        """Explain why a request waits.

        Raises:
            NotFound: the lease does not exist.
            Conflict: it does not wait.
            TooManyStreams: the caller waits for too many explanations.
        """
        lease = await access.find_lease(self._core, caller, lease_id)
        if lease.state is not LeaseState.REQUESTED:
            raise Conflict(f"lease {lease_id} is {lease.state}: it does not wait")
        if lease.is_held:
            raise Conflict(f"lease {lease_id} is held: its job waits for other jobs or for a request, and not for GPUs")
        with self._streams.acquire(access.EXPLANATIONS, caller.name):
            return await self._explainer.explain(caller.name, lease)

    async def force(self, caller: Identity, lease_id: str) -> LeaseView:
        """Free the GPUs of an ending lease without proof that its containers are gone.

        Raises:
            NotAllowed, NotFound: the caller is not an administrator, or the lease does not exist.
            Conflict: the lease is not ending.
        """
        require_admin(caller, "free GPUs without proof")
        await access.find_lease(self._core, caller, lease_id)
        await self._core.ledger.change(mutations.force_release(lease_id, caller.name))
        return await self.lease(caller, lease_id)

    # -- jobs -----------------------------------------------------------------------------------------------------

    async def request_job(self, caller: Identity, request: JobRequest) -> JobView:
        """Request workers; a run that has a job already gets that one.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting, TooManyJobs: the request is refused.
            NotFound: the hub has no user of a name in `port_users`.
        """
        await self._validate(request)
        job = await self._admission.submit_job(caller, request)
        return await self.job(caller, job.id)

    async def request_array(self, caller: Identity, request: ArrayRequest) -> Iterator[JobView]:
        """Request an array of jobs with one GPU each, all or none; runs that have a job already keep it.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting, TooManyJobs: the request is refused.
        """
        await self._validate(request.job, is_array=True)
        return await self._view_rows(caller, await self._admission.submit_array(caller, request))

    async def request_group(self, caller: Identity, request: GroupRequest) -> Iterator[JobView]:
        """Request a job group: detached jobs that get their GPUs at the same moment; all are accepted, or none.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting, TooManyJobs: the request is refused.
            NotFound: the hub has no user of a name in `port_users`.
        """
        for job in request.jobs:
            await self._validate(job)
        return await self._view_rows(caller, await self._admission.submit_group(caller, request))

    async def _view_rows(self, caller: Identity, rows: Iterable[JobRow]) -> Iterator[JobView]:
        jobs = [await access.find_job(self._core, caller, row.id) for row in rows]
        return await views.view_jobs(self._core, [(job, await views.read_job_lease(self._core, job)) for job in jobs])

    async def check_job(self, caller: Identity, request: JobCheckRequest) -> None:
        """Refuse what `request_job`, `request_array` or `request_group` would refuse, and request nothing.

        Raises:
            NotAllowed, InvalidRequest, TooManyWaiting, TooManyJobs, NotFound: likewise.
        """
        for job in (request.job, *request.others):
            await self._validate(job, is_array=request.count is not None)
        await self._admission.check_jobs(caller, request)

    async def _validate(self, request: JobRequest, *, is_array: bool = False) -> None:
        if is_array and request.port is not None:
            raise InvalidRequest("port: the jobs of an array have none; request a single job")
        self._backend.validate_request(request)
        if request.max_retries and not self._backend.capabilities.containers:
            raise InvalidRequest("max_retries: a job on nodes without Docker cannot start again; leave it at 0")
        if request.port is not None and not self._backend.capabilities.containers:
            raise InvalidRequest(
                "port: on nodes without Docker, other users' programs could answer at a job's port; leave it out"
            )
        for name in request.port_users:
            await require_user(self._users, name)

    async def job(self, caller: Identity, job_id: str) -> JobView:
        """Return a job, ended or not.

        Raises:
            NotFound: the job does not exist, or it belongs to another user.
        """
        return await views.view_job(self._core, await access.find_job(self._core, caller, job_id))

    async def wait_job(self, caller: Identity, job_id: str, version: int | None, wait_s: float) -> JobView:
        """Return the job as soon as its version differs from `version`, at the latest after `wait_s` seconds.

        Raises:
            NotFound, TooManyStreams: the job cannot be watched.
        """

        async def read_version() -> tuple[int, bool]:
            job = await self.job(caller, job_id)
            return job.version, job.state is JobState.WAITING

        await self._poll(caller, job_id, read_version, version, wait_s)
        return await self.job(caller, job_id)

    async def jobs(self, caller: Identity, *, ended: bool = False) -> Iterator[JobView]:
        """Return jobs that have not ended: the caller's own, or all for an administrator.

        With `ended`, recently ended jobs as well: the `MAX_JOBS` newest ones, newest first.
        """
        ledger = self._core.ledger
        jobs = ledger.snapshot.jobs.values() if caller.sees_all else ledger.find_jobs("jobs of owner", caller.name)
        rows = [(job, ledger.snapshot.leases[job.lease_id]) for job in sorted(jobs, key=_job_order)]
        if ended:
            rows = rows[-MAX_JOBS:]
            shown = {job.id for job, _ in rows}
            ended_rows = await views.read_ended_jobs(self._core, caller, MAX_JOBS - len(rows))
            rows += [(job, lease) for job, lease in ended_rows if job.id not in shown]
            rows.sort(key=lambda row: _job_order(row[0]), reverse=True)
        return await views.view_jobs(self._core, rows)

    async def renew(self, caller: Identity, job_id: str) -> None:
        """Record a heartbeat of the job's notebook.

        Raises:
            NotFound: the job does not exist.
            Conflict: the job has ended.
        """
        job = await access.find_job(self._core, caller, job_id)
        if job.ended_at is not None:
            raise Conflict(f"job {job_id} has ended: {job.reason}")
        self._core.heartbeats.record(job_id)

    async def stop_job(self, caller: Identity, job_id: str) -> JobView:
        """Stop a job; a repeated call changes nothing."""
        job = await access.find_job(self._core, caller, job_id)
        reason = "stopped" if caller.name == job.owner else f"ended by {caller.name}"

        def edit(transaction: Transaction) -> None:
            if job_id in transaction.jobs:
                transaction.put_job(job_states.cancel(transaction.jobs[job_id], reason, transaction.now))

        await self._core.ledger.change(edit)
        return await self.job(caller, job_id)

    async def _wait_state(
        self, caller: Identity, lease_id: str, is_reached: Callable[[LeaseRow], bool], wait_s: float
    ) -> None:
        async def read_version() -> tuple[int, bool]:
            row = await access.find_lease(self._core, caller, lease_id)
            self._note_poll(caller, row)
            return int(is_reached(row)), row.state is LeaseState.REQUESTED

        await self._poll(caller, lease_id, read_version, 0, wait_s)

    async def _poll(
        self, caller: Identity, subject_id: str, read_version: ReadVersion, version: int | None, wait_s: float
    ) -> None:
        core = self._core
        # The hub's spawner waits for all users, so it has no limit.
        slot = nullcontext() if caller.sees_all or not wait_s else self._streams.acquire(access.POLLS, caller.name)
        with slot:
            await wait_for_change(
                ledger=core.ledger,
                clock=core.clock,
                subject_id=subject_id,
                read_version=read_version,
                version=version,
                wait_s=wait_s,
            )

    def _note_poll(self, caller: Identity, lease: LeaseRow) -> None:
        if caller.any_owner and lease.is_open:
            self._core.heartbeats.record(lease.id)


def _job_order(job: JobRow) -> tuple[float, str]:
    return job.created_at, job.run_id


def _open_lease(transaction: Transaction, lease_id: str) -> LeaseRow:
    lease = transaction.leases.get(lease_id)
    if lease is None:
        raise Conflict(f"lease {lease_id} has ended")
    return lease
