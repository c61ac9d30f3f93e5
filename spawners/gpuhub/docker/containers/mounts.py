"""What is mounted into users' containers: homes, datasets, models and scratch volumes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from urllib.parse import urlsplit

from docker.types import DriverConfig, Mount

from gpuhub.common import names
from gpuhub.config.machines.storage import StorageSettings
from gpuhub.config.users.identity import UserIdentity

#: Where they are in the containers.
DATASETS = "/datasets"
MODELS = "/models"
SCRATCH = "/scratch"


def build_mounts(
    storage: StorageSettings, instance: str, identity: UserIdentity, staged: Mapping[str, str] | None = None
) -> list[Mount]:
    """Build the mounts of the home, the datasets and models (read-only) and the node's scratch volume.

    Args:
        staged: Volumes with the node's copies of datasets, which cover the folders of the file server.
    """
    mounts = [build_home_mount(storage, instance, identity)]
    if storage.datasets is not None:
        mounts.append(build_datasets_mount(storage, instance))
        mounts += [build_staged_mount(dataset, volume) for dataset, volume in sorted((staged or {}).items())]
    if storage.models is not None:
        labels = {names.LABEL_INSTANCE: instance, names.LABEL_KIND: names.VOLUME_MODELS}
        volume = f"{instance}-models"
        mounts.append(_storage_mount(storage.models, MODELS, storage, volume, labels, read_only=True))
    if storage.scratch:
        mounts.append(_scratch_mount(instance, identity))
    return mounts


def build_datasets_mount(storage: StorageSettings, instance: str) -> Mount:
    """Build the read-only mount of all datasets; the settings must have some."""
    assert storage.datasets is not None  # noqa: S101 - for the type checker
    labels = {names.LABEL_INSTANCE: instance, names.LABEL_KIND: names.VOLUME_DATASETS}
    return _storage_mount(storage.datasets, DATASETS, storage, f"{instance}-datasets", labels, read_only=True)


def build_staged_mount(dataset: str, volume: str) -> Mount:
    """Build the read-only mount of a copy at the dataset's own path.

    It has no labels: a volume that Docker had to create here, since the copy was removed by hand, is not a copy.
    """
    return Mount(target=f"/{dataset}", source=volume, type="volume", read_only=True, no_copy=True)


def build_home_mount(storage: StorageSettings, instance: str, identity: UserIdentity) -> Mount:
    """Build the mount of the home at `/home/<user>`."""
    home = storage.format_home(identity.name)
    labels = _volume_labels(instance, identity.name, names.VOLUME_HOME)
    return _storage_mount(home, identity.home, storage, f"{instance}-home-{names.make_slug(identity.name)}", labels)


def _scratch_mount(instance: str, identity: UserIdentity) -> Mount:
    """Build the mount of a volume on the node that outlives the user's containers; `inject_identity` sets its owner."""
    return Mount(
        target=SCRATCH,
        source=names.scratch_volume_name(instance, identity.name),
        type="volume",
        # Otherwise Docker would copy the image's files there, with their owner.
        no_copy=True,
        labels=_volume_labels(instance, identity.name, names.VOLUME_SCRATCH),
    )


def _volume_labels(instance: str, owner: str, kind: str) -> dict[str, str]:
    return {names.LABEL_INSTANCE: instance, names.LABEL_KIND: kind, names.LABEL_OWNER: owner}


def _storage_mount(
    source: str,
    target: str,
    storage: StorageSettings,
    volume: str,
    labels: Mapping[str, str],
    *,
    read_only: bool = False,
) -> Mount:
    if not source.startswith("nfs://"):
        # In this form Docker refuses a missing folder; the older form of a bind would make it, owned by root.
        return Mount(target=target, source=source, type="bind", read_only=read_only)
    url = urlsplit(source)
    options = {
        "type": "nfs",
        "o": ",".join(part for part in (f"addr={url.hostname}", storage.nfs_options) if part),
        "device": f":{url.path}",
    }
    # A volume keeps the options with which it was made, so other options need another name.
    digest = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:8]
    return Mount(
        target=target,
        source=f"{volume}-{digest}",
        type="volume",
        read_only=read_only,
        no_copy=True,
        labels=dict(labels),
        driver_config=DriverConfig("local", options),
    )


def build_guest_home_mount(identity: UserIdentity) -> Mount:
    """Build the mount of an empty volume in place of the home; it is removed with the container."""
    return Mount(target=identity.home, source=None, type="volume", no_copy=True)
