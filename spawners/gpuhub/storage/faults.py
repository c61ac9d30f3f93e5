"""What Docker says when it cannot mount, as what a user may read and an administrator can do. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuhub.settings import Storage

#: Docker's words for a mount that failed: of a volume, of a folder of the node's, or inside of runc.
_MOUNTING = re.compile(
    r"failed to mount local volume|error while mounting volume|error mounting|bind source path|"
    r"invalid mount config|stale (nfs )?file handle|mount\.nfs|passed in network volume address",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class _Fault:
    says: str
    #: May name `{node}`, `{what}` and `{place}`.
    means: str


#: The first whose words Docker says counts. Docker mounts without mount.nfs, so these are mostly the kernel's words.
_FAULTS = (
    _Fault(
        r"no such device|unknown filesystem type",
        "the kernel of node {node} has no NFS client: `apt-get install nfs-common` there, and `modprobe nfs`",
    ),
    _Fault(
        r"stale (nfs )?file handle",
        "the file server has another file system at {place} than when node {node} mounted it (stale file handle). "
        "There, as root, `umount -l` what is stale, or restart the node; on the server, see that the export is what "
        "it was. Nothing was deleted",
    ),
    _Fault(
        r"bind source path does not exist|no such file or directory",
        "there is no {place} for node {node}: it must be exported by the file server, or mounted on the node, and "
        "the folder must exist",
    ),
    _Fault(
        r"permission denied|access denied",
        "the file server does not let node {node} have {place}: its /etc/exports must name the node's address",
    ),
    _Fault(
        r"operation not permitted",
        "the file server, or the kernel of node {node}, does not allow it: see /etc/exports, and `dmesg` on the node",
    ),
    _Fault(r"connection refused", "the file server does not serve NFS at present: it refuses node {node}"),
    _Fault(r"timed out|timeout|host is down", "the file server does not answer node {node}"),
    _Fault(r"no route to host|network is unreachable", "node {node} has no way to the file server"),
    _Fault(
        r"no such host|network volume address",
        "node {node} cannot look up the file server's name: write its IP address in [storage]",
    ),
    _Fault(
        r"protocol not supported|not supported|invalid argument",
        "the kernel of node {node}, or the file server, does not take nfs_options = {options!r} of [storage]",
    ),
    _Fault(r"input/output error", "the disk or the file server fails (input/output error)"),
)


def explain_mount(text: str, node: str, storage: Storage, owner: str) -> str | None:
    """What a failed call to Docker means where a mount is the reason; None where it is not."""
    if not _MOUNTING.search(text):
        return None
    what, place = _concerned(text, storage, owner)
    means = next((fault.means for fault in _FAULTS if re.search(fault.says, text, re.IGNORECASE)), None)
    if means is None:
        return f"Node {node} cannot mount {what} ({place}): {text}"
    return (
        f"Node {node} cannot mount {what} ({place}): "
        f"{means.format(node=node, what=what, place=place, options=storage.nfs_options)}."
    )


def describe_hang(node: str, storage: Storage, owner: str) -> str:
    """A call that mounts does not end, while the daemon answers others."""
    home = storage.home.replace("{username}", owner)
    places = " or ".join(place for place in (home, storage.datasets) if place is not None)
    return (
        f"Docker on node {node} answers, but does not get on with the container: most likely its storage hangs there, "
        f"{places}. Then the file server, or the network between the two, does not answer; `dmesg` on {node} says so."
    )


def _concerned(text: str, storage: Storage, owner: str) -> tuple[str, str]:
    """Which of a container's mounts Docker speaks of: its name, and where it comes from."""
    datasets = storage.datasets
    if datasets is not None and ("-datasets-" in text or (datasets.startswith("/") and datasets in text)):
        return "the datasets", datasets
    if "-scratch-" in text:
        return "the scratch", "a volume of its own"
    return f"the home of {owner}", storage.home.replace("{username}", owner)
