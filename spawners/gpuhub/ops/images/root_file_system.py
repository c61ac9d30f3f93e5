"""The root file system of the base image: Debian's packages with all updates, made by mmdebstrap and kept as a tar."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
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
#: 120 MB that nothing uses: of the compiler, link-time optimisation and sanitizers; Python as a static library.
_LEFT_OUT = (
    "usr/bin/*-lto-dump-*",
    "usr/lib/gcc/*/lto1",
    "usr/lib/gcc/*/lib*san*.a",
    "usr/lib/*/lib*san.so.*",
    "usr/lib/python3*/config-*/*.a",
)
#: Keys that openssh-server makes when it is installed: they would be the same in all containers.
_HOST_KEYS = "etc/ssh/ssh_host_"
_SETUID_SETGID = 0o6000
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_DEBIAN_DEADLINE_S = 1800.0
_DEBIAN_LABEL = "Debian packages"
#: Lists apt's package lists, also if they were never downloaded.
_APT_TARGETS = (
    "apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages",
)  # fmt: skip


def ensure_root_tar(
    folder: Path,
    *,
    tag: str,
    suite: str,
    sources: ImageSources,
    read_pynvml: Callable[[], bytes],
    report: ProgressCallback,
) -> Path:
    """Return the tar file of the base image's file system for a tag, and remove the files of other tags.

    Args:
        read_pynvml: Returns NVIDIA's NVML module; called when Debian's packages are there.

    Raises:
        SetupError: mmdebstrap or Debian's keys are not installed, or a download failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / f"{tag}.tar"
    if not finished.exists():
        partial = folder / f"{tag}.partial"
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            root = Path(scratch) / "root"
            _install_debian(root, suite, parse_packages(sources.base["packages"].decode()), report)
            write_root_tar(root, build_extra_files(sources, read_pynvml()), partial)
        partial.rename(finished)
        report(ProgressStep(label=_DEBIAN_LABEL, done=finished.stat().st_size, is_finished=True))
    for other in folder.iterdir():
        if other != finished:
            _remove_leftover(other)
    return finished


def _remove_leftover(path: Path) -> None:
    """Remove an old tar, or what a build that was killed has left.

    Raises:
        SetupError: The killed build's mounts are still there.
    """
    if not path.is_dir():
        path.unlink()
        return
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    if left := [mount for mount in mounts if Path(mount).is_relative_to(path)]:
        raise SetupError(f"a build of images that was killed left mounts: umount {' '.join(reversed(left))}")
    shutil.rmtree(path)


def build_extra_files(sources: ImageSources, pynvml: bytes) -> dict[str, bytes]:
    """Return the additional files: those of images/base/files, and NVIDIA's NVML module for the system's Python."""
    prefix = "files/"
    files = {name.removeprefix(prefix): data for name, data in sources.base.items() if name.startswith(prefix)}
    return {**files, "usr/lib/python3/dist-packages/pynvml.py": pynvml}


def _install_debian(root: Path, suite: str, packages: Sequence[str], report: ProgressCallback) -> None:
    missing = "" if shutil.which("mmdebstrap") else "mmdebstrap"
    if not _KEYRING.exists():
        missing += " debian-archive-keyring"
    if missing:
        raise SetupError(f"the base image needs Debian packages that this machine lacks: apt-get install {missing}")
    command = build_mmdebstrap_command(root, suite, packages, read_output(_APT_TARGETS))
    run_with_progress(
        command, label=_DEBIAN_LABEL, report=report, deadline_s=_DEBIAN_DEADLINE_S, env={"LC_ALL": "C.UTF-8"}
    )


def build_mmdebstrap_command(root: Path, suite: str, packages: Sequence[str], apt_targets: str) -> list[str]:
    """Return the command that installs a suite with its updates and its security updates.

    Every source is checked with Debian's keys, whatever keys and sources the head node's apt has.
    """
    mirrors = {release: find_mirror(apt_targets, release) for release in _list_releases(suite)}
    sources = [f"deb [signed-by={_KEYRING}] {mirror} {release} main" for release, mirror in mirrors.items() if mirror]
    if len(sources) < len(mirrors):
        # The head node's apt does not use this suite: mmdebstrap takes Debian's own servers for all three.
        sources = []
    options = ["--mode=root", "--variant=minbase", "--format=directory", f"--include={','.join(packages)}"]
    return ["mmdebstrap", *options, suite, str(root), *sources]


def _list_releases(suite: str) -> tuple[str, ...]:
    return suite, f"{suite}-updates", f"{suite}-security"


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
    is_left_out = any(fnmatchcase(name, pattern) for pattern in _LEFT_OUT)
    if name in _EXCLUDED or name.startswith(_HOST_KEYS) or _is_manual(name) or is_left_out:
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
