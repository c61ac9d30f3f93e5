"""Access of callers to leases and jobs, of which owners see their own, and limits of concurrent streams.

A stream is a transfer, a log, a terminal or a long poll; the limits are those of one owner and of all together. The
other limits: `validate`, `extend` and the scheduler check quotas of GPUs, requests and jobs, `api.auth` limits the
requests per second, and `api.middleware` the size of a request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from gpuhub.broker import audit
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.errors import TooManyStreams
from gpuhub.common.errors import Conflict, NotAllowed, NotFound
from gpuhub.config.containers.services import ServiceSettings
from gpuhub.domain.models import Identity, JobRow, LeaseRow
from gpuhub.domain.owner_limits import list_groups
from gpuhub.domain.rate_limit import RateLimit, RateLimiter

R = TypeVar("R", LeaseRow, JobRow)
#: Waits for the turn of a message or part of a stream of so many bytes, as `ConcurrencyLimiter.take_turn`.
TakeTurn = Callable[[int], Awaitable[None]]


async def find_lease(core: BrokerState, caller: Identity, lease_id: str) -> LeaseRow:
    """Return a lease, ended or not, from the ledger or the store.

    Raises:
        NotFound: the lease does not exist, or it belongs to another user.
    """
    return _check_visible(caller, lease_id, "lease", await read_lease(core, lease_id))


async def find_job(core: BrokerState, caller: Identity, job_id: str) -> JobRow:
    """Return a job, ended or not, from the ledger or the store.

    Raises:
        NotFound: the job does not exist, or it belongs to another user.
    """
    return _check_visible(caller, job_id, "job", await read_job(core, job_id))


async def read_job(core: BrokerState, job_id: str) -> JobRow | None:
    """Return a job, ended or not, whoever asks; None if there is none."""
    row = core.ledger.snapshot.jobs.get(job_id) or core.ledger.ended_jobs.get(job_id)
    return row or await asyncio.to_thread(core.store.get_job, job_id)


async def read_lease(core: BrokerState, lease_id: str) -> LeaseRow | None:
    """Return a lease, ended or not, whoever asks; None if there is none."""
    row = core.ledger.snapshot.leases.get(lease_id) or core.ledger.ended_leases.get(lease_id)
    return row or await asyncio.to_thread(core.store.get_lease, lease_id)


async def find_port_job(core: BrokerState, caller: Identity, job_id: str) -> JobRow:
    """Return a job whose port the caller may use: the owner's own, or one whose owner has named the caller.

    Raises:
        NotFound: there is no such job.
        NotAllowed: the caller is an administrator or a service, whom the owner has not named.
        Conflict: the job has no port.
    """
    row = await read_job(core, job_id)
    if row is not None:
        audit.note_owner(row.owner)
    is_visitor = row is not None and caller.is_user and caller.name in {row.owner, *row.port_users}
    if row is None or not (is_visitor or caller.sees_all):
        raise NotFound(f"there is no job {job_id!r} whose port {caller.name} may use")
    if not is_visitor:
        raise NotAllowed(f"only {row.owner} and the users whom {row.owner} named may use the port of this job")
    if row.port is None:
        raise Conflict(f"job {job_id} has no port: submit it with --port")
    return row


def find_service(core: BrokerState, caller: Identity, name: str) -> ServiceSettings:
    """Return a service that the caller may use: a user whom the settings admit.

    Raises:
        NotFound: there is none of this name that the caller may use.
    """
    service = core.cluster.service(name)
    if service is None or not may_use_service(core, caller, service):
        raise NotFound(f"there is no service {name!r} that {caller.name} may use")
    return service


def may_use_service(core: BrokerState, caller: Identity, service: ServiceSettings) -> bool:
    """Return whether the caller is a user whom the settings of a service admit."""
    groups = list_groups(core.cluster, caller.name, caller.groups)
    return caller.is_user and service.admits(caller.name, groups)


def _check_visible(caller: Identity, row_id: str, kind: str, row: R | None) -> R:
    if row is not None:
        audit.note_owner(row.owner)
    if row is None or not (caller.sees_all or row.owner == caller.name):
        raise NotFound(f"you have no {kind} {row_id!r}")
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKind:
    """A kind of streams, and its limits."""

    #: Name for users, in the plural.
    description: str
    #: Maximum number of open streams of one owner.
    per_owner: int
    #: Maximum number of open streams of all owners.
    total: int


TRANSFERS = StreamKind(description="files being sent or fetched", per_owner=2, total=32)
LOGS = StreamKind(description="logs being read", per_owner=4, total=256)
#: Outputs of others' jobs, counted for each viewer; and those of one owner, each of which is a process of the owner's.
SHARED_VIEWS = StreamKind(description="shared outputs being read", per_owner=4, total=256)
SHARED_OUTPUTS = StreamKind(description="views of one's jobs by others", per_owner=16, total=256)
#: Pages of notebooks of one owner that are rendered or sent: each may take tens of MiB of the owner's courier.
SHARED_PAGES = StreamKind(description="notebooks being shown", per_owner=4, total=64)
STATES = StreamKind(description="states being read", per_owner=4, total=64)
SHELLS = StreamKind(description="terminals", per_owner=2, total=64)
#: The limit is higher than for terminals: an editor and rsync open several connections at once.
SSH = StreamKind(description="SSH connections to jobs", per_owner=8, total=128)
#: Requests to servers of jobs, counted for each visitor; a page's browser opens some at once, a program more.
PORTS = StreamKind(description="requests to servers of jobs", per_owner=64, total=2048)
#: Requests to services per user. The limit is lower, because all users of a service share its connections.
SERVICES = StreamKind(description="requests to services", per_owner=16, total=1024)
LISTS = StreamKind(description="lists being read", per_owner=32, total=1024)
EXPLANATIONS = StreamKind(description="explanations being computed", per_owner=16, total=256)
POLLS = StreamKind(description="requests that wait for changes", per_owner=128, total=8192)
#: Messages and parts of streams below this size count, bytes: larger ones need a network's bandwidth as well.
SMALL_PART = 4096
#: Small messages and parts of all streams of one user; programs send larger ones where they send many.
SMALL_PARTS = RateLimit(burst=2000, per_second=2000, what="small messages")
#: Minimum wait, seconds: shorter ones are added up.
_MIN_WAIT_S = 0.01


class ConcurrencyLimiter:
    """Counts open streams and refuses those above the limits; delays streams of many small parts."""

    def __init__(self) -> None:
        self._small_parts = RateLimiter(SMALL_PARTS)
        self._open: Counter[tuple[StreamKind, str]] = Counter()
        self._total: Counter[StreamKind] = Counter()

    @contextmanager
    def acquire(self, kind: StreamKind, owner: str) -> Iterator[None]:
        """Count one more stream for the duration of the context.

        Raises:
            TooManyStreams: a limit is reached; the text names it.
        """
        for count, most, who in (
            (self._open[kind, owner], kind.per_owner, owner),
            (self._total[kind], kind.total, "all users together"),
        ):
            if count >= most:
                raise TooManyStreams(
                    f"{who}: {most} {kind.description} at once are the limit: end one, or try again later"
                )
        self._open[kind, owner] += 1
        self._total[kind] += 1
        try:
            yield
        finally:
            self._open[kind, owner] -= 1
            self._total[kind] -= 1
            self._open += Counter()  # drops owners with a count of zero

    async def take_turn(self, owner: str, size: int) -> None:
        """Serve others before the next message or part of a stream, of `size` bytes; wait if it is one of too many."""
        wait_s = self._small_parts.reserve(owner) if size < SMALL_PART else 0.0
        await asyncio.sleep(wait_s if wait_s >= _MIN_WAIT_S else 0)
