"""Makes the folder for a service's data and gives it to the service; runs in a container, without gpuhub.

The arguments are the folder, UID and GID. A folder that has files already is left as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prepare_folder(path: Path, uid: int, gid: int) -> None:
    """Make the folder if it is missing, and give an empty one of root's to the service.

    Raises:
        SystemExit: It cannot be used; the text has the reason.
    """
    try:
        path.mkdir(0o700)
    except FileExistsError:
        found = path.lstat()
        if path.is_symlink() or not path.is_dir():
            raise SystemExit("it is not a folder") from None
        if found.st_uid == uid:
            return
        if found.st_uid != 0 or any(path.iterdir()):
            raise SystemExit(
                f"it belongs to user {found.st_uid}, and the service runs as {uid}: "
                "set `user` to its owner, or give the folder to the service with chown"
            ) from None
    except OSError as error:
        raise SystemExit(f"it cannot be made: {error.strerror}") from None
    os.chown(path, uid, gid)


if __name__ == "__main__":
    prepare_folder(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
