"""Operations on output shares: what owners do with theirs, and what viewers see."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from gpuhub.broker import audit
from gpuhub.broker.admission import access
from gpuhub.broker.admission.users import UserDirectory, require_user
from gpuhub.broker.files.user_files import FileStream, UserFiles
from gpuhub.broker.operations.live import PERIOD_S
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.views import serializers
from gpuhub.broker_api.schemas import OutputShareView
from gpuhub.broker_api.schemas.live import SharedJobView
from gpuhub.common.errors import InvalidRequest, NotAllowed, NotFound
from gpuhub.domain.clock import wait_event
from gpuhub.domain.models import Identity, JobRow, LeasedGpu, OutputShareRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJob:
    """A job that a caller may view; `share` is None for its owner."""

    job: JobRow
    share: OutputShareRow | None


class ShareOperations:
    """Shares jobs' outputs with other users, read-only."""

    def __init__(self, core: BrokerState, files: UserFiles, users: UserDirectory) -> None:
        """`users` are the hub's."""
        self._core = core
        self._shares = core.shares
        self._files = files
        self._users = users

    def list_shares(self, caller: Identity) -> Iterator[OutputShareView]:
        """Yield the caller's shares and those with the caller; for administrators those of all users."""
        rows: Sequence[OutputShareRow] = ()
        if caller.sees_all:
            rows = self._shares.select()
        elif caller.is_user:
            rows = [*self._shares.select(owner=caller.name), *self._shares.select(viewer=caller.name)]
        return (serializers.build_output_share(row, caller.name) for row in rows)

    async def share(self, caller: Identity, job_id: str, viewer: str, for_s: int) -> OutputShareView:
        """Share the output of the caller's job with a user; a repeated call sets the expiry again.

        Raises:
            NotFound: the caller has no such job, or the hub has no such user.
            NotAllowed, Conflict, InvalidRequest: the job cannot be shared, or not with this user.
        """
        job = await self._files.find_detached_job(caller, job_id)
        await require_viewer(self._users, job.owner, viewer, "the job's")
        now = self._core.clock.now()
        row = OutputShareRow(
            subject=job.id,
            viewer=viewer,
            owner=job.owner,
            run_id=job.run_id,
            name=job.name,
            created_at=now,
            expires_at=now + for_s,
        )
        await self._shares.put(row)
        audit.note_reason(f"{job.run_id} with {viewer} for {for_s} s")
        return serializers.build_output_share(row, caller.name)

    async def end(self, caller: Identity, job_id: str, viewer: str | None = None) -> list[OutputShareView]:
        """End the shares of the caller's job, or the one with a user, and return those that were open.

        Raises:
            NotFound, NotAllowed: the caller has no such job.
        """
        job = await self._files.find_own_job(caller, job_id)
        rows = [row for row in self._shares.list_of(job.id) if viewer in (None, row.viewer)]
        await self._shares.end(rows)
        return _view(rows, caller)

    async def end_all(self, caller: Identity, user: str) -> list[OutputShareView]:
        """End all shares of a user and with a user, who has lost the access, and return them.

        Raises:
            NotAllowed: the caller is neither an administrator nor the hub.
        """
        if not caller.sees_all:
            raise NotAllowed("only administrators and the hub end the shares of a user; end those of a job instead")
        audit.note_owner(user)
        rows = [*self._shares.select(owner=user), *self._shares.select(viewer=user)]
        await self._shares.end(rows)
        return _view(rows, caller)

    async def find_shared_job(self, caller: Identity, job_id: str) -> SharedJob:
        """Return a job that is the caller's own, or that its owner shares with the caller.

        Raises:
            NotFound: there is no such job.
            NotAllowed: the caller is an administrator or a service, with whom it is not shared.
        """
        job = await access.read_job(self._core, job_id)
        if job is not None:
            audit.note_owner(job.owner)
        share = self._shares.find(job_id, caller.name) if caller.is_user else None
        is_viewer = job is not None and caller.is_user and (share is not None or caller.name == job.owner)
        if job is None or not (is_viewer or caller.sees_all):
            raise NotFound(f"this job is not shared with {caller.name}, or no longer: ask its owner")
        if not is_viewer:
            raise NotAllowed(f"only {job.owner} and the users with whom {job.owner} shares this job may view it")
        return SharedJob(job=job, share=share)

    async def wait_until_ended(self, shared: SharedJob) -> None:
        """Return when the share has ended; never for the owner."""
        if shared.share is None:
            await asyncio.Event().wait()
        else:
            await self._shares.wait_until_ended(shared.job.id, shared.share.viewer)

    async def read_output(self, caller: Identity, shared: SharedJob, *, tail: int, follow: bool) -> FileStream:
        """Return the last `tail` bytes of a shared job's output, and with `follow` what comes until the job's end.

        Raises:
            Conflict, TooManyStreams, Unavailable: the output cannot be read.
        """
        return await self._files.read_shared_logs(caller.name, shared.job, tail=tail, follow=follow)

    async def watch_job(self, caller: Identity, job_id: str) -> AsyncIterator[str]:
        """Yield a shared job as JSON whenever it changes, at most once a second, until the share ends.

        Raises:
            NotFound, NotAllowed: at the beginning, as `find_shared_job`.
        """
        sent, shared = "", await self.find_shared_job(caller, job_id)
        ended = asyncio.Event()
        waiting = asyncio.ensure_future(self._set_at_end(shared, ended))
        try:
            while not ended.is_set():
                text = (await self._build_view(shared)).model_dump_json()
                if text != sent:
                    sent = text
                    yield text
                await wait_event(ended, PERIOD_S)
                try:
                    shared = await self.find_shared_job(caller, job_id)
                except NotFound:
                    return
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def _set_at_end(self, shared: SharedJob, ended: asyncio.Event) -> None:
        await self.wait_until_ended(shared)
        ended.set()

    async def _build_view(self, shared: SharedJob) -> SharedJobView:
        core, job = self._core, shared.job
        lease = await access.read_lease(core, job.lease_id)
        if lease is None:
            raise NotFound(f"job {job.id} is forgotten: it ended long ago")
        place = core.queue_positions.refresh().get(lease.id)
        return SharedJobView(
            owner=job.owner,
            job=serializers.build_job_summary(job, lease, place),
            gpus=_describe_gpus(lease.gpus),
            expires_at=None if shared.share is None else serializers.to_datetime(shared.share.expires_at),
        )


async def require_viewer(users: UserDirectory, owner: str, viewer: str, whose: str) -> None:
    """Check the user with whom an owner shares something; `whose` is it, such as `the job's`.

    Raises:
        InvalidRequest: the viewer is the owner.
        NotFound: the hub has no such user.
        HubUnreachable: the hub does not answer.
    """
    if viewer == owner:
        raise InvalidRequest(f"{viewer} is {whose} owner: name another user")
    await require_user(users, viewer)


def _view(rows: Sequence[OutputShareRow], caller: Identity) -> list[OutputShareView]:
    return [serializers.build_output_share(row, caller.name) for row in rows]


def _describe_gpus(gpus: Sequence[LeasedGpu]) -> str:
    counted = Counter(gpu.model if gpu.share == 1 else f"1/{gpu.share} of {gpu.model}" for gpu in gpus)
    return ", ".join(f"{count} × {model}" for model, count in counted.items()) or "no GPU"
