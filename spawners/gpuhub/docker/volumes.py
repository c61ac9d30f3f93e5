"""Finds an instance's obsolete volumes on a node.

There are two kinds. An NFS volume is a definition only: removing it unmounts it, and files on the server stay. A
scratch volume holds the data itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuhub.common import names
from gpuhub.common.units import format_span
from gpuhub.config.identity import UserIdentity
from gpuhub.config.settings import StorageSettings
from gpuhub.docker.container_spec import build_mounts


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


def find_used_volumes(containers: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the volumes that the listed containers have, running or not."""
    return {
        str(mount["Name"]) for container in containers for mount in container.get("Mounts") or () if mount.get("Name")
    }


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
