"""Files that [login] names: the client's secret and the authority's certificate, checked before anything starts."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

from gpuhub.errors import SettingsError
from gpuhub.settings import Cluster

_LONGEST_SECRET = 4096


def check_files(cluster: Cluster) -> None:
    """Read what [login] names, and throw it away.

    Raises:
        SettingsError: with one line a mistake.
    """
    login = cluster.login
    mistakes = []
    if login.client_secret_file is not None:
        mistakes += _mistake(read_client_secret, login.client_secret_file)
    if login.ca is not None:
        mistakes += _mistake(check_authority, login.ca)
    if mistakes:
        raise SettingsError("\n".join(mistakes))


def read_client_secret(path: Path) -> str:
    """The secret, without the end of its line.

    Raises:
        SettingsError: the file is missing, empty, no single line, or others than its owner can read it.
    """
    key = f"login.client_secret_file: {str(path)!r}"
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_LONGEST_SECRET + 1)
    except FileNotFoundError:
        raise SettingsError(f"{key}: no such file; put the provider's client secret there, and chmod 600 it") from None
    except OSError as error:
        raise SettingsError(f"{key} cannot be read ({error.strerror}): root can") from error
    if mode & 0o077:
        raise SettingsError(f"{key} can be read by others (mode {mode:04o}): chmod 600 it, and chown it to root")
    try:
        secret = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise SettingsError(f"{key}: is no plain ASCII text, so it is not the provider's client secret") from None
    if not secret:
        raise SettingsError(f"{key} is empty: put the provider's client secret there")
    if len(content) > _LONGEST_SECRET or "\n" in secret:
        raise SettingsError(f"{key}: one line with the provider's client secret is needed, and nothing else")
    return secret


def check_authority(path: Path) -> None:
    """See that TLS can use it.

    Raises:
        SettingsError: it is missing, unreadable, or has no certificate in it.
    """
    key = f"login.ca: {str(path)!r}"
    try:
        ssl.create_default_context(cafile=str(path))
    except FileNotFoundError:
        raise SettingsError(f"{key}: no such file") from None
    except ssl.SSLError:
        raise SettingsError(f"{key}: no certificate in there: a PEM file with the authority's is needed") from None
    except OSError as error:
        raise SettingsError(f"{key} cannot be read ({error.strerror})") from error


def _mistake(check: Callable[[Path], object], path: Path) -> list[str]:
    try:
        check(path)
    except SettingsError as error:
        return [str(error)]
    return []
