"""From a command line to what is sent and asked for: everything that can be refused before anything is. Pure."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from gpu_launch import order
from gpu_launch.cli.sending import Load
from gpu_launch.demand import Demand
from gpu_launch.errors import UsageError
from gpu_launch.options import Options

#: Where the working directories of jobs are, below the home.
FOLDER = "gpu-launch"
_MOST_NAME = 80


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A job, ready to be asked for."""

    order: order.Order
    nnodes: int
    least_nnodes: int | None
    nproc_per_node: int
    demand: Demand
    profile: str | None = None
    #: None for a job whose folder holds nothing of this machine.
    load: Load | None = None


def build_name(name: str, *, script: str) -> str:
    """The job's name for people: as given, else the script's. Raises UsageError for one that is no line of text."""
    found = name or PurePosixPath(script.replace("\\", "/")).name
    if not found.strip() or not found.isprintable() or len(found) > _MOST_NAME:
        raise UsageError(f"--name: a name of 1 to {_MOST_NAME} printable characters is needed.")
    return found


def build_folder(name: str) -> str:
    """A new folder's path below the home: `gpu-launch/train-3f2a91`."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower().removesuffix(".py")).strip("-")[:40].rstrip("-")
    return f"{FOLDER}/{plain or 'job'}-{secrets.token_hex(3)}"


def build_words(flags: tuple[str, ...], options: Options, script: str) -> tuple[str, ...]:
    """`%gpu_launch`'s words for the driver: the flags as given, the shape as chosen."""
    shape = f"{options.least_nnodes}:{options.nnodes}" if options.least_nnodes is not None else str(options.nnodes)
    return (f"--nnodes={shape}", f"--nproc-per-node={options.nproc_per_node}", *flags, "--", script, *options.arguments)


def place_script(script: str, *, load: Load, here: Path) -> str:
    """The script's path within what is sent. Raises UsageError where it is not among it."""
    given = Path(script).expanduser()
    for path in (here / given, load.root / given):
        # Not resolved: a link within the folder is sent as a link.
        if path.is_file():
            parent = path.parent.resolve()
            if not parent.is_relative_to(load.root):
                raise UsageError(
                    f"{script} lies outside of {load.root}, which is what is sent: run it from its own folder, or name "
                    "a folder that holds it with --workdir."
                )
            name = (parent.relative_to(load.root) / path.name).as_posix()
            if not load.holds(name):
                raise UsageError(f"{script} is left out by an ignore file, so that it would not be there.")
            return name
    if (here / given).is_dir():
        raise UsageError(f"{script} is a folder; name the script in it.")
    raise UsageError(f"There is no script {script} in {here if here == load.root else f'{here} or {load.root}'}.")


def with_shape(options: Options, nodes: int, each: int) -> Options:
    """The same on so many nodes."""
    return replace(options, nnodes=nodes, least_nnodes=None, nproc_per_node=each)
