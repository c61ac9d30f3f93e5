"""Limits of concurrent streams: transfers, logs, terminals and long polls, of one owner and of all together.

The other limits: `validate`, `extend` and the scheduler check quotas of GPUs, requests and jobs, `api.rate_limits` the
requests per second, and `api.middleware` the size of a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpuhub.broker_api.errors import TooManyStreams


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


STATES = StreamKind(description="states being read", per_owner=4, total=64)


SHELLS = StreamKind(description="terminals", per_owner=2, total=64)


POLLS = StreamKind(description="requests that wait for changes", per_owner=128, total=8192)


class ConcurrencyLimiter:
    """Counts open streams and refuses those above the limits."""

    def __init__(self) -> None:
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
