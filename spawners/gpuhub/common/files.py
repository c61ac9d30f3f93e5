"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_file(file: Path, content: str | bytes, *, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Replace or create a file in one step: a reader sees the old or the new content, also after a power cut.

    Args:
        file: Its folder exists.
        content: Text is written as UTF-8.
        mode: Its permissions.
        owner: UID and GID; None for those of this process.
    """
    # Backups leave files out whose names end in .new.
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".new", dir=file.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as output:
            output.write(content.encode() if isinstance(content, str) else content)
            output.flush()
            os.fchmod(descriptor, mode)
            if owner is not None:
                os.fchown(descriptor, *owner)
            os.fsync(descriptor)
        temporary.replace(file)
    except BaseException:
        temporary.unlink()
        raise
