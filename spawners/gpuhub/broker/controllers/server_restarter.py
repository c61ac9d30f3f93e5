"""The restarter of notebook servers that the hub forgot at its restart; it also stops notebooks whose time is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gpuhub.broker.controllers.hub_client import POLL_TIMEOUT_S, ServerApi
from gpuhub.broker.state import mutations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.errors import HubUnreachable
from gpuhub.broker_api.schemas import LeaseState, Purpose
from gpuhub.common.errors import GpuhubError, NotFound
from gpuhub.domain import lease_states
from gpuhub.domain.models import LeaseRow, LedgerSnapshot

log = logging.getLogger(__name__)

#: Interval between two checks for servers to start or stop, seconds.
CHECK_PERIOD_S = 2.0


class ServerRestarter:
    """Makes the hub start servers whose spawner a restart of the hub ended, and stop notebooks whose time is over."""

    def __init__(self, *, core: BrokerState, servers: ServerApi) -> None:
        self._core = core
        self._servers = servers
        #: When the hub was last called for each lease; monotonic.
        self._attempted_at: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            try:
                await self.run_once()
            except Exception:
                log.exception("the check for servers to start or stop failed unexpectedly")
            await asyncio.sleep(CHECK_PERIOD_S)

    async def run_once(self) -> None:
        """Start and stop what is due, each lease at most once in `POLL_TIMEOUT_S`."""
        snapshot = self._core.ledger.snapshot
        self._attempted_at = {lease: at for lease, at in self._attempted_at.items() if lease in snapshot.leases}
        starts = [
            row
            for row in find_orphaned_requests(snapshot, self._core.heartbeats.seconds_since_poll)
            if self._may_try(row)
        ]
        stops = [row for row in find_expired_notebooks(snapshot, self._core.clock.now()) if self._may_try(row)]
        await asyncio.gather(*map(self._start, starts), *map(self._stop, stops))

    def _may_try(self, lease: LeaseRow) -> bool:
        now = self._core.clock.monotonic()
        if now - self._attempted_at.get(lease.id, float("-inf")) < POLL_TIMEOUT_S:
            return False
        self._attempted_at[lease.id] = now
        return True

    async def _start(self, lease: LeaseRow) -> None:
        try:
            await self._servers.start_server(lease.owner, lease.subject, build_options(lease))
        except NotFound as error:
            await self._core.ledger.change(mutations.end_leases({lease.id: str(error)}))
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


def build_options(lease: LeaseRow) -> dict[str, str]:
    """Return the spawner's options for the start that waits for a lease."""
    options = {"profile": lease.profile or ""}
    if lease.image is not None:
        options["image"] = lease.image
    if not lease.resources.suspendable:
        options["suspend"] = "no"
    return options | ({"keep": "yes"} if lease.is_persistent else {})


def find_expired_notebooks(snapshot: LedgerSnapshot, now: float) -> list[LeaseRow]:
    """Return the running notebooks whose time limit is over."""
    return [
        lease
        for lease in snapshot.leases.values()
        if lease.purpose is Purpose.NOTEBOOK
        and lease.state is LeaseState.ACTIVE
        and lease_states.is_expired(lease, now)
    ]


def find_orphaned_requests(snapshot: LedgerSnapshot, seconds_since_poll: Callable[[LeaseRow], float]) -> list[LeaseRow]:
    """Return the requests of notebooks that no spawner polls, since the hub has restarted."""
    return [
        lease
        for lease in snapshot.leases.values()
        if lease.purpose is Purpose.NOTEBOOK
        and lease.state in {LeaseState.REQUESTED, LeaseState.GRANTED}
        and seconds_since_poll(lease) > POLL_TIMEOUT_S
    ]
