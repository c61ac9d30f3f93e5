"""Facts about the folder of homes as the head node sees it, and the checks of them: what shares its file system, and
the clock of its file server.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpuhub.common.errors import StorageUnavailable
from gpuhub.config.settings import StorageSettings
from gpuhub.ops.doctor.findings import Finding, failed, ok, warning
from gpuhub.ops.doctor.nodes.node_checks import CLOCK_ADVICE, SKEW_NOTED_S, describe_skew, find_skew
from gpuhub.storage.homes import BLOCKING_CALLS, find_home

_MOUNTS = Path("/proc/self/mountinfo")
_NFS = frozenset({"nfs", "nfs4"})
#: Mount options of file systems that keep limits for users or for folders.
_QUOTA_OPTIONS = frozenset({"quota", "usrquota", "uquota", "prjquota", "pquota"})
_JOURNALED_QUOTA = "usrjquota="
#: Errors where the head node may not create files.
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mounted file system, as the kernel lists it."""

    point: PurePosixPath
    #: The kernel's numbers of its device.
    device: str
    #: Such as `ext4` or `nfs4`.
    kind: str
    #: Such as `/dev/sda1`, or `192.168.1.20:/export/home`.
    source: str
    options: frozenset[str]

    @property
    def has_quota(self) -> bool:
        """Return whether it is mounted with quotas for users or folders."""
        return bool(self.options & _QUOTA_OPTIONS) or any(each.startswith(_JOURNALED_QUOTA) for each in self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerClock:
    """The clock of a file server."""

    server: str
    #: How far it is ahead of the head node's, and the error of that, seconds.
    ahead_s: float
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFacts:
    """Facts about the folder of homes."""

    folder: str
    #: Whose data are on its file system as well.
    neighbours: tuple[str, ...] = ()
    has_quota: bool = False
    #: None where homes are not on NFS, or the head node may not write there.
    clock: ServerClock | None = None
    #: Why the folder cannot be used; empty where it can.
    error: str = ""


async def read_home_facts(storage: StorageSettings, folders: Mapping[str, str]) -> HomeFacts | None:
    """Read the facts about the folder of homes within `storage.patience`; None where the head node does not see homes.

    Args:
        folders: Whose data could be on its file system as well: name of the program → folder.
    """
    location = find_home(storage, "user")
    if location is None:
        return None
    try:
        return await BLOCKING_CALLS.run(
            str(location.root),
            lambda: _read_facts(location.root, folders),
            limit_s=storage.patience,
            timeout_message=f"The folder of homes {location.root} on the head node does not answer",
        )
    except (StorageUnavailable, OSError) as error:
        return HomeFacts(folder=str(location.root), error=str(error))


def _read_facts(root: Path, folders: Mapping[str, str]) -> HomeFacts:
    mounts = parse_mounts(_MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"))
    homes = find_mount(root, mounts)
    if homes is None or not root.exists():
        return HomeFacts(folder=str(root))
    neighbours = [
        name
        for name, folder in folders.items()
        if Path(folder).exists() and (other := find_mount(Path(folder), mounts)) and other.device == homes.device
    ]
    return HomeFacts(
        folder=str(root),
        neighbours=tuple(neighbours),
        has_quota=homes.has_quota,
        clock=read_server_clock(root, homes.source) if homes.kind in _NFS else None,
    )


def parse_mounts(text: str) -> list[Mount]:
    """Parse `/proc/self/mountinfo`, described in proc(5)."""
    mounts = []
    for line in text.splitlines():
        about, _, kind_and_source = line.partition(" - ")
        _, _, device, _, point, options, *_ = about.split(" ")
        kind, source, more_options = kind_and_source.split(" ", 2)
        mounts.append(
            Mount(
                point=PurePosixPath(_unescape(point)),
                device=device,
                kind=kind,
                source=_unescape(source),
                options=frozenset([*options.split(","), *more_options.split(",")]),
            )
        )
    return mounts


def _unescape(text: str) -> str:
    """Undo the kernel's octal numbers for spaces, tabs, line ends and backslashes."""
    first, *rest = text.split("\\")
    return first + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def find_mount(path: Path, mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount that a path is on: the last one of those with the longest mount point."""
    real = PurePosixPath(os.path.realpath(path))
    found = None
    for mount in mounts:
        is_above = mount.point == real or mount.point in real.parents
        if is_above and (found is None or len(mount.point.parts) >= len(found.point.parts)):
            found = mount
    return found


def read_server_clock(folder: Path, source: str) -> ServerClock | None:
    """Read a file server's clock: it gives a file that is touched its own time. None where that is not allowed."""
    try:
        handle, name = tempfile.mkstemp(prefix=".gpuhub-clock-", dir=folder)
    except OSError as error:
        if error.errno in _NOT_WRITABLE:
            return None
        raise
    try:
        before = time.time()
        # Without a time, so that the server takes its own.
        os.utime(handle)
        stamp = os.fstat(handle).st_mtime
        after = time.time()
    finally:
        os.close(handle)
        Path(name).unlink()
    return ServerClock(
        server=source.partition(":/")[0],
        ahead_s=stamp - (before + after) / 2,
        within_s=(after - before) / 2,
    )


def check_homes(homes: HomeFacts | None) -> Iterator[Finding]:
    """Check the folder of homes."""
    if homes is None:
        return
    if homes.error:
        yield failed(
            "homes",
            homes.error,
            "start its file server, or mount it again; users cannot start notebooks until it answers",
        )
    if homes.neighbours and not homes.has_quota:
        neighbours = " and ".join(homes.neighbours)
        yield warning(
            "homes",
            f"{homes.folder} is on one file system with the data of {neighbours}, and has no quotas",
            f"a full home stops {neighbours}: give homes their own file system, or quotas (docs/storage.md)",
        )
    if homes.clock is not None:
        yield _check_clock(homes.clock)


def _check_clock(clock: ServerClock) -> Finding:
    difference = find_skew(clock.ahead_s, clock.within_s)
    value = f"the file server {clock.server}'s is {describe_skew(clock.ahead_s)}"
    if difference >= SKEW_NOTED_S:
        return warning(
            "clock", value, f"{CLOCK_ADVICE}; until then, `make` and other programs take new files for old ones"
        )
    return ok("clock", f"the file server {clock.server}'s is as the head node's" if difference == 0 else value)
