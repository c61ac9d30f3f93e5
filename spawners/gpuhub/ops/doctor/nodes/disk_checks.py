"""Checks of the disk with Docker's data, and of the images on it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta

from gpuhub.ops.doctor.findings import Finding, ok, warning
from gpuhub.ops.doctor.node_facts import HostFacts
from gpuhub.ops.doctor.nodes.node_checks import NodeEnvironment

#: Debian publishes security updates every week.
MAX_IMAGE_AGE = timedelta(days=60)


def check_disks(docker_root: str, host: HostFacts, environment: NodeEnvironment) -> Iterator[Finding]:
    """Check that users cannot fill a disk that others need."""
    docker = host.disks.get(docker_root)
    if docker is None:
        return
    shared = [
        name
        for name, folder in environment.folders.items()
        if folder in host.disks and host.disks[folder].device == docker.device
    ]
    if shared:
        yield warning(
            "disks",
            f"on one file system with Docker's data: {', '.join(shared)}",
            "give Docker a disk of its own (data-root in daemon.json): a full one stops all of them",
        )
    if environment.has_scratch and not docker.has_quota:
        yield warning(
            "scratch",
            "nothing limits what users write to /scratch, on Docker's disk",
            "put Docker's data on XFS mounted with pquota and set project quotas (docs/storage.md), or scratch = false",
        )


def check_images(environment: NodeEnvironment, today: date) -> Iterator[Finding]:
    """Check that images have recent security updates."""
    remedy = "`gpuhub up --refresh` builds gpuhub's images again; then build again those that are based on them"
    for image, day in environment.image_dates.items():
        if day is None:
            yield warning("images", f"{image}: the age of its Debian packages is unknown", remedy)
        elif today - day > MAX_IMAGE_AGE:
            yield warning("images", f"{image}: its Debian packages are {(today - day).days} days old", remedy)
        else:
            yield ok("images", f"{image} has Debian's packages of {day}")
