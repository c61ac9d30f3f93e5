"""Which of an instance's volumes on a node are needed no longer. Pure.

Two kinds are told apart. Volumes of type nfs are definitions only: removing one unmounts it and forgets its options,
and what lies on the server is not touched. A scratch volume is its data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuhub import names
from gpuhub.containers.arguments import build_mounts
from gpuhub.identity import Identity
from gpuhub.quantities import format_span
from gpuhub.settings import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A volume of the instance's, as a daemon lists it."""

    name: str
    kind: str
    #: Empty for what is nobody's own.
    owner: str
    is_nfs: bool

    @property
    def is_scratch(self) -> bool:
        """A user's data on this node."""
        return self.kind == names.VOLUME_SCRATCH and not self.is_nfs


@dataclass(frozen=True, slots=True)
class Removal:
    """A volume to be removed, and why."""

    volume: Volume
    why: str


def parse_volumes(listed: Mapping[str, Any], instance: str) -> list[Volume]:
    """The instance's volumes in what `APIClient.volumes` returns."""
    found = []
    for raw in listed.get("Volumes") or ():
        labels = raw.get("Labels") or {}
        if labels.get(names.LABEL_INSTANCE) == instance:
            is_nfs = (raw.get("Options") or {}).get("type") == "nfs"
            kind, owner = labels.get(names.LABEL_KIND, ""), labels.get(names.LABEL_OWNER, "")
            found.append(Volume(name=str(raw["Name"]), kind=kind, owner=owner, is_nfs=is_nfs))
    return found


def used_volumes(containers: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of the volumes that the listed containers have, running or not."""
    return {str(mount["Name"]) for one in containers for mount in one.get("Mounts") or () if mount.get("Name")}


def find_unneeded(
    volumes: Sequence[Volume],
    *,
    storage: Storage,
    instance: str,
    used: Collection[str],
    busy: Collection[str],
    idle_s: Mapping[str, float],
) -> list[Removal]:
    """What can go: NFS volumes that the settings do not give any more, and scratch that was idle for too long.

    Args:
        used: names of volumes that a container has.
        busy: owners with an open lease, whose container may be about to be made.
        idle_s: for how long each volume, by name, has had no lease that could use it, seconds.
    """
    removals = []
    for volume in volumes:
        if volume.name in used or volume.owner in busy:
            continue
        if volume.is_nfs and volume.name not in _given(storage, instance, volume.owner):
            removals.append(Removal(volume, "the settings give other NFS volumes now; the files on the server stay"))
        elif volume.is_scratch and idle_s.get(volume.name, 0.0) > storage.scratch_keep:
            why = f"no container of {volume.owner} used it for {format_span(storage.scratch_keep)}"
            removals.append(Removal(volume, why))
    return removals


def _given(storage: Storage, instance: str, owner: str) -> set[str]:
    """Names of the volumes that an owner's containers are given at present."""
    identity = Identity(name=owner, uid=0, gid=0, group_names=(owner,))
    return {str(mount["Source"]) for mount in build_mounts(storage, instance, identity)}
