"""Errors that only the broker raises."""

from __future__ import annotations

from gpuhub.errors import NotAllowed, Unavailable


class NotKnown(NotAllowed):
    """Who asks is not known: send `Authorization: token …` with a token of the hub."""

    code = "not-known"


class TooManyWaiting(NotAllowed):
    """The owner has as many waiting requests as one may have."""

    code = "too-many-waiting"


class TooManyJobs(TooManyWaiting):
    """The owner has as many jobs as one may have."""

    code = "too-many-jobs"


class HubUnreachable(Unavailable):
    """The hub does not answer, so a token cannot be checked."""

    code = "hub-unreachable"
