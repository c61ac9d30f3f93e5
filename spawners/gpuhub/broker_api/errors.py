"""Errors that only the broker raises."""

from __future__ import annotations

from gpuhub.common.errors import GpuhubError, InvalidRequest, NotAllowed, Unavailable


class NotKnown(NotAllowed):
    """The caller is unknown: send `Authorization: token …` with a token of the hub."""

    code = "not-known"


class TooManyWaiting(NotAllowed):
    """The owner has reached the limit of waiting requests."""

    code = "too-many-waiting"


class TooManyJobs(TooManyWaiting):
    """The owner has reached the limit of jobs."""

    code = "too-many-jobs"


class TooManyStreams(NotAllowed):
    """The owner has reached the limit of concurrent transfers, logs, terminals or long polls."""

    code = "too-many-streams"


class TooManyRequests(NotAllowed):
    """The caller sends more requests per second than allowed, or creates more leases and jobs."""

    code = "too-many-requests"

    def __init__(self, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        #: Time until it is allowed again, seconds; None if it is not known.
        self.retry_after_s = retry_after_s


class TooSlow(InvalidRequest):
    """The request was not complete in time."""

    code = "too-slow"


class SizeLimitExceeded(InvalidRequest):
    """An upload, download or request exceeds the maximum size."""

    code = "too-large"


class NoSpace(GpuhubError):
    """There is no space left in the home."""

    code = "no-space"


class HubUnreachable(Unavailable):
    """The hub does not answer, so tokens cannot be checked."""

    code = "hub-unreachable"
