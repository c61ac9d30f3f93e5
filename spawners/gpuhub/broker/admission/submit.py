"""Admission: checks requests and enters them into the ledger."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gpuhub.broker import audit
from gpuhub.broker.admission import limits, validate
from gpuhub.broker.admission.key_lookups import KeyLookups
from gpuhub.broker.admission.validate import Requester
from gpuhub.broker.state import chains
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker_api.schemas import (
    ArrayRequest,
    GroupRequest,
    JobCheckRequest,
    JobRequest,
    LeaseRequest,
    LeaseState,
)
from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, InvalidRequest, NotAllowed
from gpuhub.common.gpu import GpuSpec
from gpuhub.domain import job_states, lease_states, owner_limits, scheduler_input
from gpuhub.domain.models import Identity, JobRow, LeaseRow, ResourceRequest
from gpuhub.domain.rate_limit import RateLimit, RateLimiter
from gpuhub.scheduler.interface import SchedulingRequest

#: Leases and jobs of one owner, which stay in the store for days; each job of an array counts.
CREATIONS = RateLimit(burst=2000, per_second=1, what="leases and jobs created")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Why resources can never be granted, and the error that says so."""

    kind: type[InvalidRequest | NotAllowed]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    """The other jobs that requested jobs belong to or wait for."""

    #: Run id of their array; None for a single job.
    array: str | None = None
    #: Number of the array's jobs that wait for GPUs or run at the same time; None for all.
    limit: int | None = None
    #: The run or array that must succeed before.
    after: str | None = None
    #: Whether the jobs of the array are a job group, which starts as a whole.
    is_group: bool = False
    #: Seconds that jobs of the group run on when all others have ended, by run id.
    auxiliary: Mapping[str, int] = field(default_factory=dict)


class AdmissionController:
    """Accepts or refuses requests for notebooks, jobs and arrays."""

    def __init__(self, core: BrokerState, refuse: Callable[[LeaseRow], None] | None = None) -> None:
        """`refuse` raises for leases that the backend can never grant."""
        self._core = core
        self._refuse = refuse
        self._lookups = KeyLookups(core.store)
        self._creations = RateLimiter(CREATIONS, core.clock.monotonic)
        #: Refusals of resources that can never be granted to members of these groups, valid while the cluster has these
        #: GPUs.
        self._cards: Mapping[str, tuple[GpuSpec, ...] | None] = {}
        self._refusals: dict[tuple[ResourceRequest, frozenset[str]], _Refusal | None] = {}
        self._node_groups = core.cluster.node_groups

    async def submit_notebook(self, who: Identity, request: LeaseRequest) -> LeaseRow:
        """Submit a notebook's request; see `BrokerOperations.request_lease`."""
        owner = _find_owner(who, request.owner)
        if request.groups and not who.any_owner:
            raise NotAllowed(f"{who.name} may not set the groups of a user")
        requester = self._build_requester(who, owner, frozenset(request.groups) if who.any_owner else who.groups)
        existing = await self._find_by_key(owner, request.key)
        if existing is None:
            existing = await self._core.ledger.change(
                lambda transaction: self._add_notebook(transaction, requester, request)
            )
        elif (existing.profile, existing.subject) != (request.profile, request.server):
            raise Conflict(f"the key {request.key!r} was used for another request")
        return existing

    async def submit_job(self, who: Identity, request: JobRequest) -> JobRow:
        """Submit a job; see `BrokerOperations.request_job`."""
        _check_is_user(who)
        return (await self._submit(who, [request], _Links(after=request.after)))[0]

    async def submit_array(self, who: Identity, request: ArrayRequest) -> list[JobRow]:
        """Submit the jobs of an array; see `BrokerOperations.request_array`."""
        _check_is_user(who)
        self._creations.check(who.name)
        links = _Links(array=request.job.run_id, limit=request.max_running, after=request.job.after)
        return await self._submit(who, split_array(request), links)

    async def submit_group(self, who: Identity, request: GroupRequest) -> list[JobRow]:
        """Submit the jobs of a job group; see `BrokerOperations.request_group`."""
        _check_is_user(who)
        _check_group(request.jobs, request.auxiliary)
        links = _Links(array=request.run_id, after=request.jobs[0].after, is_group=True, auxiliary=request.auxiliary)
        return await self._submit(who, request.jobs, links)

    async def _submit(self, who: Identity, requests: Sequence[JobRequest], links: _Links) -> list[JobRow]:
        """Return the jobs of these requests; those that do not exist yet are added in one transaction."""
        runs = _runs(requests)
        existing = await asyncio.to_thread(self._core.store.find_jobs_by_run, who.name, runs)
        if len(existing) == len(runs):
            return [existing[run] for run in runs]
        return await self._core.ledger.change(await self._build_edit(who, requests, links, existing))

    async def check_jobs(self, who: Identity, request: JobCheckRequest) -> None:
        """Refuse what `submit_job`, `submit_array` or `submit_group` would refuse, and submit nothing."""
        _check_is_user(who)
        job = request.job
        requests: Sequence[JobRequest] = [job]
        links = _Links(after=job.after)
        if request.count is not None:
            requests = split_array(ArrayRequest(job=job, count=request.count))
            links = replace(links, array=job.run_id)
        if request.others:
            requests = [job, *request.others]
            _check_group(requests)
            links = replace(links, array=job.run_id, is_group=True)
        edit = await self._build_edit(who, requests, links, {})

        def check(transaction: Transaction) -> None:
            start = transaction.savepoint()
            edit(transaction)
            transaction.rollback_to(start)
            self._creations.refund(who.name, len(requests) - limits.count_array(len(requests)))

        await self._core.ledger.change(check)

    # -- checks and edits -------------------------------------------------------------------------------------------

    async def _find_by_key(self, owner: str, key: str) -> LeaseRow | None:
        lease_id = self._core.ledger.index.find_one("key", owner, key)
        found = self._core.ledger.snapshot.leases.get(lease_id or "")
        return found or await self._lookups.find(owner, key)

    def _build_requester(self, who: Identity, owner: str, hub_groups: frozenset[str]) -> Requester:
        self._core.scheduler_sync.set_groups(owner, hub_groups)
        return Requester(
            owner=owner,
            groups=owner_limits.list_groups(self._core.cluster, owner, hub_groups),
            quota=self._core.scheduler_sync.get_quota(owner),
            may_prioritize=who.sees_all,
        )

    def _add_notebook(self, transaction: Transaction, requester: Requester, request: LeaseRequest) -> LeaseRow:
        same = transaction.index.find_one("key", requester.owner, request.key)
        if same is not None:
            return transaction.leases[same]
        existing = validate.find_notebook_lease(transaction, requester.owner, request.server)
        if existing is not None and existing.profile == request.profile:
            return existing
        if existing is not None and existing.state is LeaseState.ACTIVE:
            raise Conflict(
                f"this server of {requester.owner} runs with profile {existing.profile!r}: stop it before you start it "
                f"with {request.profile!r}"
            )
        lease = validate.build_notebook_lease(
            cluster=self._core.cluster, transaction=transaction, requester=requester, request=request
        )
        self._check_feasible(lease, requester)
        self._creations.acquire(requester.owner)
        if existing is not None:
            transaction.put_lease(
                lease_states.release(existing, f"{request.profile} was chosen instead", transaction.now)
            )
        limits.check_count_limits(transaction, requester)
        return transaction.put_lease(lease)

    async def _build_edit(
        self, who: Identity, requests: Sequence[JobRequest], links: _Links, existing: dict[str, JobRow]
    ) -> Callable[[Transaction], list[JobRow]]:
        """Return the change that adds these jobs, less those that exist."""
        earlier: Sequence[JobRow] = ()
        if links.after is not None:
            earlier = await asyncio.to_thread(self._core.store.find_run_or_array, who.name, links.after)

        def edit(transaction: Transaction) -> list[JobRow]:
            notebook = validate.find_notebook_lease(transaction, who.name, requests[0].server)
            # A notebook's token may not carry its owner's groups; its spawner reported them.
            groups = who.groups | (frozenset(notebook.groups) if notebook is not None else frozenset())
            requester = self._build_requester(who, who.name, groups)
            opened = {
                run: transaction.jobs[job]
                for run in _runs(requests)
                if (job := transaction.index.find_one("run", who.name, run))
            }
            present = {**existing, **opened}
            new = [request for request in requests if request.run_id not in present]
            is_open = links.after is not None and find_predecessor(transaction, who.name, links.after, earlier)
            with self._count_creations(who.name, len(new)):
                if new:
                    limits.check_count_limits(transaction, requester, jobs=len(new))
                added = {
                    request_item.run_id: self._add_job(
                        transaction, requester, request_item, notebook, links if is_open else replace(links, after=None)
                    )
                    for request_item in new
                }
            if links.is_group and added:
                self._check_bundle([transaction.leases[job.lease_id] for job in added.values()], requester)
            if links.array is not None:
                chains.fill_array(transaction, who.name, links.array)
            return [present.get(run) or added[run] for run in _runs(requests)]

        return edit

    @contextmanager
    def _count_creations(self, owner: str, count: int) -> Iterator[None]:
        """Count created jobs; of refused ones only as many as the requests that they would count as."""
        self._creations.acquire(owner, count)
        try:
            yield
        except GpuhubError:
            self._creations.refund(owner, count - limits.count_array(count))
            raise

    def _add_job(
        self,
        transaction: Transaction,
        requester: Requester,
        request: JobRequest,
        notebook: LeaseRow | None,
        links: _Links,
    ) -> JobRow:
        joined = None if request.joins is None else validate.find_joined(transaction, requester.owner, request.joins)
        job, lease = validate.build_job(
            cluster=self._core.cluster,
            transaction=transaction,
            requester=requester,
            request=request,
            notebook=notebook,
            joined=joined,
            array=links.array,
            array_limit=links.limit,
            after=links.after,
            is_held=links.after is not None or links.limit is not None,
            bundle=links.array if links.is_group else None,
            auxiliary_s=links.auxiliary.get(request.run_id),
        )
        self._check_feasible(
            lease,
            requester,
            notebook=0 if notebook is None or job.detached else len(notebook.held),
            joined=0 if joined is None else len(transaction.leases[joined.lease_id].held),
        )
        transaction.put_lease(lease)
        return transaction.put_job(job)

    def _check_feasible(self, lease: LeaseRow, requester: Requester, *, notebook: int = 0, joined: int = 0) -> None:
        if self._core.capacity.cards is not self._cards:
            self._cards, self._refusals = self._core.capacity.cards, {}
        request = scheduler_input.build_request(lease)
        key = replace(lease.resources, bundle=None, auxiliary_s=None), self._node_groups & request.groups
        if key not in self._refusals:
            self._refusals[key] = self._find_refusal(request)
        refusal = self._refusals[key]
        if refusal is not None:
            raise refusal.kind(refusal.text)
        if self._refuse is not None:
            self._refuse(lease)
        limits.check_gpu_limit(lease, requester.quota, notebook=notebook, joined=joined)

    def _check_bundle(self, leases: Sequence[LeaseRow], requester: Requester) -> None:
        requests = [scheduler_input.build_request(lease) for lease in leases]
        limits.check_group_limit(requests, requester.quota)
        text = self._core.scheduler.explain_infeasible_bundle(requests, self._core.capacity.cards)
        if text is not None:
            raise InvalidRequest(text)

    def _find_refusal(self, request: SchedulingRequest) -> _Refusal | None:
        """Return why a request can never be granted; `NotAllowed` if it could for members of other groups."""
        explain = self._core.scheduler.explain_infeasible
        text = explain(request, self._cards)
        if text is None:
            return None
        of_member = replace(request, groups=request.groups | self._node_groups)
        is_closed = not self._node_groups <= request.groups and explain(of_member, self._cards) is None
        return _Refusal(kind=NotAllowed if is_closed else InvalidRequest, text=text)


def split_array(request: ArrayRequest) -> list[JobRequest]:
    """Return the requests of an array's jobs.

    Raises:
        InvalidRequest: A job of the array has more than one GPU or joins another run, or a run id would be too long.
    """
    job = request.job
    if (job.nnodes, job.nproc_per_node, job.gpus or 1, job.min_nnodes or 1) != (1, 1, 1, 1):
        raise InvalidRequest("job: each job of an array is for one GPU: leave nnodes, nproc_per_node and gpus at 1")
    if job.joins is not None:
        raise InvalidRequest("job.joins: jobs of an array stand alone")
    runs = [f"{job.run_id}-{number}" for number in range(request.count)]
    if not re.fullmatch(names.RUN_PATTERN, runs[-1]):
        raise InvalidRequest(f"job.run_id: {runs[-1]!r} is too long for a run id: choose a shorter one")
    return [job.model_copy(update={"run_id": run}) for run in runs]


def _check_group(jobs: Sequence[JobRequest], auxiliary: Collection[str] = ()) -> None:
    if not all(job.detached for job in jobs):
        raise InvalidRequest("jobs: all jobs of a job group are detached, and so wait without a notebook")
    if len({job.after for job in jobs}) > 1:
        raise InvalidRequest("jobs: all jobs of a job group have the same `after`, because they start together")
    runs = set(_runs(jobs))
    if len(runs) < len(jobs):
        raise InvalidRequest("jobs: each job of a job group needs a run_id of its own")
    if unknown := sorted(set(auxiliary) - runs):
        raise InvalidRequest(f"auxiliary: {unknown[0]} is not a job of the group")
    if runs == set(auxiliary):
        raise InvalidRequest("auxiliary: at least one job of the group ends by itself; leave it out")


def find_predecessor(transaction: Transaction, owner: str, run: str, stored: Sequence[JobRow]) -> bool:
    """Return whether a job has to wait for an owner's run or array `run`; False if that has succeeded already.

    Args:
        transaction: The open jobs.
        owner: The owner of both.
        run: Run id of a job or an array.
        stored: Its jobs in the store, ended or not, read before the transaction.

    Raises:
        InvalidRequest: There is no such run, it did not succeed, or it belongs to a notebook.
        Conflict: It has ended in the meantime.
    """
    ids = transaction.index.find("run", owner, run) or transaction.index.find("array", owner, run)
    is_open = {transaction.jobs[job_id].run_id for job_id in ids}
    ended = [job for job in stored if job.run_id not in is_open]
    if not ids and not stored:
        raise InvalidRequest(f"after: you have no run {run}, or it ended long ago")
    if any(job.is_open for job in ended):
        raise Conflict(f"after: {run} has just ended; send the request again")
    if not all(job.detached for job in (*stored, *(transaction.jobs[job_id] for job_id in ids))):
        raise InvalidRequest(f"after: {run} belongs to a notebook, and only a detached job shows whether it succeeded")
    failed = next((job for job in ended if not job_states.has_succeeded(job)), None)
    if failed is not None:
        raise InvalidRequest(f"after: {failed.run_id} did not succeed: {failed.reason or 'no reason is known'}")
    return bool(ids)


def _runs(requests: Sequence[JobRequest]) -> list[str]:
    return [request.run_id for request in requests]


def _check_is_user(who: Identity) -> None:
    if not who.is_user:
        raise NotAllowed("only users can submit jobs, not services")


def _find_owner(who: Identity, named: str | None) -> str:
    if named is None and who.is_user:
        return who.name
    if named is None:
        raise InvalidRequest("owner: a service must name the user for whom it makes the request")
    audit.note_owner(named)
    if named != who.name and not who.any_owner:
        raise NotAllowed(f"{who.name} may not ask for GPUs in the name of {named}")
    return named
