"""Visits of browsers to servers of jobs.

A page of a job's server may not have the hub's cookies, so its address has a key instead, which is valid for one
visitor and one job. A key stands for the token with which it was requested, and ends with it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gpuhub.broker_api.errors import NotKnown

#: Maximum time of a visit, seconds.
VISIT_S = 12 * 3600.0
#: Visits of one user; a further one ends the oldest.
MAX_VISITS_PER_USER = 64
#: Visits of all users.
MAX_VISITS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The access of one visitor to one job's server."""

    user: str
    job_id: str
    #: The `Authorization` header with which the visit was requested; it is checked again at each request.
    authorization: str
    ends_at: float


class Visits:
    """All visits, in memory alone: after a restart of the broker, browsers are sent through the hub again."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        #: Visits by the digest of their key, oldest first.
        self._visits: OrderedDict[bytes, Visit] = OrderedDict()

    def open(self, user: str, job_id: str, authorization: str) -> str:
        """Return the key of a new visit."""
        self._forget_ended()
        own = [digest for digest, visit in self._visits.items() if visit.user == user]
        for digest in own[: max(0, len(own) - MAX_VISITS_PER_USER + 1)]:
            del self._visits[digest]
        while len(self._visits) >= MAX_VISITS:
            self._visits.popitem(last=False)
        key = secrets.token_urlsafe(32)
        self._visits[_digest(key)] = Visit(
            user=user, job_id=job_id, authorization=authorization, ends_at=self._now() + VISIT_S
        )
        return key

    def find(self, job_id: str, key: str) -> Visit:
        """Return the visit with this key.

        Raises:
            NotKnown: There is none of this job, or it is over.
        """
        visit = self._visits.get(_digest(key))
        if visit is None or visit.job_id != job_id or visit.ends_at <= self._now():
            raise NotKnown("this address of a job's server is over: open the job's own address again")
        return visit

    def _forget_ended(self) -> None:
        while self._visits and next(iter(self._visits.values())).ends_at <= self._now():
            self._visits.popitem(last=False)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
