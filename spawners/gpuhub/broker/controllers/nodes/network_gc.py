"""Removal of the networks of users who have no lease any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator

from gpuhub.broker.files.dataset_stager import DatasetStager
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.state.ledger import Ledger
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError
from gpuhub.docker.client import DockerClients
from gpuhub.docker.networks import remove_idle_user_networks

log = logging.getLogger(__name__)
#: Seconds between removals of unused networks.
NETWORKS_PERIOD_S = 30.0


class NetworkCollector:
    """Removes networks of users without leases from all nodes."""

    def __init__(self, *, core: BrokerState, daemons: DockerClients, stager: DatasetStager) -> None:
        self._core = core
        self._daemons = daemons
        self._owners = _Owners(core.ledger, stager)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(NETWORKS_PERIOD_S)
            try:
                removed = await remove_idle_user_networks(
                    self._daemons, self._core.cluster, self._daemons.instance, self._owners
                )
            except GpuhubError as error:
                log.info("unused networks stay for now: %s", error)
            else:
                if removed:
                    log.info("removed unused networks: %s", ", ".join(removed))


class _Owners(Collection[str]):
    """Everybody with a lease that has not ended, at the moment of the question; and the stager during a transfer."""

    def __init__(self, ledger: Ledger, stager: DatasetStager) -> None:
        self._ledger = ledger
        self._stager = stager

    def _now(self) -> set[str]:
        owners = {lease.owner for lease in self._ledger.snapshot.leases.values()}
        return owners | {names.STAGING_OWNER} if self._stager.is_transferring else owners

    def __contains__(self, owner: object) -> bool:
        return owner in self._now()

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())
