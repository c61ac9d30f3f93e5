"""Nodes' copies of datasets: which are whole, when each was last used, and which make room for others.

A copy is a Docker volume on the node, named by the dataset and the digest of its list of files. Containers mount it
read-only, so a copy that was whole stays so.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpuhub.common import names
from gpuhub.common.errors import Conflict, NotFound
from gpuhub.common.units import format_span
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.docker.containers.container_lifecycle import find_used_volumes
from gpuhub.domain.clock import Clock

log = logging.getLogger(__name__)
#: A copy is not removed within this time after it was requested: its container may not exist yet; seconds.
PINNED_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetVersion:
    """A dataset as the file server has it now."""

    #: Such as `datasets/imagenet`.
    dataset: str
    #: Digest of names, sizes and times of its files.
    digest: str
    files: int
    #: Size of all files, bytes.
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCopy:
    """A volume with a copy, as a daemon lists it."""

    volume: str
    dataset: str
    size: int


@dataclass(frozen=True, slots=True)
class CopyRemoval:
    """A copy to be removed, and the reason."""

    copy: StagedCopy
    reason: str


class StagedCopies:
    """The copies on all nodes."""

    def __init__(self, daemons: DockerClients, clock: Clock) -> None:
        self._daemons = daemons
        self._clock = clock
        #: Copies that were written or checked in this run of the broker, by node and volume.
        self._whole: set[tuple[str, str]] = set()
        #: When each copy was last requested or mounted, or first seen in this run; monotonic.
        self._used_at: dict[tuple[str, str], float] = {}
        #: Copies that were requested in this run of the broker; their containers may not exist yet.
        self._requested: set[tuple[str, str]] = set()

    def build_volume(self, version: DatasetVersion) -> str:
        """Return the name of the volume with a copy of this version."""
        return names.staged_volume_name(self._daemons.instance, version.dataset, version.digest)

    def list_holders(self, volume: str) -> list[str]:
        """Return the nodes with a whole copy, as far as this run of the broker knows."""
        return sorted(node for node, known in self._whole if known == volume)

    def record_whole(self, node: str, volume: str) -> None:
        """Record that the copy is whole, and in use."""
        self._whole.add((node, volume))
        self.record_use(node, volume)

    def record_use(self, node: str, volume: str) -> None:
        """Record that a container needs the copy now."""
        self._requested.add((node, volume))
        self._used_at[node, volume] = self._clock.monotonic()

    def is_whole(self, node: str, volume: str) -> bool:
        """Return whether the copy was written or checked in this run of the broker."""
        return (node, volume) in self._whole

    async def exists(self, node: str, volume: str) -> bool:
        """Return whether the node has a volume that was made for a copy; another one of the name is removed."""
        try:
            found = await self._daemons.call(node, "inspect_volume", volume)
        except NotFound:
            self._whole.discard((node, volume))
            return False
        if (found.get("Labels") or {}).get(names.LABEL_KIND) == names.VOLUME_STAGED:
            return True
        # Docker makes an empty volume for a container whose copy was removed by hand.
        await self.remove(node, volume)
        return False

    async def create(self, node: str, version: DatasetVersion) -> None:
        """Create the empty volume of a copy; an unfinished one is removed first.

        Raises:
            Conflict: A container uses the unfinished one.
        """
        volume = self.build_volume(version)
        if not await self.remove(node, volume):
            raise Conflict(f"node {node}: a container uses an unfinished copy of {version.dataset}: end it first")
        labels = {
            names.LABEL_INSTANCE: self._daemons.instance,
            names.LABEL_KIND: names.VOLUME_STAGED,
            names.LABEL_DATASET: version.dataset,
            names.LABEL_BYTES: str(version.size),
        }
        self.record_use(node, volume)
        await self._daemons.call(node, "create_volume", volume, labels=labels)

    async def remove(self, node: str, volume: str) -> bool:
        """Remove a copy, and return whether it is gone.

        Raises:
            GpuhubError: The node does not answer.
        """
        self._whole.discard((node, volume))
        try:
            # Without force: the daemon refuses to remove a volume that a container uses.
            with suppress(NotFound):
                await self._daemons.run(node, lambda client: client.remove_volume(volume), kind=CallKind.MOUNTING)
        except Conflict:
            return False
        self._requested.discard((node, volume))
        return True

    async def find_removals(self, node: str, *, keep_s: float, missing_bytes: int) -> list[CopyRemoval]:
        """Return the copies that no container uses and that are too old, or make room for `missing_bytes`."""
        filters = {"label": [f"{names.LABEL_INSTANCE}={self._daemons.instance}"]}
        copies = parse_copies(await self._daemons.call(node, "volumes", filters=filters))
        # Listed after the volumes: a container that was created since has been requested within PINNED_S.
        containers = await self._daemons.call(node, "containers", all=True)
        now = self._clock.monotonic()
        mounted = find_used_volumes(containers)
        for copy in copies:
            if copy.volume in mounted:
                self._used_at[node, copy.volume] = now
        idle_s = {copy.volume: now - self._used_at.setdefault((node, copy.volume), now) for copy in copies}
        for key in [key for key in self._used_at if key[0] == node and key[1] not in idle_s]:
            del self._used_at[key]
        candidates = [copy for copy in copies if copy.volume not in mounted and self._is_free(node, copy, idle_s)]
        return choose_removals(candidates, idle_s=idle_s, keep_s=keep_s, missing_bytes=missing_bytes)

    def _is_free(self, node: str, copy: StagedCopy, idle_s: Mapping[str, float]) -> bool:
        # A copy that only an earlier run of the broker knew was not requested in this one.
        return idle_s[copy.volume] >= PINNED_S or (node, copy.volume) not in self._requested


def parse_copies(listed: Mapping[str, Any]) -> list[StagedCopy]:
    """Return the copies in the result of `APIClient.volumes`."""
    copies = []
    for raw in listed.get("Volumes") or ():
        labels = raw.get("Labels") or {}
        if labels.get(names.LABEL_KIND) == names.VOLUME_STAGED:
            size = labels.get(names.LABEL_BYTES, "")
            copies.append(
                StagedCopy(
                    volume=str(raw["Name"]),
                    dataset=labels.get(names.LABEL_DATASET, ""),
                    size=int(size) if size.isdecimal() else 0,
                )
            )
    return copies


def choose_removals(
    copies: Collection[StagedCopy], *, idle_s: Mapping[str, float], keep_s: float, missing_bytes: int
) -> list[CopyRemoval]:
    """Choose the copies that were not used for longer than `keep_s`, and then the least recently used ones.

    Args:
        copies: Copies that no container uses.
        idle_s: Seconds since the last use, by volume.
        missing_bytes: Bytes that the node's disk lacks.
    """
    removals = []
    for copy in sorted(copies, key=lambda copy: (-idle_s[copy.volume], copy.volume)):
        if idle_s[copy.volume] > keep_s:
            removals.append(CopyRemoval(copy, f"no container used it for {format_span(keep_s)}"))
        elif missing_bytes > 0:
            removals.append(CopyRemoval(copy, "the node's disk needs the space"))
        else:
            continue
        missing_bytes -= copy.size
    return removals
