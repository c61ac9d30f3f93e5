"""Slurm asked by slurmrestd, with a token for each request.

What slurmrestd cannot do is said in words: without slurmdbd it knows no accounts and no QOS; that of Slurm 22.05 can't
ask for GPUs of any type on any nodes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import httpx

from gpuhub.errors import SetupError
from gpuhub.identity import find_account
from gpuhub.slurm import inventory, parsing, trouble
from gpuhub.slurm.api import SlurmRefused, SlurmUnreachable, require_job
from gpuhub.slurm.ending import signal_until_over
from gpuhub.slurm.jwt import Key
from gpuhub.slurm.people import FindName, People
from gpuhub.slurm.submission import END_SIGNAL, KEPT, OLDEST_REST, format_rest, format_rest_nodes
from gpuhub.slurm.values import GpuTime, Job, Look, Site, Submission

#: slurmrestd gives up on a slurmctld that is not there after 9 s, and asks twice for some things.
PATIENCE_S = 20.0
#: The newest of its versions (v0.0.N) whose words are known; Slurm 24.11.
NEWEST_REST = 42
#: Slurm's numbers for "there is no such job" and for "it has ended".
_NO_JOB = frozenset({2017, 2021})


class SlurmRest:
    """`SlurmApi` by slurmrestd at a URL, `unix:///…` or `http://…`."""

    def __init__(
        self,
        url: str,
        key: Key,
        *,
        user: str = "root",
        patience_s: float = PATIENCE_S,
        find_name: FindName = find_account,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`user`: as whom it is asked about everybody's jobs; jobs are submitted as their submitter."""
        self._key = key
        self._user = user
        self._people = People(find_name)
        #: Found out by asking.
        self._version: int | None = None
        socket = url.removeprefix("unix://")
        if transport is None and socket != url:
            transport = httpx.AsyncHTTPTransport(uds=socket)
        self._client = httpx.AsyncClient(
            base_url="http://localhost" if socket != url else url,
            timeout=patience_s,
            # Proxy variables of the environment are for the internet.
            trust_env=False,
            transport=transport,
        )

    async def look(self) -> Look:
        """See `SlurmApi`."""
        jobs, nodes = await asyncio.gather(self._get("jobs"), self._get("nodes"))
        named = await self._people.named(trouble.read(parsing.parse_jobs, jobs))
        return Look(jobs=named, nodes=trouble.read(inventory.parse_nodes, nodes))

    async def job(self, job_id: int, *, name: str | None = None) -> Job | None:
        """See `SlurmApi`."""
        try:
            document = await self._get(f"job/{job_id}")
        except _NoJob:
            return None
        jobs = await self._people.named(trouble.read(parsing.parse_jobs, document))
        return parsing.pick_job(jobs, job_id, name)

    async def submit(self, submission: Submission) -> int:
        """See `SlurmApi`. Where nobody answers in time the job may yet be there: look for its name."""
        version = await self._find_version()
        submitter = submission.submitter
        body = format_rest(submission, version)
        document = await self._ask("POST", "job/submit", user=submitter.name, json=body, complains=False)
        number = document.get("job_id") or (document.get("result") or {}).get("job_id")
        if not isinstance(number, int):
            raise _parse_refusal(document)
        # A name that slurmctld's machine does not know, or knows by another number, makes it somebody else's job.
        job = await self.job(number)
        if job is None or job.user_id != submitter.uid:
            await self.cancel(number)
            told = "nobody's" if job is None else f"that of user {job.user_id}"
            raise SlurmRefused(f"Slurm took the job of {submitter.name} ({submitter.uid}) for {told}")
        return number

    async def cancel(self, job_id: int, *, name: str | None = None, at_once: bool = False) -> None:
        """See `SlurmApi`."""
        if at_once:
            signal = {"signal": END_SIGNAL}
            await signal_until_over(
                lambda: self.job(job_id, name=name),
                lambda: self._unless_over("DELETE", job_id, params=signal),
                # slurmrestd cannot be told to cancel one only while it waits.
                lambda: self._unless_over("DELETE", job_id),
            )
        if name is None or await self.job(job_id, name=name) is not None:
            await self._unless_over("DELETE", job_id)

    async def keep(self, job_id: int, *, name: str | None = None) -> None:
        """See `SlurmApi`."""
        if name is None or await self.job(job_id, name=name) is not None:
            await self._unless_over("POST", job_id, json={"comment": KEPT})

    async def set_time_limit(self, job_id: int, seconds: int, *, name: str | None = None) -> None:
        """See `SlurmApi`."""
        await require_job(self, job_id, name)
        minutes = math.ceil(seconds / 60)
        is_later = await self._find_version() > OLDEST_REST
        limit: Any = {"set": True, "infinite": False, "number": minutes} if is_later else minutes
        await self._ask("POST", f"job/{job_id}", json={"time_limit": limit})

    async def shrink(self, job_id: int, nodes: Sequence[str], *, name: str | None = None) -> None:
        """See `SlurmApi`."""
        await require_job(self, job_id, name)
        await self._ask("POST", f"job/{job_id}", json=format_rest_nodes(nodes, await self._find_version()))

    async def site(self) -> Site:
        """See `SlurmApi`. Without slurmdbd there are no accounts and no QOS."""
        try:
            version = trouble.read(parsing.parse_version, await self._get("ping"))
            partitions, nodes = await self._get("partitions"), await self._get("nodes")
            reservations, jobs = await self._get("reservations"), await self._get("jobs")
        except SlurmRefused as refusal:
            raise SetupError(f"slurmrestd can't be used: {refusal}") from refusal
        trouble.require_version(version)
        accounts, qos = await self._names("accounts"), await self._names("qos")
        return Site(
            version=version,
            cluster=_cluster(partitions, jobs),
            partitions=trouble.read(inventory.parse_partitions, partitions),
            nodes=trouble.read(inventory.parse_nodes, nodes),
            has_accounting=accounts is not None,
            accounts=accounts or (),
            qos=qos or (),
            reservations=tuple(str(each.get("name")) for each in parsing.listed(reservations, "reservations")),
        )

    async def gpu_time(self, since: float, until: float) -> Sequence[GpuTime]:
        """See `SlurmApi`."""
        window = {"start_time": f"uts{math.floor(since)}", "end_time": f"uts{math.ceil(until)}"}
        try:
            document = await self._ask("GET", "jobs", part="slurmdb", params=window)
        except SlurmRefused as refusal:
            if "nothing found" in str(refusal).lower():
                return ()
            raise
        return trouble.read(lambda jobs: inventory.parse_gpu_jobs(jobs, since, until), document)

    async def close(self) -> None:
        """See `SlurmApi`."""
        await self._client.aclose()

    async def _find_version(self) -> int:
        """The newest version that both sides know.

        Raises:
            SlurmRefused: it knows none of ours.
        """
        if self._version is None:
            for version in range(NEWEST_REST, OLDEST_REST - 1, -1):
                answer = await self._send("GET", f"/slurm/v0.0.{version}/ping", self._user)
                if answer.status_code != HTTPStatus.NOT_FOUND:
                    _document(answer)
                    self._version = version
                    break
            else:
                raise SlurmRefused(f"slurmrestd knows none of v0.0.{OLDEST_REST} to v0.0.{NEWEST_REST}")
        return self._version

    async def _get(self, path: str) -> Any:
        return await self._ask("GET", path)

    async def _names(self, kind: str) -> tuple[str, ...] | None:
        """The names of accounts or QOS; None without slurmdbd."""
        try:
            document = await self._ask("GET", kind, part="slurmdb")
            # Slurm 22.05 lists "QOS".
            key = kind if kind in document else kind.upper()
            return tuple(sorted(str(each["name"]) for each in parsing.listed(document, key)))
        except (SlurmRefused, SlurmUnreachable, ValueError, KeyError):
            return None

    async def _unless_over(self, method: str, job_id: int, **further: Any) -> None:
        """Ask for something that nobody misses once the job has ended."""
        try:
            await self._ask(method, f"job/{job_id}", **further)
        except SlurmRefused as refusal:
            if not isinstance(refusal, _NoJob) and not trouble.is_over(str(refusal)):
                raise

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        part: str = "slurm",
        user: str | None = None,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        complains: bool = True,
    ) -> Any:
        """The document that answers. With `complains`, one that has errors is none.

        Raises:
            SlurmUnreachable: nobody answers, or not in time.
            SlurmRefused: with Slurm's words.
        """
        version = await self._find_version()
        url = f"/{part}/v0.0.{version}/{path}"
        answer = await self._send(method, url, user or self._user, json=json, params=params)
        if answer.status_code == HTTPStatus.NOT_FOUND and part == "slurmdb":
            raise SlurmRefused(
                "slurmrestd keeps no accounts: it runs without slurmdbd, or without its openapi/dbv0.0.N"
            )
        document = _document(answer)
        if parsing.errors(document) and (complains or answer.is_error):
            raise _parse_refusal(document)
        return document

    async def _send(self, method: str, url: str, user: str, **further: Any) -> httpx.Response:
        headers = {"X-SLURM-USER-NAME": user, "X-SLURM-USER-TOKEN": self._key.mint(user, time.time())}
        try:
            return await self._client.request(method, url, headers=headers, **further)
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
            raise SlurmUnreachable(f"slurmrestd does not answer: {said}") from error


class _NoJob(SlurmRefused):
    """There is no such job (any more)."""


def _document(answer: httpx.Response) -> Any:
    """Raises SlurmRefused for a refusal without a document, and SlurmUnreachable for what is none of slurmrestd's."""
    if answer.status_code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        raise SlurmRefused("slurmrestd does not take the token: the key is not Slurm's, or the clocks differ")
    try:
        document = answer.json()
    except ValueError as error:
        said = f"HTTP {answer.status_code}, {answer.text[:100]!r}"
        raise SlurmUnreachable(f"slurmrestd answers in words that are not known: {said}") from error
    if not isinstance(document, dict):
        raise SlurmUnreachable("slurmrestd answers in words that are not known")
    return document


def _parse_refusal(document: Any) -> SlurmRefused | SlurmUnreachable:
    """The exception for a document that complains; its HTTP status tells nothing, 500 is all that there is."""
    said = "; ".join(parsing.errors(document)) or "slurmrestd refused without a word"
    numbers = {error.get("error_number", error.get("error_code")) for error in document.get("errors") or ()}
    if not numbers.isdisjoint(_NO_JOB):
        return _NoJob(f"Slurm says: {said}")
    # A bad token is among these: slurmrestd tells it as it tells that nobody answers.
    if -1 in numbers or trouble.is_silence(said):
        return SlurmUnreachable(f"Slurm does not answer, or does not take the token: {said}")
    return SlurmRefused(f"Slurm says: {said}")


def _cluster(document: Any, jobs: Any) -> str:
    """Its name, as the newer ones say with each answer, and older ones with each job only."""
    meta = document.get("meta") or {}
    said = (meta.get("slurm") or {}).get("cluster") or next((job.get("cluster") for job in jobs["jobs"]), "")
    return str(said)
