"""Where requests come in: checked, and kept in the ledger."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping

from gpuhub import names
from gpuhub.broker import allowances, audit, intake, leases, schedule
from gpuhub.broker.auth import Identity
from gpuhub.broker.core import Core
from gpuhub.broker.drafts import Draft
from gpuhub.broker.intake import Asker
from gpuhub.broker.rows import Ask, JobRow, LeaseRow
from gpuhub.broker.schemas import ArrayRequest, JobRequest, LeaseRequest, LeaseState
from gpuhub.errors import Conflict, InvalidRequest, NotAllowed
from gpuhub.gpus import Card


class Desk:
    """Takes requests for notebooks, jobs and arrays."""

    def __init__(self, core: Core, refuse: Callable[[LeaseRow], None] | None = None) -> None:
        """`refuse` raises for what nobody could ever grant, besides what the engine and the settings say."""
        self._core = core
        self._refuse = refuse
        #: Why what is asked for cannot ever be granted, as long as there are these cards.
        self._cards: Mapping[str, tuple[Card, ...] | None] = {}
        self._verdicts: dict[Ask, str | None] = {}

    async def request_lease(self, who: Identity, request: LeaseRequest) -> LeaseRow:
        """A notebook's lease, see `Broker.request_lease`."""
        owner = _choose_owner(who, request.owner)
        if request.groups and not who.any_owner:
            raise NotAllowed(f"{who.name} may not say in which groups somebody is")
        asker = self._asker(who, owner, frozenset(request.groups) if who.any_owner else who.groups)
        known = await self._find_by_key(owner, request.key)
        if known is None:
            known = await self._core.ledger.change(lambda draft: self._add_notebook(draft, asker, request))
        elif (known.profile, known.subject) != (request.profile, request.server):
            raise Conflict(f"the key {request.key!r} was used before, to ask for something else")
        return known

    async def request_job(self, who: Identity, request: JobRequest) -> JobRow:
        """A job, see `Broker.request_job`."""
        _refuse_services(who)
        known = await asyncio.to_thread(self._core.store.jobs_of_runs, who.name, [request.run_id])
        if request.run_id in known:
            return known[request.run_id]
        return (await self._add_all(who, [request], None, {}))[0]

    async def request_array(self, who: Identity, request: ArrayRequest) -> list[JobRow]:
        """The jobs of an array, see `Broker.request_array`."""
        _refuse_services(who)
        requests = split_array(request)
        known = await asyncio.to_thread(self._core.store.jobs_of_runs, who.name, [one.run_id for one in requests])
        if len(known) == len(requests):
            return [known[one.run_id] for one in requests]
        return await self._add_all(who, requests, request.job.run_id, known)

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _find_by_key(self, owner: str, key: str) -> LeaseRow | None:
        lease_id = self._core.ledger.index.one("key", owner, key)
        found = self._core.ledger.snapshot.leases.get(lease_id or "")
        return found or await asyncio.to_thread(self._core.store.lease_of_key, owner, key)

    def _asker(self, who: Identity, owner: str, hub_groups: frozenset[str]) -> Asker:
        self._core.note_groups(owner, hub_groups)
        return Asker(
            owner=owner,
            groups=allowances.groups_of(self._core.cluster, owner, hub_groups),
            rights=self._core.rights(owner),
            may_hurry=who.sees_all,
        )

    def _add_notebook(self, draft: Draft, asker: Asker, request: LeaseRequest) -> LeaseRow:
        same = draft.index.one("key", asker.owner, request.key)
        if same is not None:
            return draft.leases[same]
        known = intake.notebook_lease(draft, asker.owner, request.server)
        if known is not None and known.profile == request.profile:
            return known
        if known is not None and known.state is LeaseState.ACTIVE:
            raise Conflict(
                f"this server of {asker.owner} runs with profile {known.profile!r}: stop it before starting it with "
                f"{request.profile!r}"
            )
        lease = intake.build_notebook_lease(cluster=self._core.cluster, draft=draft, asker=asker, request=request)
        self._refuse_hopeless(lease, asker)
        if known is not None:
            draft.put_lease(leases.release(known, f"{request.profile} was chosen instead", draft.now))
        intake.refuse_too_many(draft, asker)
        return draft.put_lease(lease)

    async def _add_all(
        self, who: Identity, requests: list[JobRequest], array: str | None, known: dict[str, JobRow]
    ) -> list[JobRow]:
        def edit(draft: Draft) -> list[JobRow]:
            notebook = intake.notebook_lease(draft, who.name, requests[0].server)
            # The token of a notebook may not tell its owner's groups; its spawner did.
            groups = who.groups | (frozenset(notebook.groups) if notebook is not None else frozenset())
            asker = self._asker(who, who.name, groups)
            opened = {run: draft.jobs[job] for run in _runs(requests) if (job := draft.index.one("run", who.name, run))}
            there = {**known, **opened}
            new = [request for request in requests if request.run_id not in there]
            intake.refuse_too_many(draft, asker, jobs=len(new))
            added = {one.run_id: self._add_job(draft, asker, one, notebook, array) for one in new}
            return [there.get(run) or added[run] for run in _runs(requests)]

        return await self._core.ledger.change(edit)

    def _add_job(
        self, draft: Draft, asker: Asker, request: JobRequest, notebook: LeaseRow | None, array: str | None
    ) -> JobRow:
        joined = None if request.joins is None else intake.find_joined(draft, asker.owner, request.joins)
        job, lease = intake.build_job(
            cluster=self._core.cluster,
            draft=draft,
            asker=asker,
            request=request,
            notebook=notebook,
            joined=joined,
            array=array,
        )
        self._refuse_hopeless(
            lease,
            asker,
            notebook=0 if notebook is None or job.detached else len(notebook.held),
            joined=0 if joined is None else len(draft.leases[joined.lease_id].held),
        )
        draft.put_lease(lease)
        return draft.put_job(job)

    def _refuse_hopeless(self, lease: LeaseRow, asker: Asker, *, notebook: int = 0, joined: int = 0) -> None:
        if self._core.cards() is not self._cards:
            self._cards, self._verdicts = self._core.cards(), {}
        if lease.ask not in self._verdicts:
            request = schedule.build_request(lease)
            self._verdicts[lease.ask] = self._core.engine.infeasible(request, self._cards)
        why = self._verdicts[lease.ask]
        if why is not None:
            raise InvalidRequest(why)
        if self._refuse is not None:
            self._refuse(lease)
        intake.refuse_beyond(lease, asker.rights, notebook=notebook, joined=joined)


def split_array(request: ArrayRequest) -> list[JobRequest]:
    """The requests of an array's jobs.

    Raises:
        InvalidRequest: a job of it is for more than one GPU or joins another run, or a run id would be too long.
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


def _runs(requests: list[JobRequest]) -> list[str]:
    return [request.run_id for request in requests]


def _refuse_services(who: Identity) -> None:
    if not who.is_user:
        raise NotAllowed("a job is asked for by a user, not by a service")


def _choose_owner(who: Identity, named: str | None) -> str:
    if named is None and who.is_user:
        return who.name
    if named is None:
        raise InvalidRequest("owner: a service says for which user it asks")
    audit.note_owner(named)
    if named != who.name and not who.any_owner:
        raise NotAllowed(f"{who.name} may not ask for GPUs in the name of {named}")
    return named
