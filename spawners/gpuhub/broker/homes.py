"""Files, logs and states in users' homes: for their owners alone, by way of their couriers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import PurePosixPath
from typing import Any

from gpuhub.broker import slots as kinds
from gpuhub.broker.auth import Identity
from gpuhub.broker.core import Core
from gpuhub.broker.couriers import Couriers
from gpuhub.broker.looks import Looks
from gpuhub.broker.refusals import TooLarge
from gpuhub.broker.rows import JobRow
from gpuhub.broker.schemas import Unpacked
from gpuhub.broker.talks import Talk
from gpuhub.errors import Conflict, InvalidRequest, NodeUnreachable, NotAllowed, Unavailable
from gpuhub.quantities import format_size

#: A client that sends nothing for so long, or a courier that does, is given up, seconds.
SILENCE_S = 120.0
#: What is still on its way when a transfer was refused is taken for so long, so that the client reads why, seconds.
DRAIN_S = 10.0


class Stream:
    """Bytes that come until they end; to be closed in any case."""

    def __init__(self, parts: AsyncIterator[bytes], stack: AsyncExitStack) -> None:
        self.parts = parts
        self._stack = stack

    async def close(self) -> None:
        """Break off what has not ended."""
        await self._stack.aclose()


class Homes:
    """What callers can do with the files of their homes."""

    def __init__(self, core: Core, couriers: Couriers) -> None:
        self._core = core
        self._couriers = couriers
        self._looks = Looks(core)
        #: Streams that are open.
        self.slots = kinds.Slots()

    async def put(self, who: Identity, path: str, body: AsyncIterator[bytes]) -> Unpacked:
        """Unpack a tar below a folder of the caller's home.

        Raises:
            NotAllowed: a service has no home.
            InvalidRequest, TooLarge, NoSpace, TooManyStreams, Unavailable.
        """
        owner, limit = _owner(who), self._core.cluster.jobs.upload_limit
        refuse_outside(path)
        words = ("put", f"--limit={limit}", "--", path)
        try:
            with self.slots.take(kinds.TRANSFERS, owner):
                async with self._couriers.talk(owner, words) as talk:
                    return Unpacked(**await _send_all(talk, body, limit))
        except (InvalidRequest, NodeUnreachable):
            await _drain(body)
            raise

    async def get(self, who: Identity, path: str) -> Stream:
        """A file or folder of the caller's home as a tar.

        Raises:
            NotAllowed, InvalidRequest, NotFound, TooLarge, TooManyStreams, Unavailable.
        """
        refuse_outside(path)
        words = ("get", f"--limit={self._core.cluster.jobs.upload_limit}", "--", path)
        stack, talk = await self._open(kinds.TRANSFERS, _owner(who), words)
        return Stream(talk.output(limit_s=SILENCE_S), stack)

    async def logs(self, who: Identity, job_id: str, *, offset: int, rank: int | None, follow: bool) -> Stream:
        """What a detached job wrote from byte `offset` on; with `follow`, until it has ended.

        Raises:
            NotAllowed, NotFound, Conflict (its output is in the notebook), TooManyStreams, Unavailable.
        """
        job = await self._detached(who, job_id)
        words = ["logs", f"--offset={offset}", f"--per-node={job.nproc_per_node}"]
        words += [f"--rank={rank}"] if rank is not None else []
        words += ["--follow"] if follow else []
        stack, talk = await self._open(kinds.LOGS, job.owner, (*words, "--", job.run_id))
        if follow:
            watch = asyncio.ensure_future(self._finish_after(job_id, talk))
            stack.callback(watch.cancel)
        return Stream(talk.output(limit_s=None if follow else SILENCE_S), stack)

    async def state(self, who: Identity, job_id: str) -> Any:
        """Where a detached job says it is.

        Raises:
            NotAllowed, NotFound (it has not said anything), Conflict, TooManyStreams, Unavailable.
        """
        job = await self._detached(who, job_id)
        with self.slots.take(kinds.STATES, job.owner):
            async with self._couriers.talk(job.owner, ("state", "--", job.run_id)) as talk:
                text = b"".join([part async for part in talk.output(limit_s=SILENCE_S)])
        try:
            return json.loads(text)
        except ValueError:
            raise Conflict(f"the state of {job.run_id} is no JSON: something else wrote it") from None

    async def own_job(self, who: Identity, job_id: str) -> JobRow:
        """A job of the caller's own, ended or not.

        Raises:
            NotFound: there is none.
            NotAllowed: it is somebody else's, which only administrators get to know.
        """
        job = await self._looks.find_job(who, job_id)
        if job.owner != _owner(who):
            raise NotAllowed(f"files, logs and terminals of {job.owner}'s jobs are for {job.owner} alone")
        return job

    async def _detached(self, who: Identity, job_id: str) -> JobRow:
        job = await self.own_job(who, job_id)
        if not job.detached:
            raise Conflict(f"job {job_id} is not detached: its notebook has its output")
        return job

    async def _open(self, kind: kinds.Kind, owner: str, words: tuple[str, ...]) -> tuple[AsyncExitStack, Talk]:
        stack = AsyncExitStack()
        try:
            stack.enter_context(self.slots.take(kind, owner))
            return stack, await stack.enter_async_context(self._couriers.talk(owner, words))
        except BaseException:
            await stack.aclose()
            raise

    async def _finish_after(self, job_id: str, talk: Talk) -> None:
        """Tell the courier when nothing more will be written."""
        while True:
            changed = self._core.ledger.watch(job_id)
            if job_id not in self._core.ledger.snapshot.jobs:
                break
            await changed.wait()
        with suppress(NodeUnreachable):
            await talk.finish()


def refuse_outside(path: str) -> None:
    """Refuse what cannot be a path below a home.

    Raises:
        InvalidRequest: with the path.
    """
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
        raise InvalidRequest(f"path: {path!r} is not below the home; write one such as work/train.py")


def _owner(who: Identity) -> str:
    if not who.is_user:
        raise NotAllowed(f"{who.name} is no user: files, logs and terminals are for their owners alone")
    return who.name


async def _send_all(talk: Talk, body: AsyncIterator[bytes], limit: int) -> dict[str, Any]:
    """Pass a body on; what the courier says at the end."""
    outcome = asyncio.ensure_future(talk.result())
    sent = 0
    try:
        with suppress(NodeUnreachable):  # it has ended, and says why
            async for data in _patient(body):
                sent += len(data)
                if sent > limit:
                    raise TooLarge(f"{format_size(limit)} is the most that may be sent at once")
                if talk.is_over:
                    break
                await talk.send(data)
            await talk.finish()
        return await outcome
    finally:
        outcome.cancel()
        await asyncio.wait([outcome])
        if not outcome.cancelled():
            outcome.exception()


async def _patient(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A client may be slow, and not silent for ever."""
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                data = await anext(body, None)
        except TimeoutError:
            raise Unavailable(f"nothing came for {SILENCE_S:.0f} s") from None
        if data is None:
            return
        yield data


async def _drain(body: AsyncIterator[bytes]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in body:
                pass
