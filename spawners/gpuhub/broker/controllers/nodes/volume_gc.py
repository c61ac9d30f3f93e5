"""Removal of unneeded volumes: scratch that was idle for `scratch_keep`, and NFS volumes of former settings.

An NFS volume is a definition only: removing it unmounts it, and files on the server stay. A scratch volume holds the
data itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.common.units import format_span
from gpuhub.config.settings import StorageSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.containers.container_lifecycle import find_used_volumes
from gpuhub.docker.containers.mounts import build_mounts

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
            await self._daemons.run(node, lambda client: client.remove_volume(volume.name), kind=CallKind.MOUNTING)
        except NotFound:
            return
        except Conflict as error:
            log.info("node %s: volume %s is in use after all: %s", node, volume.name, error)
            return
        log.info("node %s: volume %s is removed: %s", node, volume.name, removal.why)
        text = f"volume {volume.name} is removed: {removal.why}"
        self._core.add_event("volume.removed", text, owner=volume.owner or None, node=node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """One of the instance's volumes, as a daemon lists it."""

    name: str
    kind: str
    #: Empty for a volume that all users share.
    owner: str
    is_nfs: bool

    @property
    def is_scratch(self) -> bool:
        """Return whether the volume holds a user's data on this node."""
        return self.kind == names.VOLUME_SCRATCH and not self.is_nfs


@dataclass(frozen=True, slots=True)
class VolumeRemoval:
    """A volume to be removed, and the reason."""

    volume: Volume
    why: str


def parse_volumes(listed: Mapping[str, Any], instance: str) -> list[Volume]:
    """Return the instance's volumes in the result of `APIClient.volumes`."""
    volumes = []
    for raw in listed.get("Volumes") or ():
        labels = raw.get("Labels") or {}
        if labels.get(names.LABEL_INSTANCE) == instance:
            is_nfs = (raw.get("Options") or {}).get("type") == "nfs"
            kind, owner = labels.get(names.LABEL_KIND, ""), labels.get(names.LABEL_OWNER, "")
            volumes.append(Volume(name=str(raw["Name"]), kind=kind, owner=owner, is_nfs=is_nfs))
    return volumes


def find_unneeded_volumes(
    volumes: Sequence[Volume],
    *,
    storage: StorageSettings,
    instance: str,
    used: Collection[str],
    busy: Collection[str],
    idle_s: Mapping[str, float],
) -> list[VolumeRemoval]:
    """Find the NFS volumes that the settings no longer name, and scratch volumes that were idle for too long.

    Args:
        used: Names of volumes that a container has.
        busy: Owners with an open lease, whose container may be about to be created.
        idle_s: Seconds since a lease could last use each volume, by the volume's name.
    """
    removals = []
    for volume in volumes:
        if volume.name in used or volume.owner in busy:
            continue
        if volume.is_nfs and volume.name not in _configured_volumes(storage, instance, volume.owner):
            removals.append(
                VolumeRemoval(volume, "the settings name other NFS volumes now; the files on the server stay")
            )
        elif volume.is_scratch and idle_s.get(volume.name, 0.0) > storage.scratch_keep:
            why = f"no container of {volume.owner} used it for {format_span(storage.scratch_keep)}"
            removals.append(VolumeRemoval(volume, why))
    return removals


def _configured_volumes(storage: StorageSettings, instance: str, owner: str) -> set[str]:
    """Return the names of the volumes that an owner's containers get according to the settings."""
    identity = UserIdentity(name=owner, uid=0, gid=0, group_names=(owner,))
    return {str(mount["Source"]) for mount in build_mounts(storage, instance, identity)}
