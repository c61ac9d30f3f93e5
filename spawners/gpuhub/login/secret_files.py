"""Checks of the files that [login] names: the client's secret and the authority's certificate."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

from gpuhub.common.errors import SettingsError
from gpuhub.config.settings import ClusterSettings

_MAX_SECRET_BYTES = 4096


def check_files(cluster: ClusterSettings) -> None:
    """Check that the files that [login] names can be used.

    Raises:
        SettingsError: A line for each problem.
    """
    login = cluster.login
    problems = []
    if login.client_secret_file is not None:
        problems += _find_problem(read_client_secret, login.client_secret_file)
    if login.ca is not None:
        problems += _find_problem(check_authority, login.ca)
    if problems:
        raise SettingsError("\n".join(problems))


def read_client_secret(path: Path) -> str:
    """Return the secret without its line end.

    Raises:
        SettingsError: The file is missing, empty, has several lines, or other users than its owner can read it.
    """
    key = f"login.client_secret_file: {str(path)!r}"
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_SECRET_BYTES + 1)
    except FileNotFoundError:
        raise SettingsError(f"{key}: no such file; put the provider's client secret there, and chmod 600 it") from None
    except OSError as error:
        raise SettingsError(f"{key} cannot be read ({error.strerror}): run the command as root") from error
    if mode & 0o077:
        raise SettingsError(f"{key} can be read by other users (mode {mode:04o}): chmod 600 it, and chown it to root")
    try:
        secret = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise SettingsError(f"{key}: is not ASCII text, so it is not the provider's client secret") from None
    if not secret:
        raise SettingsError(f"{key} is empty: put the provider's client secret there")
    if len(content) > _MAX_SECRET_BYTES or "\n" in secret:
        raise SettingsError(f"{key}: the file must have one line with the provider's client secret, and nothing else")
    return secret


def check_authority(path: Path) -> None:
    """Check that TLS can use the file.

    Raises:
        SettingsError: It is missing, unreadable, or has no certificate.
    """
    key = f"login.ca: {str(path)!r}"
    try:
        ssl.create_default_context(cafile=str(path))
    except FileNotFoundError:
        raise SettingsError(f"{key}: no such file") from None
    except ssl.SSLError:
        raise SettingsError(f"{key}: the file has no certificate: a PEM file with the authority's is needed") from None
    except OSError as error:
        raise SettingsError(f"{key} cannot be read ({error.strerror})") from error


def _find_problem(check: Callable[[Path], object], path: Path) -> list[str]:
    try:
        check(path)
    except SettingsError as error:
        return [str(error)]
    return []
