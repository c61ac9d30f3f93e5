"""Errors that only the broker raises."""

from __future__ import annotations

from gpuhub.errors import GpuhubError, InvalidRequest, NotAllowed, Unavailable


class NotKnown(NotAllowed):
    """Who asks is not known: send `Authorization: token …` with a token of the hub."""

    code = "not-known"


class TooManyWaiting(NotAllowed):
    """The owner has as many waiting requests as one may have."""

    code = "too-many-waiting"


class TooManyJobs(TooManyWaiting):
    """The owner has as many jobs as one may have."""

    code = "too-many-jobs"


class TooManyStreams(NotAllowed):
    """As many files, logs, terminals or long polls are open as one may have."""

    code = "too-many-streams"


class TooManyRequests(NotAllowed):
    """More requests than anybody may send."""

    code = "too-many-requests"


class TooSlow(InvalidRequest):
    """The request did not come to its end in time."""

    code = "too-slow"


class TooLarge(InvalidRequest):
    """More than may be sent or fetched at once."""

    code = "too-large"


class NoSpace(GpuhubError):
    """The home is full."""

    code = "no-space"


class HubUnreachable(Unavailable):
    """The hub does not answer, so a token cannot be checked."""

    code = "hub-unreachable"
