"""Files of a job on a guest, a machine whose administrator is not trusted: what goes there, and where what it wrote
comes back.

The guest gets the job's folder and its run folder. From the run folder come back its output, its status and its logs.
What the job wrote in its folder comes back to `~/guest-results/RUN`, and never to the folder itself: programs of the
closet could otherwise import a file that a guest has put there. The next start of the job, again on a guest, gets these
files on top of the folder.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from gpu_launch.common import job_manifest, run_folder, untar
from gpu_launch.common.job_manifest import JobManifest
from gpu_launch.courier.files import explain_tar_errors, replace_hard_link, resolve_path, resolve_run_folder
from gpu_launch.courier.protocol import CourierError, IncomingData
from gpu_launch.errors import UsageError

#: Folder in the home for what jobs on guests wrote, with a folder for each run.
RESULTS = "guest-results"
#: Files of a run folder that the job needs, and those that may come back.
_SENT = ("job.json", "run.json", "exchange", "output.log", "state.json")
_RETURNED = frozenset({"output.log", "state.json", "logs"})
#: Maximum number of members of a returned archive; a guest could otherwise fill the file server with empty files.
MAX_MEMBERS = 100_000
_BLOCK = 256 * 1024


def read_manifest(home: Path, run: str) -> JobManifest:
    """Return the manifest of a run.

    Raises:
        CourierError: There is none, or the job cannot run on a guest.
    """
    folder = resolve_run_folder(home, run)
    try:
        manifest = job_manifest.parse_manifest((folder / run_folder.MANIFEST).read_text(encoding="utf-8"))
        settings = json.loads((folder / run_folder.SETTINGS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, UsageError):
        raise CourierError("not-found", f"{run} has no files for a job in ~/.gpu_launch/jobs") from None
    if not manifest.folder or PurePosixPath(manifest.folder).is_absolute():
        raise CourierError(
            "invalid",
            "a job on a guest sends its folder there, and this one's is the whole home or outside of it: start it "
            "from a folder below the home that has only what the job needs",
        )
    if isinstance(settings, dict) and settings.get("python"):
        raise CourierError(
            "invalid",
            f"guests have no {settings['python']}: only the image's own Python; start the job from a notebook or "
            "laptop without that environment, or install packages in the job",
        )
    resolve_path(home, manifest.folder)
    return manifest


def pack_job(home: Path, run: str, limit: int, sink: BinaryIO) -> dict[str, int]:
    """Write a tar of what the job needs, with names below the home.

    Raises:
        CourierError: It is larger than `limit` bytes.
    """
    manifest = read_manifest(home, run)
    folder, jobs = home / manifest.folder, f".gpu_launch/jobs/{run}"
    sent: dict[str, Path] = {}
    for name in _SENT:
        sent.update(_list_members(resolve_run_folder(home, run) / name, f"{jobs}/{name}"))
    sent.update(_list_members(folder, manifest.folder))
    sent.update(_list_members(home / RESULTS / run, manifest.folder))
    sent.pop(manifest.folder, None)  # with its parents
    size = sum(path.lstat().st_size for path in sent.values() if path.is_file() and not path.is_symlink())
    if size > limit:
        raise CourierError(
            "too-large", f"~/{manifest.folder} has more than the {limit} bytes that a job on a guest may send"
        )
    count = 0
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_BLOCK) as tar:
        for name in _list_parents((jobs, manifest.folder)):
            _add_folder(tar, name, home.stat())
        for name, path in sent.items():
            member = tar.gettarinfo(path, name)
            if member is None:
                continue
            replace_hard_link(member, path)
            if not (member.isreg() or member.isdir() or member.issym()):
                continue
            # Without names of this machine's users.
            member.uname = member.gname = ""
            count += 1
            if member.isreg():
                with path.open("rb") as file:
                    tar.addfile(member, file)
            else:
                tar.addfile(member)
    return {"files": count, "bytes": size}


def _list_members(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield a file or folder and all below it, by their names in the tar."""
    if not os.path.lexists(root):
        return
    yield name, root
    if root.is_dir() and not root.is_symlink():
        for folder, folders, files in os.walk(root):
            below = Path(folder).relative_to(root)
            for child in (*folders, *files):
                yield str(PurePosixPath(name, *below.parts, child)), Path(folder, child)


def _list_parents(names: tuple[str, ...]) -> list[str]:
    parents = {str(parent) for name in names for parent in (PurePosixPath(name), *PurePosixPath(name).parents)} - {"."}
    return sorted(parents, key=len)


def _add_folder(tar: tarfile.TarFile, name: str, like: os.stat_result) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, 0o700
    member.uid, member.gid = like.st_uid, like.st_gid
    tar.addfile(member)


def put_results(home: Path, run: str, part: str, limit: int, incoming: IncomingData) -> dict[str, int]:
    """Unpack the tar of a container's folder, whose members begin with the folder's own name.

    Args:
        part: `run` for the run folder, of which only output, status and logs are taken; `folder` for the job's folder,
            of which only what differs from the home's is taken.

    Raises:
        CourierError: The tar is broken, too large, or has members that lead out of the folder.
    """
    folder = home / read_manifest(home, run).folder
    target = resolve_run_folder(home, run) if part == "run" else resolve_path(home, f"{RESULTS}/{run}")
    data = io.BufferedReader(incoming, _BLOCK)
    files = size = members = 0
    with explain_tar_errors("what came back"):
        if not data.peek(1):
            return {"files": 0, "bytes": 0}
        with tarfile.open(fileobj=data, mode="r|") as tar:
            for member in tar:
                members += 1
                size += member.size if member.isreg() else 0
                if size > limit or members > MAX_MEMBERS:
                    raise CourierError(
                        "too-large", f"the job wrote more than the {limit} bytes or {MAX_MEMBERS} files that may return"
                    )
                if _take_member(tar, member, part, folder, target):
                    files += 1
    while data.read(_BLOCK):
        pass  # the padding after the tar's end
    if part == "run":
        _remove_secrets(target)
    return {"files": files, "bytes": size}


def _remove_secrets(folder: Path) -> None:
    """Remove the values of secrets from the manifest of a job that has ended for good."""
    try:
        status = job_manifest.parse_status((folder / "state.json").read_text(encoding="utf-8"))
        manifest = job_manifest.parse_manifest((folder / run_folder.MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, UsageError):
        return
    if status.state in job_manifest.FINAL_STATES and manifest.secret_names:
        text = job_manifest.dump_json(job_manifest.remove_secrets(manifest))
        run_folder.write_private(folder / run_folder.MANIFEST, text.encode())


def _take_member(tar: tarfile.TarFile, member: tarfile.TarInfo, part: str, folder: Path, target: Path) -> bool:
    """Unpack a member that should come back; return whether it was."""
    # Only files: a link could lead elsewhere after a later change, and empty folders hold nothing.
    if not member.isreg():
        return False
    try:
        below = untar.parse_name(member.name)[1:]
        if not below or (part == "run" and below[0] not in _RETURNED) or _is_same(member, folder.joinpath(*below)):
            return False
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Through no link at all: the user, or an earlier run, may have made some.
        path = target.joinpath(*below)
        _check_path(target, path)
        untar.unpack_member(tar, member, target.resolve(), target.resolve().joinpath(*below), is_home=True)
    except untar.UnsafeMember as error:
        raise CourierError("invalid", str(error)) from None
    # Nothing that a guest has written is started by its name alone.
    path.chmod(0o600)
    return True


def _check_path(root: Path, path: Path) -> None:
    for above in path.parents:
        if above == root:
            return
        if above.is_symlink():
            raise untar.UnsafeMember(f"{above} is a symbolic link, and a guest's files would be written through it")


def _is_same(member: tarfile.TarInfo, own: Path) -> bool:
    """Return whether the home has the file as it was sent: nothing wrote to it."""
    try:
        status = own.lstat()
    except OSError:
        return False
    return status.st_size == member.size and int(status.st_mtime) == int(member.mtime)
