"""`file_mounts` of a task file, and paths of SkyPilot's machines in its commands.

A home here is the same for all runs of a user, so nothing is placed at such a path itself: files lie in the job's own
folder, and the commands name them there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpu_launch.cli.submission.upload import UploadEntry, scan_path
from gpu_launch.cli.taskfile.document import YamlItem
from gpu_launch.errors import UsageError

#: SkyPilot's working directory, below the home.
_WORKDIR = "sky_workdir"
#: The folder for files that a task names below its home, within the job's folder.
_FOLDER = ".file_mounts"
_URL = re.compile(r"[A-Za-z0-9]+://")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_HOME = r"(?<![\w/.~-])(~|\$HOME|\$\{HOME\})/"
_END = r"(?![\w.-])"


@dataclass(frozen=True, kw_only=True)
class FileMount:
    """A file or folder of this machine that the commands expect at another path; both as written."""

    remote: str
    local: str
    line: int

    def build_error(self, text: str) -> UsageError:
        """Return an error about this mount."""
        return UsageError(f"line {self.line}: file_mounts.{self.remote} {text}")


@dataclass(frozen=True, kw_only=True)
class PlacedMount:
    """A mount in the job's folder."""

    source: Path
    #: Path within the job's folder.
    name: PurePosixPath
    #: Path below the home that the commands name; empty for a path relative to the working directory.
    home_path: str = ""


def parse_file_mounts(item: YamlItem) -> tuple[FileMount, ...]:
    """Parse the mounts of a task.

    Raises:
        UsageError: A mount is a bucket, or not a path.
    """
    if item.value is None:
        return ()
    if not isinstance(item.value, dict):
        raise item.build_error("is a mapping of paths, such as `~/data: ./data`.")
    for sub_item in item.items:
        if isinstance(sub_item.value, dict) or (isinstance(sub_item.value, str) and _URL.match(sub_item.value)):
            raise sub_item.build_error(
                "is data in a bucket, which is not mounted here: keep a copy in /datasets (ask your administrator) or "
                "in your home (`gpu-launch cp`), and name that path in the commands."
            )
        if not isinstance(sub_item.value, str) or not sub_item.value:
            raise sub_item.build_error("needs the path of a file or folder on this machine.")
    return tuple(
        FileMount(remote=sub_item.key.partition(".")[2], local=sub_item.value, line=sub_item.line)
        for sub_item in item.items
    )


def place_mount(mount: FileMount, *, environ: Mapping[str, str], here: Path, commands: str) -> PlacedMount:
    """Return where a mount lies in the job's folder.

    Args:
        mount: The mount as written.
        environ: Values for `$NAME` in its paths.
        here: The folder that local paths are relative to.
        commands: `setup` and `run`, which must name a path below the home.

    Raises:
        UsageError: The file does not exist, or the path cannot be had in a job.
    """
    remote = PurePosixPath(_substitute(mount, mount.remote, environ))
    if remote.is_absolute() or ".." in remote.parts:
        raise mount.build_error("is not below your home, where jobs write: use a relative path, or one such as ~/data.")
    is_below_home = remote.parts[:1] == ("~",)
    if is_below_home and remote.parts[1:2] == (_WORKDIR,):
        is_below_home, remote = False, PurePosixPath(*remote.parts[2:])
    if not remote.parts or remote.parts == ("~",):
        raise mount.build_error("is a whole folder of the job: name a path in it, or use `workdir`.")
    source = here / Path(_substitute(mount, mount.local, environ)).expanduser()
    if not is_below_home:
        return PlacedMount(source=_check_exists(mount, source), name=remote)
    home_path = PurePosixPath(*remote.parts[1:]).as_posix()
    if not re.search(f"{_HOME}{re.escape(home_path)}{_END}", commands):
        raise mount.build_error(
            "is named neither in `setup` nor in `run`, and your home is shared by all your jobs: copy the file there "
            f"once with `gpu-launch cp {mount.local} home:{home_path}`, and remove the line."
        )
    name = PurePosixPath(_FOLDER, home_path)
    return PlacedMount(source=_check_exists(mount, source), name=name, home_path=home_path)


def _check_exists(mount: FileMount, source: Path) -> Path:
    if not source.exists():
        raise mount.build_error(f"is to be {source}, which does not exist on this machine.")
    return source


def list_entries(mounts: Sequence[PlacedMount]) -> tuple[UploadEntry, ...]:
    """Return the files of the mounts, as they are sent to the job's folder.

    Raises:
        UsageError: A link leads out of a mounted folder.
    """
    return tuple(entry for mount in mounts for entry in scan_path(mount.source, mount.name.as_posix()).entries)


def replace_paths(commands: str, *, folder: str, mounts: Sequence[PlacedMount]) -> str:
    """Return commands that name SkyPilot's working directory and the mounts where they lie in this job.

    Only `~/…`, `$HOME/…` and `${HOME}/…` are replaced, and the part before the slash stays, so that bash expands it, or
    does not, as in the original.
    """
    places = {_WORKDIR: folder} | {mount.home_path: f"{folder}/{mount.name}" for mount in mounts if mount.home_path}
    longest_first = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
    return re.sub(f"{_HOME}({longest_first}){_END}", lambda match: f"{match[1]}/{places[match[2]]}", commands)


def _substitute(mount: FileMount, path: str, environ: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name == "HOME":
            return "~"
        if name not in environ:
            raise mount.build_error(f"needs a value for ${name}: give it with --env {name}=VALUE.")
        return environ[name]

    return _VARIABLE.sub(value, path)
