"""What the broker asks of the hub: servers that a restart forgot, and notebooks whose time is over."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from gpuhub.broker.core import Core
from gpuhub.broker.due import UNASKED_S, expired_notebooks, orphaned_requests
from gpuhub.broker.refusals import HubUnreachable
from gpuhub.broker.rows import LeaseRow
from gpuhub.errors import GpuhubError, NotFound

log = logging.getLogger(__name__)

#: Between two looks, seconds.
PERIOD_S = 2.0


class Servers(Protocol):
    """The hub, as far as users' servers go."""

    async def start_server(self, owner: str, server: str, profile: str) -> None:
        """Start a server, see `hub.HubApi`."""
        ...

    async def stop_server(self, owner: str, server: str) -> None:
        """Stop a server, see `hub.HubApi`."""
        ...


class Reviver:
    """Keeps a queued request a request for a notebook, whatever happens to the hub."""

    def __init__(self, *, core: Core, servers: Servers) -> None:
        self._core = core
        self._servers = servers
        #: When the hub was last asked for each lease; monotonic.
        self._tried: dict[str, float] = {}

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("asking the hub for servers failed unexpectedly")
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Ask the hub for what is due; each lease at most once in `UNASKED_S`."""
        snapshot = self._core.ledger.snapshot
        self._tried = {lease: at for lease, at in self._tried.items() if lease in snapshot.leases}
        starts = [row for row in orphaned_requests(snapshot, self._core.unasked_s) if self._may_try(row)]
        stops = [row for row in expired_notebooks(snapshot, self._core.clock.now()) if self._may_try(row)]
        await asyncio.gather(*map(self._start, starts), *map(self._stop, stops))

    def _may_try(self, lease: LeaseRow) -> bool:
        now = self._core.clock.monotonic()
        if now - self._tried.get(lease.id, float("-inf")) < UNASKED_S:
            return False
        self._tried[lease.id] = now
        return True

    async def _start(self, lease: LeaseRow) -> None:
        try:
            await self._servers.start_server(lease.owner, lease.subject, lease.profile or "")
        except NotFound as error:
            await self._core.end_leases({lease.id: str(error)})
        except HubUnreachable:
            log.info("lease %s of %s waits for the hub", lease.id, lease.owner)
        except GpuhubError as error:
            log.warning("lease %s of %s: %s", lease.id, lease.owner, error)
        else:
            log.info("the hub was asked to start %s/%s again", lease.owner, lease.subject)

    async def _stop(self, lease: LeaseRow) -> None:
        try:
            await self._servers.stop_server(lease.owner, lease.subject)
        except GpuhubError as error:
            log.warning("lease %s of %s is over, and the hub cannot stop it: %s", lease.id, lease.owner, error)
