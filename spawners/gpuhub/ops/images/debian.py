"""Debian's root file system for gpuhub/base: made once by debootstrap, and kept as a small tar file."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.ops.images.build_plan import ImageSources, parse_packages
from gpuhub.ops.images.progress import ProgressCallback, ProgressStep, read_output, run_with_progress

#: Folders without their content: Docker makes it, it belongs to this machine, or it is documentation.
_EMPTIED = (
    "dev",
    "proc",
    "run",
    "sys",
    "tmp",
    "usr/share/doc-base",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/cache/debconf",
    "var/lib/apt/lists",
    "var/log",
    "var/tmp",
)
_EXCLUDED = {"etc/hostname", "etc/resolv.conf", "etc/machine-id", "var/lib/dbus/machine-id"}
_SETUID_SETGID = 0o6000
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_DEADLINE_S = 1800.0
_LABEL = "Debian packages"
#: Lists apt's package lists, also if they were never downloaded.
_APT_TARGETS = (
    "apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages",
)  # fmt: skip


def ensure_root_tar(
    folder: Path, *, tag: str, suite: str, sources: ImageSources, pynvml: bytes, report: ProgressCallback
) -> Path:
    """Return the tar file of the base image's file system for a tag, and remove the files of other tags.

    Raises:
        SetupError: debootstrap or Debian's keys are not installed, or a download failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / f"{tag}.tar"
    if not finished.exists():
        partial = folder / f"{tag}.partial"
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            root = Path(scratch) / "root"
            _debootstrap(root, suite, parse_packages(sources.base["packages"].decode()), report)
            write_root_tar(root, build_extra_files(sources, pynvml), partial)
        partial.rename(finished)
        report(ProgressStep(label=_LABEL, done=finished.stat().st_size, is_finished=True))
    for other in folder.iterdir():
        if other != finished:
            other.unlink()
    return finished


def build_extra_files(sources: ImageSources, pynvml: bytes) -> dict[str, bytes]:
    """Return the additional files: those of images/base/files, and NVIDIA's NVML module for the system's Python."""
    prefix = "files/"
    files = {name.removeprefix(prefix): data for name, data in sources.base.items() if name.startswith(prefix)}
    return {**files, "usr/lib/python3/dist-packages/pynvml.py": pynvml}


def _debootstrap(root: Path, suite: str, packages: Sequence[str], report: ProgressCallback) -> None:
    missing = "debootstrap" if shutil.which("debootstrap") is None else ""
    if not _KEYRING.exists():
        missing += " debian-archive-keyring"
    if missing:
        raise SetupError(f"the base image needs Debian packages that this machine lacks: apt-get install {missing}")
    mirror = find_mirror(read_output(_APT_TARGETS), suite)
    command = build_debootstrap_command(root, suite, packages, mirror)
    run_with_progress(command, label=_LABEL, report=report, deadline_s=_DEADLINE_S, env={"LC_ALL": "C.UTF-8"})


def build_debootstrap_command(root: Path, suite: str, packages: Sequence[str], mirror: str | None) -> list[str]:
    """Return the command; without a mirror debootstrap uses its default. Signatures are always checked."""
    options = ["--variant=minbase", "--force-check-gpg", f"--keyring={_KEYRING}", f"--include={','.join(packages)}"]
    return ["debootstrap", *options, suite, str(root), *([mirror] if mirror else [])]


def find_mirror(apt_targets: str, suite: str) -> str | None:
    """Return apt's address of this suite, if this machine is a Debian of that suite.

    Each line of `apt_targets` is an address and a suite, such as `http://mirror.example/debian/ bookworm`.
    """
    for line in apt_targets.splitlines():
        address, _, release = line.strip().rpartition(" ")
        if release == suite and address.startswith(("http://", "https://")):
            return address
    return None


def filter_entry(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return the entry for the image, or None to leave it out; nothing is setuid, and licences stay."""
    name = entry.name.removeprefix("./")
    if name in _EXCLUDED or _is_manual(name):
        return None
    if any(name.startswith(f"{folder}/") for folder in _EMPTIED):
        return None
    entry.mode &= ~_SETUID_SETGID
    return entry


def _is_manual(name: str) -> bool:
    parts = name.split("/")
    return parts[:3] == ["usr", "share", "doc"] and len(parts) > 4 and parts[-1] != "copyright"


def write_root_tar(root: Path, extra: Mapping[str, bytes], target: Path) -> None:
    """Write the root file system below `root` as a tar file; `extra` files are added or replace others."""
    with tarfile.open(target, "w") as tar:
        tar.add(root, arcname=".", filter=lambda entry: _unless(entry, extra))
        for name, content in sorted(extra.items()):
            _add_file(tar, f"./{name}", content)


def _unless(entry: tarfile.TarInfo, extra: Mapping[str, bytes]) -> tarfile.TarInfo | None:
    return None if entry.name.removeprefix("./") in extra else filter_entry(entry)


def _add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))
