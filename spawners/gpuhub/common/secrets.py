"""The head node's secrets: files of mode 0600 in a 0700 folder, created once and never logged."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths

PROXY_TOKEN = "proxy-token"  # noqa: S105 - names of files, not secrets
BROKER_TOKEN = "broker-token"  # noqa: S105
SPAWNER_TOKEN = "spawner-token"  # noqa: S105
METRICS_TOKEN = "metrics-token"  # noqa: S105
USER_PASSWORD = "user-password"  # noqa: S105
ADMIN_PASSWORD = "admin-password"  # noqa: S105
COOKIE_SECRET = "cookie-secret"  # noqa: S105
DESTINATION_KEY = "destination-key"
JOB_KEY = "job-key"

_TOKENS = (PROXY_TOKEN, BROKER_TOKEN, SPAWNER_TOKEN, METRICS_TOKEN, COOKIE_SECRET, DESTINATION_KEY, JOB_KEY)
#: Characters that are easy to distinguish, without 0, o, 1, l and i.
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"


def ensure_secrets(paths: Paths) -> None:
    """Create every secret that does not exist."""
    paths.secrets.mkdir(parents=True, exist_ok=True)
    paths.secrets.chmod(0o700)
    for name in _TOKENS:
        _ensure(paths.secrets / name, secrets.token_hex(32))
    _ensure(paths.secrets / USER_PASSWORD, _readable(3))
    # JupyterHub requires 32 characters for the password of administrators.
    _ensure(paths.secrets / ADMIN_PASSWORD, _readable(8))


def read_secret(paths: Paths, name: str) -> str:
    """Return the text of a secret.

    Raises:
        SetupError: it does not exist, cannot be read, or is empty.
    """
    path = paths.secrets / name
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise SetupError(f"{path} is missing: `gpuhub up` creates it") from None
    except OSError as error:
        raise SetupError(f"{path} cannot be read ({error.strerror}): only root can read it") from error
    if not text:
        raise SetupError(f"{path} is empty: remove it, and `gpuhub up` creates it again")
    return text


def read_private_file(path: Path, key: str, *, content: str, limit: int) -> bytes:
    """Return at most `limit` + 1 bytes of a file that an administrator made.

    Args:
        path: The file.
        key: The key of cluster.toml that names it.
        content: What belongs into it, for the error.
        limit: Most bytes that it should have.

    Raises:
        SettingsError: It is missing, or other users than its owner can read it.
    """
    where = f"{key}: {str(path)!r}"
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            found = file.read(limit + 1)
    except FileNotFoundError:
        raise SettingsError(f"{where}: no such file; put {content} there, and chmod 600 it") from None
    except OSError as error:
        raise SettingsError(f"{where} cannot be read ({error.strerror}): run the command as root") from error
    if mode & 0o077:
        raise SettingsError(f"{where} can be read by other users (mode {mode:04o}): chmod 600 it, and chown it to root")
    return found


def _ensure(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def _readable(groups: int) -> str:
    return "-".join("".join(secrets.choice(_ALPHABET) for _ in range(4)) for _ in range(groups))
