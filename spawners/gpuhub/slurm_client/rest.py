"""A Slurm client that uses slurmrestd, with a token for each request.

Errors report what slurmrestd cannot do: without slurmdbd it has no accounts and QOS, and that of Slurm 22.05 cannot
request GPUs of any type on any nodes, or drain nodes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import math
import os
import ssl
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from gpuhub.common.errors import SetupError
from gpuhub.config.users.identity import find_account_name
from gpuhub.slurm_client import inventory, messages, parsers
from gpuhub.slurm_client.interface import UNDRAIN_REASON, SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.job_control import FindName, UserNames, require_job, signal_until_ended
from gpuhub.slurm_client.models import GpuTime, SlurmJob, SlurmSite, SlurmSnapshot, SlurmSubmission
from gpuhub.slurm_client.submission import END_SIGNAL, OLDEST_REST, PERSISTED_COMMENT, format_rest, format_rest_nodes

#: Validity of a token, seconds, for clocks that differ a little; each request gets a new one.
TOKEN_LIFETIME_S = 60
#: Time by which a token's issue date lies in the past, for slurmctld's clock may be behind, seconds.
_CLOCK_TOLERANCE_S = 30


@dataclass(frozen=True, slots=True)
class TokenKey:
    """The key that signs tokens; its `repr` does not show it."""

    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path, *owners: str) -> TokenKey:
        """Read the key from a file that nobody else can read: whoever knows it can act as any user of Slurm.

        Args:
            owners: Names of users who may own the file, in addition to root and the user of this process.

        Raises:
            SetupError: The file cannot be read, is empty, or is not private.
        """
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                secret = file.read()
        except OSError as error:
            raise SetupError(f"the key of Slurm's tokens cannot be read: {path}: {error.strerror}") from error
        if not secret:
            raise SetupError(f"the key of Slurm's tokens is empty: {path}")
        mode, owner = stat.S_IMODE(status.st_mode), find_account_name(status.st_uid)
        if mode & 0o077:
            raise SetupError(f"the key of Slurm's tokens has mode {mode:04o}, so others may read it: chmod 600 {path}")
        if status.st_uid not in {0, os.geteuid()} and owner not in owners:
            raise SetupError(
                f"the key of Slurm's tokens, {path}, belongs to {owner or status.st_uid}, who can act as any user of "
                f"Slurm with it: it must belong to {', '.join(dict.fromkeys(('root', *owners)))}"
            )
        return cls(secret)

    def create_token(self, user: str, now: float) -> str:
        """Create a token with which slurmrestd acts for this user for a minute.

        Args:
            user: A name that slurmctld's machine knows.
            now: Seconds since 1970.
        """
        # Slurm 22.05 requires exactly these three. PyJWT is not used, because it refuses keys in PEM form, with which
        # some sites sign HS256 tokens.
        claims = {"exp": int(now) + TOKEN_LIFETIME_S, "iat": int(now) - _CLOCK_TOLERANCE_S, "sun": user}
        signed = b".".join(_encode(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, claims))
        return b".".join((signed, _encode(hmac.digest(self.secret, signed, hashlib.sha256)))).decode()


def _encode(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


#: slurmrestd gives up on a slurmctld that is not there after 9 s, and asks twice for some things.
TIMEOUT_S = 20.0
#: The newest of its versions (v0.0.N) whose words are known; Slurm 24.11.
NEWEST_REST = 42
#: Slurm's numbers for "there is no such job" and for "it has ended".
_NO_JOB_ERRORS = frozenset({2017, 2021})


class SlurmRestClient:
    """A `SlurmClient` that uses slurmrestd at a URL, `unix:///…`, `https://…`, or `http://…` on loopback."""

    def __init__(
        self,
        url: str,
        key: TokenKey,
        *,
        user: str = "root",
        timeout_s: float = TIMEOUT_S,
        find_name: FindName = find_account_name,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Create the client.

        Args:
            user: User for requests about all users' jobs; jobs are submitted as their submitter.
        """
        self._key = key
        self._user = user
        self._user_names = UserNames(find_name)
        #: API version, which the first request determines.
        self._version: int | None = None
        socket = url.removeprefix("unix://")
        if transport is None and socket != url:
            transport = httpx.AsyncHTTPTransport(uds=socket)
        self._client = httpx.AsyncClient(
            base_url="http://localhost" if socket != url else url,
            timeout=timeout_s,
            # The machine's own authorities, to which a site can add one.
            verify=ssl.create_default_context(),
            # The environment's proxy variables are for the internet.
            trust_env=False,
            transport=transport,
        )

    async def read_snapshot(self) -> SlurmSnapshot:
        jobs, nodes = await asyncio.gather(self._get("jobs"), self._get("nodes"))
        named = await self._user_names.add_names(messages.parse_output(parsers.parse_jobs, jobs))
        return SlurmSnapshot(jobs=named, nodes=messages.parse_output(inventory.parse_nodes, nodes))

    async def find_job(self, job_id: int, *, name: str | None = None) -> SlurmJob | None:
        try:
            document = await self._get(f"job/{job_id}")
        except _NoSuchJob:
            return None
        jobs = await self._user_names.add_names(messages.parse_output(parsers.parse_jobs, document))
        return parsers.select_job(jobs, job_id, name)

    async def submit(self, submission: SlurmSubmission) -> int:
        """Submit a job. After a timeout the job may exist nevertheless: search for its name."""
        version = await self._find_version()
        submitter = submission.submitter
        body = format_rest(submission, version)
        document = await self._request("POST", "job/submit", user=submitter.name, json=body, complains=False)
        number = document.get("job_id") or (document.get("result") or {}).get("job_id")
        if not isinstance(number, int):
            raise _parse_refusal(document)
        # If slurmctld's machine does not know the name, or has another UID for it, another user would own the job.
        job = await self.find_job(number)
        if job is None or job.user_id != submitter.uid:
            await self.cancel(number)
            actual = "no user" if job is None else f"user {job.user_id}"
            raise SlurmRefused(f"Slurm assigned the job of {submitter.name} ({submitter.uid}) to {actual}")
        return number

    async def cancel(self, job_id: int, *, name: str | None = None, at_once: bool = False) -> None:
        if at_once:
            signal = {"signal": END_SIGNAL}
            await signal_until_ended(
                lambda: self.find_job(job_id, name=name),
                lambda: self._request_unless_over("DELETE", job_id, params=signal),
                # slurmrestd cannot cancel a job on the condition that it is pending.
                lambda: self._request_unless_over("DELETE", job_id),
            )
        if name is None or await self.find_job(job_id, name=name) is not None:
            await self._request_unless_over("DELETE", job_id)

    async def persist_job(self, job_id: int, *, name: str | None = None) -> None:
        if name is None or await self.find_job(job_id, name=name) is not None:
            await self._request_unless_over("POST", job_id, json={"comment": PERSISTED_COMMENT})

    async def set_time_limit(self, job_id: int, seconds: int, *, name: str | None = None) -> None:
        await require_job(self, job_id, name)
        minutes = math.ceil(seconds / 60)
        is_later = await self._find_version() > OLDEST_REST
        limit: Any = {"set": True, "infinite": False, "number": minutes} if is_later else minutes
        await self._request("POST", f"job/{job_id}", json={"time_limit": limit})

    async def shrink(self, job_id: int, nodes: Sequence[str], *, name: str | None = None) -> None:
        await require_job(self, job_id, name)
        await self._request("POST", f"job/{job_id}", json=format_rest_nodes(nodes, await self._find_version()))

    async def drain_node(self, node: str, reason: str) -> None:
        await self._update_node(node, {"state": ["DRAIN"], "reason": reason})

    async def undrain_node(self, node: str) -> None:
        await self._update_node(node, {"state": ["UNDRAIN"], "reason": UNDRAIN_REASON})

    async def _update_node(self, node: str, changes: Mapping[str, Any]) -> None:
        if await self._find_version() == OLDEST_REST:
            raise SlurmRefused("slurmrestd of Slurm 22.05 cannot drain nodes: use scontrol, or a newer Slurm")
        await self._request("POST", f"node/{node}", json=changes)

    async def read_site(self) -> SlurmSite:
        """Return the cluster's configuration, without accounts and QOS if slurmdbd is missing."""
        try:
            version = messages.parse_output(parsers.parse_version, await self._get("ping"))
            partitions, nodes = await self._get("partitions"), await self._get("nodes")
            reservations, jobs = await self._get("reservations"), await self._get("jobs")
        except SlurmRefused as refusal:
            raise SetupError(f"slurmrestd cannot be used: {refusal}") from refusal
        messages.require_version(version)
        accounts, qos = await self._read_names("accounts"), await self._read_names("qos")
        return SlurmSite(
            version=version,
            cluster=_read_cluster_name(partitions, jobs),
            partitions=messages.parse_output(inventory.parse_partitions, partitions),
            nodes=messages.parse_output(inventory.parse_nodes, nodes),
            has_accounting=accounts is not None,
            accounts=accounts or (),
            qos=qos or (),
            reservations=tuple(str(each.get("name")) for each in parsers.read_list(reservations, "reservations")),
        )

    async def read_gpu_time(self, since: float, until: float) -> Sequence[GpuTime]:
        window = {"start_time": f"uts{math.floor(since)}", "end_time": f"uts{math.ceil(until)}"}
        try:
            document = await self._request("GET", "jobs", part="slurmdb", params=window)
        except SlurmRefused as refusal:
            if "nothing found" in str(refusal).lower():
                return ()
            raise
        return messages.parse_output(lambda jobs: inventory.parse_gpu_jobs(jobs, since, until), document)

    async def close(self) -> None:
        await self._client.aclose()

    async def _find_version(self) -> int:
        """Return the newest API version that both sides support.

        Raises:
            SlurmRefused: slurmrestd supports none of ours.
        """
        if self._version is None:
            for version in range(NEWEST_REST, OLDEST_REST - 1, -1):
                response = await self._send("GET", f"/slurm/v0.0.{version}/ping", self._user)
                if response.status_code != HTTPStatus.NOT_FOUND:
                    _parse_response(response)
                    self._version = version
                    break
            else:
                raise SlurmRefused(f"slurmrestd supports none of v0.0.{OLDEST_REST} to v0.0.{NEWEST_REST}")
        return self._version

    async def _get(self, path: str) -> Any:
        return await self._request("GET", path)

    async def _read_names(self, kind: str) -> tuple[str, ...] | None:
        """Return the names of accounts or QOS, or None without slurmdbd."""
        try:
            document = await self._request("GET", kind, part="slurmdb")
            # Slurm 22.05 lists "QOS".
            key = kind if kind in document else kind.upper()
            return tuple(sorted(str(each["name"]) for each in parsers.read_list(document, key)))
        except (SlurmRefused, SlurmUnreachable, ValueError, KeyError):
            return None

    async def _request_unless_over(self, method: str, job_id: int, **further: Any) -> None:
        """Send a request and ignore a refusal because the job has ended."""
        try:
            await self._request(method, f"job/{job_id}", **further)
        except SlurmRefused as refusal:
            if not isinstance(refusal, _NoSuchJob) and not messages.is_job_over(str(refusal)):
                raise

    async def _request(
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
        """Send a request and return the document of its response.

        Args:
            complains: Raise an exception for a document with errors also if the HTTP status reports success.

        Raises:
            SlurmUnreachable: slurmrestd or slurmctld does not answer in time.
            SlurmRefused: Slurm refuses; the text has its message.
        """
        version = await self._find_version()
        url = f"/{part}/v0.0.{version}/{path}"
        response = await self._send(method, url, user or self._user, json=json, params=params)
        if response.status_code == HTTPStatus.NOT_FOUND and part == "slurmdb":
            raise SlurmRefused(
                "slurmrestd has no accounting: it runs without slurmdbd, or without its openapi/dbv0.0.N"
            )
        document = _parse_response(response)
        if parsers.read_errors(document) and (complains or response.is_error):
            raise _parse_refusal(document)
        return document

    async def _send(self, method: str, url: str, user: str, **further: Any) -> httpx.Response:
        headers = {"X-SLURM-USER-NAME": user, "X-SLURM-USER-TOKEN": self._key.create_token(user, time.time())}
        try:
            return await self._client.request(method, url, headers=headers, **further)
        except httpx.HTTPError as error:
            message = str(error) or type(error).__name__
            raise SlurmUnreachable(f"slurmrestd does not answer: {message}") from error


class _NoSuchJob(SlurmRefused):
    """The job does not exist."""


def _parse_response(response: httpx.Response) -> Any:
    """Return the document of a response.

    Raises:
        SlurmRefused: slurmrestd refuses the token.
        SlurmUnreachable: The response does not come from slurmrestd.
    """
    if response.status_code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        raise SlurmRefused("slurmrestd refuses the token: the key is not Slurm's, or the clocks differ")
    try:
        document = response.json()
    except ValueError as error:
        details = f"HTTP {response.status_code}, {response.text[:100]!r}"
        raise SlurmUnreachable(f"slurmrestd's answer has an unknown form: {details}") from error
    if not isinstance(document, dict):
        raise SlurmUnreachable("slurmrestd's answer has an unknown form")
    return document


def _parse_refusal(document: Any) -> SlurmRefused | SlurmUnreachable:
    """Return the exception for a document with errors; the HTTP status is always 500."""
    message = "; ".join(parsers.read_errors(document)) or "slurmrestd refused without a message"
    numbers = {error.get("error_number", error.get("error_code")) for error in document.get("errors") or ()}
    if not numbers.isdisjoint(_NO_JOB_ERRORS):
        return _NoSuchJob(f"Slurm says: {message}")
    # slurmrestd reports a bad token in the same way as a slurmctld that does not answer.
    if -1 in numbers or messages.is_unreachable(message):
        return SlurmUnreachable(f"Slurm does not answer, or refuses the token: {message}")
    return SlurmRefused(f"Slurm says: {message}")


def _read_cluster_name(document: Any, jobs: Any) -> str:
    """Return the cluster's name, which newer versions report in every answer and older ones with each job."""
    meta = document.get("meta") or {}
    name = (meta.get("slurm") or {}).get("cluster") or next((job.get("cluster") for job in jobs["jobs"]), "")
    return str(name)
