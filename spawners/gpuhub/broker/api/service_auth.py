"""Callers of services: everybody with a token, and containers of jobs with the key of their job.

A key reaches services and nothing else of the broker: the scheme of its header is refused everywhere else.
"""

from __future__ import annotations

from gpuhub.broker.api.auth import Authenticator
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.errors import NotKnown
from gpuhub.common import job_keys
from gpuhub.domain.models import Identity


class ServiceAuthenticator:
    """Identifies callers of services."""

    def __init__(self, core: BrokerState, authenticator: Authenticator, job_secret: str) -> None:
        """`job_secret` is that of the jobs' keys."""
        self._core = core
        self._authenticator = authenticator
        self._job_secret = job_secret

    async def identify(self, authorization: str | None, address: str = "") -> Identity:
        """Return the caller, and count a request.

        Raises:
            NotKnown: no running job has this key, or as `Authenticator.identify`, as all other errors.
        """
        key = _find_key(authorization)
        if key is None:
            return await self._authenticator.identify(authorization, address)
        caller = self._find_owner(key)
        self._authenticator.count_request(caller)
        return caller

    async def confirm(self, authorization: str | None, address: str = "") -> Identity:
        """Return the caller as `identify` does, without counting a request."""
        key = _find_key(authorization)
        return await self._authenticator.confirm(authorization, address) if key is None else self._find_owner(key)

    def _find_owner(self, key: str) -> Identity:
        snapshot = self._core.ledger.snapshot
        job = snapshot.jobs.get(job_keys.find_job_id(self._job_secret, key) or "")
        if job is None or not job.is_open:
            raise NotKnown("this is not the key of a running job")
        return Identity(name=job.owner, is_user=True, groups=frozenset(snapshot.leases[job.lease_id].groups))


def _find_key(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == job_keys.SCHEME.lower() else None
