"""Takes volumes away that nobody needs: scratch that was idle for `scratch_keep`, and NFS volumes of other settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from gpuhub import names
from gpuhub.broker.core import Core
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import Conflict, GpuhubError, NotFound
from gpuhub.storage.volumes import Removal, Volume, find_unneeded, parse_volumes, used_volumes

log = logging.getLogger(__name__)

#: Between two looks, and before the first: after a reboot the machine's clock is right by then. Seconds.
PERIOD_S = 1800.0


class VolumeKeeper:
    """Looks at every node that answers, again and again.

    A scratch volume's age counts from the end of its owner's last lease on the node, as the store knows it; where it
    knows of none, or the machine's clock was set meanwhile, from when this run of the broker first saw the volume.
    """

    def __init__(self, *, core: Core, daemons: Daemons) -> None:
        self._core = core
        self._daemons = daemons
        #: When each volume was first seen, by node and name; monotonic.
        self._seen: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Look once at every node."""
        ends = await asyncio.to_thread(self._core.store.lease_ends)
        nodes = [name for name, record in self._core.inventory.nodes.items() if record.is_up]
        await asyncio.gather(*(self._tidy(node, ends) for node in nodes))

    async def _tidy(self, node: str, ends: Mapping[tuple[str, str], float]) -> None:
        try:
            for removal in await self._find(node, ends):
                await self._remove(node, removal)
        except GpuhubError as error:
            log.info("node %s: its volumes stay for now: %s", node, error)

    async def _find(self, node: str, ends: Mapping[tuple[str, str], float]) -> list[Removal]:
        instance = self._daemons.instance
        mine = {"label": [f"{names.LABEL_INSTANCE}={instance}"]}
        volumes = parse_volumes(await self._daemons.call(node, "volumes", filters=mine), instance)
        # After the volumes: a container that was made since has its volume in this list, or an open lease.
        containers = await self._daemons.call(node, "containers", all=True)
        leases = self._core.ledger.snapshot.leases.values()
        return find_unneeded(
            volumes,
            storage=self._core.cluster.storage,
            instance=instance,
            used=used_volumes(containers),
            busy={lease.owner for lease in leases},
            idle_s=self._idle(node, volumes, ends),
        )

    def _idle(self, node: str, volumes: Sequence[Volume], ends: Mapping[tuple[str, str], float]) -> dict[str, float]:
        clock, there = self._core.clock, {volume.name for volume in volumes}
        self._seen = {key: at for key, at in self._seen.items() if key[0] != node or key[1] in there}
        idle = {}
        for volume in volumes:
            seen = self._seen.setdefault((node, volume.name), clock.monotonic())
            end = ends.get((volume.owner, node))
            is_known = end is not None and not clock.follows
            idle[volume.name] = clock.now() - end if is_known and end is not None else clock.monotonic() - seen
        return idle

    async def _remove(self, node: str, removal: Removal) -> None:
        volume = removal.volume
        try:
            # Without force: a daemon refuses to remove what a container has, which is the last check.
            await self._daemons.run(node, lambda client: client.remove_volume(volume.name), mounting=True)
        except NotFound:
            return
        except Conflict as error:
            log.info("node %s: volume %s is in use after all: %s", node, volume.name, error)
            return
        log.info("node %s: volume %s is removed: %s", node, volume.name, removal.why)
        text = f"volume {volume.name} is removed: {removal.why}"
        self._core.note_event("volume.removed", text, owner=volume.owner or None, node=node)
