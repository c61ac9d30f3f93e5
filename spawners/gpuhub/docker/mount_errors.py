"""Explains failed and hanging mounts: a dead file server must not be taken for a dead node."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gpuhub.common.errors import GpuhubError, NodeSilent, StorageUnavailable
from gpuhub.config.settings import StorageSettings
from gpuhub.docker.client import DockerClients

#: A healthy daemon answers `/_ping` in milliseconds.
_PING_TIMEOUT_S = 5.0
#: Docker's messages for a failed mount: of a volume, of a folder on the node, or in runc.
_MOUNT_FAILURE = re.compile(
    r"failed to mount local volume|error while mounting volume|error mounting|bind source path|"
    r"invalid mount config|stale (nfs )?file handle|mount\.nfs|passed in network volume address",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class _MountFault:
    pattern: str
    #: May name `{node}`, `{what}` and `{place}`.
    explanation: str


#: The first match counts. Docker mounts without mount.nfs, so most of these messages are the kernel's.
_FAULTS = (
    _MountFault(
        r"no such device|unknown filesystem type",
        "the kernel of node {node} has no NFS client: `apt-get install nfs-common` there, and `modprobe nfs`",
    ),
    _MountFault(
        r"stale (nfs )?file handle",
        "the file server has another file system at {place} than when node {node} mounted it (stale file handle). "
        "There, as root, `umount -l` what is stale, or restart the node; on the server, see that the export is what "
        "it was. Nothing was deleted",
    ),
    _MountFault(
        r"bind source path does not exist|no such file or directory",
        "there is no {place} for node {node}: it must be exported by the file server, or mounted on the node, and "
        "the folder must exist",
    ),
    _MountFault(
        r"permission denied|access denied",
        "the file server does not let node {node} have {place}: its /etc/exports must name the node's address",
    ),
    _MountFault(
        r"operation not permitted",
        "the file server, or the kernel of node {node}, does not allow it: see /etc/exports, and `dmesg` on the node",
    ),
    _MountFault(r"connection refused", "the file server does not serve NFS at present: it refuses node {node}"),
    _MountFault(r"timed out|timeout|host is down", "the file server does not answer node {node}"),
    _MountFault(r"no route to host|network is unreachable", "node {node} has no way to the file server"),
    _MountFault(
        r"no such host|network volume address",
        "node {node} cannot look up the file server's name: write its IP address in [storage]",
    ),
    _MountFault(
        r"protocol not supported|not supported|invalid argument",
        "the kernel of node {node}, or the file server, does not take nfs_options = {options!r} of [storage]",
    ),
    _MountFault(r"input/output error", "the disk or the file server fails (input/output error)"),
)


@asynccontextmanager
async def translate_mount_errors(
    daemons: DockerClients, node: str, storage: StorageSettings, owner: str
) -> AsyncIterator[None]:
    """Wrap the creation and start of an owner's container, and name storage in the error if it is the cause.

    Raises:
        StorageUnavailable: Storage is the cause of the error. A container that was created remains.
    """
    try:
        yield
    except NodeSilent as error:
        if await _is_daemon_responsive(daemons, node):
            raise StorageUnavailable(describe_mount_hang(node, storage, owner)) from error
        raise
    except GpuhubError as error:
        explanation = explain_mount_failure(str(error), node, storage, owner)
        if explanation is None:
            raise
        raise StorageUnavailable(explanation) from error


async def _is_daemon_responsive(daemons: DockerClients, node: str) -> bool:
    try:
        async with asyncio.timeout(_PING_TIMEOUT_S):
            return bool(await daemons.call(node, "ping"))
    except (GpuhubError, TimeoutError):
        return False


def explain_mount_failure(text: str, node: str, storage: StorageSettings, owner: str) -> str | None:
    """Return an explanation of Docker's error for users, or None if its cause is not a mount."""
    if not _MOUNT_FAILURE.search(text):
        return None
    what, place = _find_mount(text, storage, owner)
    means = next((fault.explanation for fault in _FAULTS if re.search(fault.pattern, text, re.IGNORECASE)), None)
    if means is None:
        return f"Node {node} cannot mount {what} ({place}): {text}"
    return (
        f"Node {node} cannot mount {what} ({place}): "
        f"{means.format(node=node, what=what, place=place, options=storage.nfs_options)}."
    )


def describe_mount_hang(node: str, storage: StorageSettings, owner: str) -> str:
    """Return the text for a call that hangs in a mount while the daemon answers other calls."""
    home = storage.home.replace("{username}", owner)
    places = " or ".join(place for place in (home, storage.datasets) if place is not None)
    return (
        f"Docker on node {node} answers, but cannot finish the container: most likely its storage hangs there, "
        f"{places}. Then the file server, or the network between the two, does not answer; `dmesg` on {node} shows it."
    )


def _find_mount(text: str, storage: StorageSettings, owner: str) -> tuple[str, str]:
    """Return the name and the source of the mount that Docker's message is about."""
    datasets = storage.datasets
    if datasets is not None and ("-datasets-" in text or (datasets.startswith("/") and datasets in text)):
        return "the datasets", datasets
    if "-scratch-" in text:
        return "the scratch", "a local volume"
    return f"the home of {owner}", storage.home.replace("{username}", owner)
