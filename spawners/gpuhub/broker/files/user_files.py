"""Files, logs and job states in users' homes, for their owners only, through their couriers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

from pydantic import BaseModel, Field, ValidationError

from gpuhub.broker.admission import access
from gpuhub.broker.files.courier_client import CourierClient, Couriers
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.errors import SizeLimitExceeded
from gpuhub.broker_api.schemas import UploadResult
from gpuhub.common.errors import Conflict, GpuhubError, InvalidRequest, NodeUnreachable, NotAllowed, Unavailable
from gpuhub.common.units import format_size
from gpuhub.domain.models import Identity, JobRow

R = TypeVar("R", bound=BaseModel)

#: Maximum silence of a client or courier during a transfer, seconds.
SILENCE_TIMEOUT_S = 120.0
#: Time for which the rest of a refused upload is still received, so that the client reads the error, seconds.
DRAIN_TIMEOUT_S = 10.0
#: Largest status of a detached job, bytes. It is a file of the user, so it may have any size.
MAX_STATE = 256 * 1024
#: Largest page that a notebook is rendered to, bytes.
MAX_PAGE = 64 * 1024 * 1024

_NO_CONTAINERS = "views of notebooks need Docker on the nodes, and this cluster's nodes have none"


class NotebookFile(BaseModel):
    """A saved notebook as a courier reports it."""

    #: Milliseconds since 1970, before the year 10000.
    saved_ms: Annotated[int, Field(ge=0, lt=253_402_300_800_000)]
    size: Annotated[int, Field(ge=0, lt=2**53, alias="bytes")]


class FileStream:
    """A stream of bytes; the caller must close it in any case."""

    def __init__(self, parts: AsyncIterator[bytes], stack: AsyncExitStack) -> None:
        self.parts = parts
        self._stack = stack

    async def close(self) -> None:
        """End the transfer, if it still runs."""
        await self._stack.aclose()


class UserFiles:
    """Operations on the files of callers' homes."""

    def __init__(self, core: BrokerState, couriers: Couriers, *, has_containers: bool) -> None:
        self._core = core
        self.couriers = couriers
        self._has_containers = has_containers
        #: Limits of concurrent transfers, logs and terminals.
        self.streams = access.ConcurrencyLimiter()
        #: Held by owner while one of the owner's notebooks is rendered.
        self._rendering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def upload(self, caller: Identity, path: str, body: AsyncIterator[bytes]) -> UploadResult:
        """Unpack a tar below a folder of the caller's home.

        Raises:
            NotAllowed: the caller is a service, which has no home.
            InvalidRequest, SizeLimitExceeded, NoSpace, TooManyStreams, Unavailable: the upload failed.
        """
        owner, limit = self.require_user(caller), self._core.cluster.jobs.upload_limit
        check_relative_path(path)
        arguments = ("put", f"--limit={limit}", "--", path)
        try:
            with self.streams.acquire(access.TRANSFERS, owner):
                async with self.couriers.connect(owner, arguments) as client:
                    return _parse_result(
                        UploadResult, await _send_all(client, body, limit), "numbers of files and bytes"
                    )
        except (InvalidRequest, NodeUnreachable):
            await _drain(body)
            raise

    async def download(self, caller: Identity, path: str) -> FileStream:
        """Return a file or folder of the caller's home as a tar.

        Raises:
            NotAllowed, InvalidRequest, NotFound, SizeLimitExceeded, TooManyStreams, Unavailable: the download failed.
        """
        check_relative_path(path)
        arguments = ("get", f"--limit={self._core.cluster.jobs.upload_limit}", "--", path)
        owner = self.require_user(caller)
        stack, client = await self._open(self.couriers.connect(owner, arguments), (access.TRANSFERS, owner))
        return FileStream(client.read_output(limit_s=SILENCE_TIMEOUT_S), stack)

    async def read_logs(
        self,
        caller: Identity,
        job_id: str,
        *,
        offset: int = 0,
        rank: int | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> FileStream:
        """Return the output of a detached job from byte `offset` on; with `follow`, until the job has ended.

        With `tail`, only the last `tail` bytes of what it has written so far.

        Raises:
            InvalidRequest: `tail` is for the output of all ranks together.
            Conflict: the job is not detached, so its output is in the notebook.
            NotAllowed, NotFound, TooManyStreams, Unavailable: the output cannot be read.
        """
        if tail is not None and rank is not None:
            raise InvalidRequest("tail: the end of one rank's output is not known; leave out tail or rank")
        job = await self.find_detached_job(caller, job_id)
        arguments = [f"--rank={rank}"] if rank is not None else []
        arguments += [f"--tail={tail}"] if tail is not None else []
        kinds = ((access.LOGS, job.owner),)
        return await self._open_logs(job, (f"--offset={offset}", *arguments), kinds, follow=follow)

    async def read_shared_logs(self, viewer: str, job: JobRow, *, tail: int, follow: bool) -> FileStream:
        """Return the end of a detached job's output for a user who may view it; with `follow` until the job's end.

        Raises:
            Conflict: the job is not detached.
            TooManyStreams, Unavailable: the output cannot be read.
        """
        _check_detached(job)
        kinds = ((access.SHARED_VIEWS, viewer), (access.SHARED_OUTPUTS, job.owner))
        return await self._open_logs(job, (f"--tail={tail}",), kinds, follow=follow)

    async def _open_logs(
        self, job: JobRow, arguments: Sequence[str], kinds: Sequence[tuple[access.StreamKind, str]], *, follow: bool
    ) -> FileStream:
        """Return the output of a detached job; it counts as one stream of each of the kinds."""
        options = [f"--per-node={job.nproc_per_node}", *arguments, *(["--follow"] if follow else [])]
        connection = self.couriers.connect_job(job, ("logs", *options, "--", job.run_id))
        stack, client = await self._open(connection, *kinds)
        if follow:
            watch = asyncio.ensure_future(self._finish_after(job.id, client))
            stack.callback(watch.cancel)
        return FileStream(client.read_output(limit_s=None if follow else SILENCE_TIMEOUT_S), stack)

    async def read_state(self, caller: Identity, job_id: str) -> bytes:
        """Return the status that a detached job's driver wrote last, as JSON.

        Raises:
            NotFound: the job does not exist, or its driver has not written a status.
            SizeLimitExceeded: the status is larger than any driver writes.
            NotAllowed, Conflict, TooManyStreams, Unavailable: the status cannot be read.
        """
        job = await self.find_detached_job(caller, job_id)
        with self.streams.acquire(access.STATES, job.owner):
            async with self.couriers.connect_job(job, ("state", "--", job.run_id)) as client:
                text = bytearray()
                async for part in client.read_output(limit_s=SILENCE_TIMEOUT_S):
                    text += part
                    if len(text) > MAX_STATE:
                        raise SizeLimitExceeded(
                            f"the state of {job.run_id} is larger than {format_size(MAX_STATE)}: another program "
                            "changed the file"
                        )
            # In a thread: the event loop serves all users. The parsed value is not used, so that it is not built again
            # as text.
            if not await asyncio.to_thread(_is_json, text):
                raise Conflict(f"the state of {job.run_id} is not JSON: another program changed the file")
        return bytes(text)

    async def read_notebook_file(self, reader: str, path: str, owner: str) -> NotebookFile:
        """Return when a notebook of the owner's home was saved, for a user who may view it.

        Raises:
            NotFound, InvalidRequest, SizeLimitExceeded: there is no such notebook, or it cannot be shown.
            Conflict, TooManyStreams, Unavailable: it cannot be read.
        """
        async with self._connect_notebook(reader, ("--only-check", "--", path), owner) as client:
            return _parse_result(NotebookFile, await client.wait_result(), "time and size of the notebook")

    async def render_notebook(self, reader: str, path: str, owner: str) -> FileStream:
        """Return a notebook of the owner's home as HTML, for a user who may view it.

        Raises:
            NotFound, InvalidRequest, SizeLimitExceeded: there is no such notebook, or it cannot be shown.
            Conflict, TooManyStreams, Unavailable: it cannot be read.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(self.streams.acquire(access.SHARED_PAGES, owner))
            # One at a time: the courier's memory is enough for one. The page is rendered when the command has started.
            async with self._rendering.setdefault(owner, asyncio.Lock()):
                client = await stack.enter_async_context(self._connect_notebook(reader, ("--", path), owner))
            parts = _limit(client.read_output(limit_s=SILENCE_TIMEOUT_S), MAX_PAGE)
            return FileStream(parts, stack.pop_all())

    @asynccontextmanager
    async def _connect_notebook(
        self, reader: str, arguments: Sequence[str], owner: str
    ) -> AsyncIterator[CourierClient]:
        """Run a command on a notebook in the owner's courier; it counts as a view of both users."""
        if not self._has_containers:
            raise Conflict(_NO_CONTAINERS)
        kinds = ((access.SHARED_VIEWS, reader), (access.SHARED_OUTPUTS, owner))
        stack, client = await self._open(self.couriers.connect(owner, ("notebook", *arguments)), *kinds)
        async with stack:
            yield client

    async def find_own_job(self, caller: Identity, job_id: str) -> JobRow:
        """Return a job of the caller, ended or not.

        Raises:
            NotFound: the job does not exist that the caller may see.
            NotAllowed: it belongs to another user, and the caller is an administrator.
        """
        job = await access.find_job(self._core, caller, job_id)
        if job.owner != self.require_user(caller):
            raise NotAllowed(f"only {job.owner} may use files, logs and terminals of {job.owner}'s jobs")
        return job

    def require_user(self, caller: Identity) -> str:
        """Return the caller's name.

        Raises:
            NotAllowed: the caller is a service, which has no home.
        """
        if not caller.is_user:
            raise NotAllowed(f"{caller.name} is not a user: only owners may use files, logs and terminals")
        return caller.name

    async def find_detached_job(self, caller: Identity, job_id: str) -> JobRow:
        """Return a job of the caller that has output in the home, ended or not.

        Raises:
            NotFound, NotAllowed: as `find_own_job`.
            Conflict: the job is not detached, so its output is in the notebook.
        """
        job = await self.find_own_job(caller, job_id)
        _check_detached(job)
        return job

    async def _open(
        self, connection: AbstractAsyncContextManager[CourierClient], *kinds: tuple[access.StreamKind, str]
    ) -> tuple[AsyncExitStack, CourierClient]:
        stack = AsyncExitStack()
        try:
            for kind, owner in kinds:
                stack.enter_context(self.streams.acquire(kind, owner))
            return stack, await stack.enter_async_context(connection)
        except BaseException:
            await stack.aclose()
            raise

    async def _finish_after(self, job_id: str, client: CourierClient) -> None:
        """Signal the courier when the job has ended, so that no more output follows."""
        while True:
            changed = self._core.ledger.watch(job_id)
            if job_id not in self._core.ledger.snapshot.jobs:
                break
            await changed.wait()
        with suppress(NodeUnreachable):
            await client.end_input()


def _check_detached(job: JobRow) -> None:
    if not job.detached:
        raise Conflict(f"job {job.id} is not detached: its output is in its notebook")


def check_relative_path(path: str) -> None:
    """Refuse a path that is not below the home.

    Raises:
        InvalidRequest: the path is absolute, or has `..` or a null character.
    """
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
        raise InvalidRequest(f"path: {path!r} is not below the home; write one such as work/train.py")


def _is_json(text: bytearray) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_result(kind: type[R], result: dict[str, Any], what: str) -> R:
    """Return the result that a courier reported.

    Raises:
        GpuhubError: it is none of this kind.
    """
    try:
        return kind.model_validate(result)
    except ValidationError:
        raise GpuhubError(f"the courier on the node reported no {what}") from None


async def _limit(parts: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    """Yield parts of up to `limit` bytes in all.

    Raises:
        SizeLimitExceeded: there are more.
    """
    size = 0
    async for part in parts:
        size += len(part)
        if size > limit:
            raise SizeLimitExceeded(f"the notebook's page has more than {format_size(limit)}")
        yield part


async def _send_all(client: CourierClient, body: AsyncIterator[bytes], limit: int) -> dict[str, Any]:
    """Send a body to the courier and return its result."""
    outcome = asyncio.ensure_future(client.wait_result())
    sent = 0
    try:
        with suppress(NodeUnreachable):  # the courier has ended, and its result has the reason
            async for data in _read_body(body):
                sent += len(data)
                if sent > limit:
                    raise SizeLimitExceeded(f"an upload may have at most {format_size(limit)}")
                if client.is_finished:
                    break
                await client.send(data)
            await client.end_input()
        return await outcome
    finally:
        outcome.cancel()
        await asyncio.wait([outcome])
        if not outcome.cancelled():
            outcome.exception()


async def _read_body(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the body's parts; a client may be slow, but not silent for longer than `SILENCE_TIMEOUT_S`."""
    while True:
        try:
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                data = await anext(body, None)
        except TimeoutError:
            raise Unavailable(f"the client has sent nothing for {SILENCE_TIMEOUT_S:.0f} s") from None
        if data is None:
            return
        yield data


async def _drain(body: AsyncIterator[bytes]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            async for _ in body:
                pass
