"""Debian's root file system for gpuhub/base: made once by debootstrap, kept as a tar file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpuhub.errors import SetupError
from gpuhub.images.commands import read_output, run_shown
from gpuhub.images.plan import Sources, packages_of
from gpuhub.images.progress import Report, Step
from gpuhub.images.tar import write_root

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_DEADLINE_S = 1800.0
_LABEL = "Debian packages"
#: Asks apt for the package lists it knows, without needing to have fetched them.
_APT_TARGETS = (
    "apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages",
)  # fmt: skip


def ensure_root_tar(folder: Path, *, tag: str, suite: str, sources: Sources, pynvml: bytes, report: Report) -> Path:
    """The tar file of the base image's file system for a tag; other tags' files are removed.

    Raises:
        SetupError: debootstrap or Debian's keys are not installed, or a download failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / f"{tag}.tar"
    if not finished.exists():
        partial = folder / f"{tag}.partial"
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            root = Path(scratch) / "root"
            _debootstrap(root, suite, packages_of(sources.base["packages"].decode()), report)
            write_root(root, build_extra(sources, pynvml), partial)
        partial.rename(finished)
        report(Step(label=_LABEL, done=finished.stat().st_size, is_finished=True))
    for other in folder.iterdir():
        if other != finished:
            other.unlink()
    return finished


def build_extra(sources: Sources, pynvml: bytes) -> dict[str, bytes]:
    """Files on top of Debian's: those of images/base/files, and NVIDIA's NVML module for the system's Python."""
    prefix = "files/"
    files = {name.removeprefix(prefix): data for name, data in sources.base.items() if name.startswith(prefix)}
    return {**files, "usr/lib/python3/dist-packages/pynvml.py": pynvml}


def _debootstrap(root: Path, suite: str, packages: Sequence[str], report: Report) -> None:
    missing = "debootstrap" if shutil.which("debootstrap") is None else ""
    if not _KEYRING.exists():
        missing += " debian-archive-keyring"
    if missing:
        raise SetupError(f"the base image needs Debian packages that this machine lacks: apt-get install {missing}")
    mirror = find_mirror(read_output(_APT_TARGETS), suite)
    command = build_debootstrap(root, suite, packages, mirror)
    run_shown(command, label=_LABEL, report=report, deadline_s=_DEADLINE_S, env={"LC_ALL": "C.UTF-8"})


def build_debootstrap(root: Path, suite: str, packages: Sequence[str], mirror: str | None) -> list[str]:
    """The command; without a mirror debootstrap uses its own default. Signatures are always checked."""
    options = ["--variant=minbase", "--force-check-gpg", f"--keyring={_KEYRING}", f"--include={','.join(packages)}"]
    return ["debootstrap", *options, suite, str(root), *([mirror] if mirror else [])]


def find_mirror(apt_targets: str, suite: str) -> str | None:
    """The address from which apt takes this suite, if this machine is a Debian of that suite.

    Each line is an address and a suite, such as `http://mirror.example/debian/ bookworm`.
    """
    for line in apt_targets.splitlines():
        address, _, release = line.strip().rpartition(" ")
        if release == suite and address.startswith(("http://", "https://")):
            return address
    return None
