"""Removal of unneeded volumes: scratch that was idle for `scratch_keep`, and NFS volumes of former settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from gpuhub.broker.state.core import BrokerState
from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.docker.client import DockerClients
from gpuhub.docker.volumes import Volume, VolumeRemoval, find_unneeded_volumes, find_used_volumes, parse_volumes

log = logging.getLogger(__name__)

#: Interval between two collections, and delay of the first, so that the clock is set after a reboot; seconds.
COLLECT_PERIOD_S = 1800.0


class VolumeCollector:
    """Removes unneeded volumes from every node that is up.

    A scratch volume's age counts from the end of its owner's last lease on the node, as stored. Without one, or after
    the machine's clock was set, it counts from when this run of the broker first saw the volume.
    """

    def __init__(self, *, core: BrokerState, daemons: DockerClients) -> None:
        self._core = core
        self._daemons = daemons
        #: When each volume was first seen, by node and name; monotonic.
        self._first_seen: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(COLLECT_PERIOD_S)
            await self.collect()

    async def collect(self) -> None:
        """Remove unneeded volumes from every node once."""
        ends = await asyncio.to_thread(self._core.store.find_last_lease_ends)
        nodes = [name for name, record in self._core.capacity.inventory.nodes.items() if record.is_up]
        await asyncio.gather(*(self._collect_on(node, ends) for node in nodes))

    async def _collect_on(self, node: str, ends: Mapping[tuple[str, str], float]) -> None:
        try:
            for removal in await self._find(node, ends):
                await self._remove(node, removal)
        except GpuhubError as error:
            log.info("node %s: its volumes cannot be collected now: %s", node, error)

    async def _find(self, node: str, ends: Mapping[tuple[str, str], float]) -> list[VolumeRemoval]:
        instance = self._daemons.instance
        own = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
        volumes = parse_volumes(await self._daemons.call(node, "volumes", filters=own), instance)
        # Listed after the volumes: the volume of a container that was made since is in this list, or has an open lease.
        containers = await self._daemons.call(node, "containers", all=True)
        leases = self._core.ledger.snapshot.leases.values()
        return find_unneeded_volumes(
            volumes,
            storage=self._core.cluster.storage,
            instance=instance,
            used=find_used_volumes(containers),
            busy={lease.owner for lease in leases},
            idle_s=self._measure_idle(node, volumes, ends),
        )

    def _measure_idle(
        self, node: str, volumes: Sequence[Volume], ends: Mapping[tuple[str, str], float]
    ) -> dict[str, float]:
        clock, present = self._core.clock, {volume.name for volume in volumes}
        self._first_seen = {key: at for key, at in self._first_seen.items() if key[0] != node or key[1] in present}
        idle = {}
        for volume in volumes:
            seen = self._first_seen.setdefault((node, volume.name), clock.monotonic())
            end = ends.get((volume.owner, node))
            is_known = end is not None and not clock.jump_count
            idle[volume.name] = clock.now() - end if is_known and end is not None else clock.monotonic() - seen
        return idle

    async def _remove(self, node: str, removal: VolumeRemoval) -> None:
        volume = removal.volume
        try:
            # Without force: the daemon refuses to remove a volume that a container uses, which is the last check.
            await self._daemons.run(node, lambda client: client.remove_volume(volume.name), mounting=True)
        except NotFound:
            return
        except Conflict as error:
            log.info("node %s: volume %s is in use after all: %s", node, volume.name, error)
            return
        log.info("node %s: volume %s is removed: %s", node, volume.name, removal.why)
        text = f"volume {volume.name} is removed: {removal.why}"
        self._core.add_event("volume.removed", text, owner=volume.owner or None, node=node)
