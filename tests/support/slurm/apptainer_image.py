"""A small image file for Apptainer with the notebook's program, made of this machine's own Python and shell tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.support.product import ROOT
from tests.support.slurm.hub import build_environment

#: Of the user's programs in the image; `df` and the others are for tests.
_TOOLS = ("bash", "sh", "cat", "df", "env", "id", "ls", "sleep")
_PACKAGES = "/datasets/lib/python3.{minor}/site-packages"
#: Where the environment is in the image, as in gpuhub's own.
_PREFIX = "/opt/gpuhub"
_DEFINITION = """\
Bootstrap: localimage
From: {root}

%environment
    export PATH={prefix}/bin:$PATH
"""
#: Debian package of each program.
_PROGRAMS = {"squashfuse": "squashfuse", "mksquashfs": "squashfs-tools"}


def build_sif(folder: Path) -> Path:
    """Build an image file with an environment as docs/slurm.md describes it; torch comes from the datasets folder.

    Raises:
        RuntimeError: A program is missing; the text says how to install it.
    """
    require_apptainer()
    root, image = folder / "root", folder / "notebook.sif"
    program = build_environment(folder, "ipykernel", "ipyparallel", str(ROOT / "extensions"))
    python = Path("/usr/bin/python3").resolve()
    stdlib = Path(f"/usr/lib/{python.name}")
    shutil.copytree(stdlib, root / stdlib.relative_to("/"), symlinks=True, ignore=_ignore)
    tools = [python, *(Path("/usr/bin") / tool for tool in _TOOLS)]
    torch = next((ROOT / ".venv/lib").glob("python3.*/site-packages/torch/lib"))
    extensions = [
        *(stdlib / "lib-dynload").glob("*.so"),
        *(program.parent.parent / "lib").rglob("*.so"),
        *torch.glob("libtorch*.so"),
    ]
    for file in {*tools, *_find_libraries([*tools, *extensions])}:
        _copy(file, root)
    for link in ("bin", "lib", "lib64"):
        if not (root / link).exists():
            (root / link).symlink_to(f"usr/{link}")
    (root / "usr/bin/python3").symlink_to(python.name)
    for name in ("dev", "etc", "home", "proc", "root", "sys", "tmp", "usr/lib64", "var/tmp", "opt"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/nonexistent:/bin/false\n")
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    _move_environment(program, root)
    definition = folder / "definition"
    definition.write_text(_DEFINITION.format(root=root, prefix=_PREFIX))
    fast = "-comp gzip -Xcompression-level 1"
    built = subprocess.run(
        ["apptainer", "--quiet", "build", "--mksquashfs-args", fast, str(image), str(definition)],
        check=False, capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    if built.returncode:
        raise RuntimeError(f"apptainer build failed:\n{built.stdout}{built.stderr}")
    shutil.rmtree(root)
    return image


def require_apptainer() -> None:
    """Check that users of this machine can run Apptainer.

    Raises:
        RuntimeError: A program is missing; the text says how to install it.
    """
    missing = [package for program, package in _PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        raise RuntimeError(f"Apptainer lacks: apt-get install {' '.join(missing)}")
    if shutil.which("apptainer") is None:
        raise RuntimeError("Apptainer is missing: `make setup-dev` installs it")
    fuse = Path("/dev/fuse")
    if not fuse.exists() or fuse.stat().st_mode & 0o666 != 0o666:
        raise RuntimeError(
            "users cannot open /dev/fuse: load the kernel module fuse, and chmod 666 /dev/fuse as udev does"
        )


def _ignore(_folder: str, names: list[str]) -> set[str]:
    return {"test", "idlelib", "ensurepip", "lib2to3"}.intersection(names)


def _find_libraries(files: Iterable[Path]) -> set[Path]:
    """Return the loader and the system's shared libraries that the files need."""
    listed = subprocess.run(["ldd", *map(str, files)], check=False, capture_output=True, text=True).stdout
    paths = re.findall(r"(?:=> |^\s)(/lib\S*|/usr/lib\S*) \(", listed, re.MULTILINE)
    return {Path(path) for path in paths}


def _copy(file: Path, root: Path) -> None:
    """Copy a file below /usr, where Debian's /bin and /lib lead, under the name by which it was found."""
    target = root / "usr" / re.sub(r"^(usr/)?", "", str(file).lstrip("/"), count=1)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(file, target)


def _move_environment(program: Path, root: Path) -> None:
    """Move the environment to its place in the image, and make torch and other large packages those of the datasets."""
    built = program.parent.parent
    packages = next((built / "lib").glob("python3.*")) / "site-packages"
    minor = packages.parent.name.removeprefix("python3.")
    (packages / "ours.pth").write_text(f"{_PACKAGES.format(minor=minor)}\n")
    for script in (built / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and script.read_bytes()[:2] == b"#!":
            script.write_text(script.read_text().replace(str(built), _PREFIX))
    shutil.move(built, root / _PREFIX.lstrip("/"))
    shutil.copytree(ROOT / "extensions" / "gpu_launch" / "image_config", root / "etc" / "ipython")
