"""The view of a saved notebook: what an owner shares, rendered as one page of HTML without a kernel.

The content is not trusted: the hub shows the page in a sandbox, with a content security policy under which it can
neither run scripts nor load files.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from gpu_launch.courier import notebook_page
from gpu_launch.courier.protocol import CourierError

#: Largest notebook that is rendered, bytes: plots in its outputs count.
MAX_BYTES = 32 * 1024 * 1024
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def open_notebook(home: Path, path: str) -> Iterator[BinaryIO]:
    """Open a notebook of the home.

    No symbolic link is followed: in a folder that several users write, another one could lay it to any file of the
    owner after the notebook was shared.

    Raises:
        CourierError: There is no such notebook below the home, or it is too large.
    """
    parts = PurePosixPath(path).parts
    if not parts or PurePosixPath(path).is_absolute() or ".." in parts or "\0" in path:
        raise CourierError("invalid", f"{path}: this is not below the home")
    if not path.endswith(".ipynb"):
        raise CourierError("invalid", f"{path} is no notebook: its name must end with .ipynb")
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        number = os.open(parts[-1], _FILE, dir_fd=folder)
    except FileNotFoundError:
        raise CourierError("not-found", f"there is no {path!r} in the home") from None
    except OSError as error:
        raise CourierError(
            "invalid", f"{path} cannot be opened without following a symbolic link: {error.strerror}"
        ) from None
    finally:
        os.close(folder)
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode):
        os.close(number)
        raise CourierError("invalid", f"{path} is no regular file")
    with os.fdopen(number, "rb") as file:
        if found.st_size > MAX_BYTES:
            raise CourierError(
                "too-large",
                f"{path} has {found.st_size / 2**20:.0f} MiB, and the most that is shown is {MAX_BYTES >> 20} MiB: "
                "clear outputs that are large",
            )
        yield file


def describe(file: BinaryIO) -> dict[str, int]:
    """Return when a notebook was saved, in milliseconds since the epoch, and its size in bytes."""
    found = os.fstat(file.fileno())
    return {"saved_ms": found.st_mtime_ns // 1_000_000, "bytes": found.st_size}


def render(file: BinaryIO, path: str) -> bytes:
    """Render a notebook as one HTML page that needs no other file.

    Raises:
        CourierError: It is no notebook, or takes too much time or memory.
    """
    # A process of its own has limits of its own.
    done = subprocess.run(
        [sys.executable, "-m", notebook_page.__name__, PurePosixPath(path).stem, str(os.getpid())],
        stdin=file,
        capture_output=True,
        check=False,
    )
    if done.returncode == notebook_page.REFUSED:
        raise CourierError("invalid", f"{path} {done.stderr.decode(errors='replace').strip()}")
    if done.returncode:
        raise CourierError("too-large", f"{path} takes too much time or memory to be shown: clear large outputs")
    return done.stdout
