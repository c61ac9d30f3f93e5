"""Files of jobs on guests: a job's folder goes to the guest with it, and what the job wrote comes back.

All data passes through the broker, between the courier on one of the closet's own nodes, which has the owner's home,
and Docker on the guest. A guest's administrator may change everything that comes back, so the courier puts it where
nothing of the closet is replaced: see `gpu_launch.courier.guest_jobs`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from gpuhub.broker.files.courier_client import CourierClient
from gpuhub.broker.files.couriers import CourierPool
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.common.errors import GpuhubError, NodeUnreachable, NotFound, Unavailable
from gpuhub.common.units import format_size
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.domain.models import JobRow

log = logging.getLogger(__name__)

#: Maximum duration of a transfer of a job's files in one direction, seconds; the clients of Docker allow half an hour
#: for each call.
TRANSFER_TIMEOUT_S = 1800.0
#: Maximum silence of either side, seconds.
SILENCE_TIMEOUT_S = 120.0
#: How often the return of a job's files is tried before they are given up.
MAX_ATTEMPTS = 5
#: Folders of a container's tar, its padding and its headers may add this to the files' own bytes, at most.
_OVERHEAD = 64 * 1024**2
#: Maximum length of the path of a job's folder, bytes.
_MAX_PATH = 4096
#: Parts of a transfer that wait for a slower receiver.
_QUEUE = 16


class _Part(NamedTuple):
    """One of the two folders that come back."""

    name: str
    #: Below the home.
    path: str


class GuestFiles:
    """Copies of jobs' files to and from containers on guests."""

    def __init__(self, *, core: BrokerState, daemons: DockerClients, couriers: CourierPool) -> None:
        self._core = core
        self._daemons = daemons
        self._couriers = couriers
        #: Failed attempts by node and container.
        self._failures: dict[tuple[str, str], int] = {}

    async def send(self, job: JobRow, node: str, container: str) -> None:
        """Copy a job's folder and run folder from its owner's home to a created container.

        Raises:
            GpuhubError: The folder is too large or cannot be sent, or one of the two nodes does not answer.
        """
        loop = asyncio.get_running_loop()
        limit = self._core.cluster.jobs.upload_limit
        arguments = ("pack-job", f"--limit={limit}", "--", job.run_id)
        try:
            async with asyncio.timeout(TRANSFER_TIMEOUT_S), self._couriers.connect(job.owner, arguments) as client:
                parts = client.read_output(limit_s=SILENCE_TIMEOUT_S)
                put = partial(_put_stream, container=container, path=_find_home(job), parts=parts, loop=loop)
                await self._daemons.run(node, put, kind=CallKind.LONG)
        except TimeoutError:
            raise Unavailable(
                f"the job's folder could not be sent to {node} within {TRANSFER_TIMEOUT_S / 60:.0f} minutes: send less"
            ) from None

    async def fetch(self, node: str, container: str) -> None:
        """Bring back what the job of a stopped container wrote; nothing happens where the container has none.

        After `MAX_ATTEMPTS` the files are given up, with an event for their owner.

        Raises:
            NodeUnreachable: The guest does not answer.
            GpuhubError: Another attempt may succeed.
        """
        if not self._core.cluster.node(node).guest:
            return
        # The container's labels are not used: the guest's administrator can change them.
        job = self._find_job(node, container)
        if job is None:
            return
        key = (node, container)
        try:
            async with asyncio.timeout(TRANSFER_TIMEOUT_S):
                await self._fetch_all(job, node, container)
        except (NodeUnreachable, NotFound):
            raise
        except (GpuhubError, TimeoutError) as error:
            self._failures[key] = self._failures.get(key, 0) + 1
            if isinstance(error, Unavailable) and self._failures[key] < MAX_ATTEMPTS:
                raise
            why = str(error) or f"it took longer than {TRANSFER_TIMEOUT_S:.0f} s"
            text = f"files of {job.run_id} on {node} could not be brought back: {why}"
            log.warning("%s", text)
            self._core.add_event("guest.files", text, owner=job.owner, job=job.id, node=node)
        self._failures.pop(key, None)

    def _find_job(self, node: str, container: str) -> JobRow | None:
        jobs = self._core.ledger.snapshot.jobs.values()
        return next(
            (
                job
                for job in jobs
                if any(worker.container_id == container and worker.node == node for worker in job.workers)
            ),
            None,
        )

    async def _fetch_all(self, job: JobRow, node: str, container: str) -> None:
        run = _Part("run", f".gpu_launch/jobs/{job.run_id}")
        # The output first: it says how the job ended, also where its files are too many.
        await self._fetch_part(job, node, container, run)
        await self._fetch_part(job, node, container, _Part("folder", await self._find_folder(job)))

    async def _find_folder(self, job: JobRow) -> str:
        """Return the job's folder below the home, as a program of its owner's says: its answer is not trusted."""
        async with self._couriers.connect(job.owner, ("job-folder", "--", job.run_id)) as client:
            text = bytearray()
            async for data in client.read_output(limit_s=SILENCE_TIMEOUT_S):
                text += data
                if len(text) > _MAX_PATH:
                    raise GpuhubError(f"the path of its folder has more than {_MAX_PATH} bytes")
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise GpuhubError("the path of its folder is not valid UTF-8") from None

    async def _fetch_part(self, job: JobRow, node: str, container: str, part: _Part) -> None:
        limit = self._core.cluster.jobs.upload_limit
        arguments = ("put-results", f"--limit={limit}", f"--part={part.name}", "--", job.run_id)
        async with self._couriers.connect(job.owner, arguments) as client:
            stream = self._read_archive(node, container, f"{_find_home(job)}/{part.path}", limit + _OVERHEAD)
            async with aclosing(stream):
                await _forward(stream, client)
            await client.wait_result()

    async def _read_archive(self, node: str, container: str, path: str, limit: int) -> AsyncGenerator[bytes, None]:
        """Yield a tar of the container's folder, and nothing if the folder is gone."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[bytes] = asyncio.Queue(_QUEUE)
        get = partial(_get_stream, container=container, path=path, limit=limit, queue=queue, loop=loop)
        reading = asyncio.ensure_future(self._daemons.run(node, get, kind=CallKind.LONG))
        try:
            while True:
                getting = asyncio.ensure_future(queue.get())
                await asyncio.wait([getting, reading], return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    break
                yield getting.result()
            while not queue.empty():
                yield queue.get_nowait()
            await reading
        except NotFound as error:
            if (
                "no such container:path" not in str(error).lower()
                and "could not find the file" not in str(error).lower()
            ):
                raise
        finally:
            reading.cancel()


def _find_home(job: JobRow) -> str:
    """Return the home's path in containers, which the guest is not asked for."""
    return f"/home/{job.owner}"


def _put_stream(
    client: Any, *, container: str, path: str, parts: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop
) -> None:
    """Send the parts of a tar to a container, in a thread."""

    async def read_next() -> bytes:
        return await anext(parts, b"")

    def read_all() -> Iterator[bytes]:
        while data := asyncio.run_coroutine_threadsafe(read_next(), loop).result(SILENCE_TIMEOUT_S):
            yield data

    client.put_archive(container, path, read_all())


def _get_stream(
    client: Any,
    *,
    container: str,
    path: str,
    limit: int,
    queue: asyncio.Queue[bytes],
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Put the parts of a folder's tar into the queue, in a thread."""
    try:
        chunks, _ = client.get_archive(container, path)
    except ValueError:
        raise GpuhubError("Docker's description of the folder cannot be read") from None
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise GpuhubError(f"it wrote more than {format_size(limit - _OVERHEAD)}, the limit of jobs.upload_limit")
        asyncio.run_coroutine_threadsafe(queue.put(chunk), loop).result(SILENCE_TIMEOUT_S)


async def _forward(stream: AsyncIterator[bytes], client: CourierClient) -> None:
    async for data in stream:
        if client.is_finished:
            break
        await client.send(data)
    await client.end_input()
