"""Checks of the login before anything starts, and its description for `gpuhub up`."""

from __future__ import annotations

from pathlib import Path

from gpuhub.common import secrets
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.login import oidc_discovery, secret_files
from gpuhub.login.authenticator_config import MIN_PASSWORD_LENGTH, build_callback_url, find_provider_cache


def check_login(cluster: ClusterSettings, paths: Paths) -> list[str]:
    """Check that users can log in, and return notes on temporary problems.

    Raises:
        SettingsError: A file that [login] names cannot be used.
        SetupError: The provider does not answer, and no answer of an earlier start is stored.
    """
    secret_files.check_files(cluster)
    if cluster.users.login != "oidc" or cluster.login.issuer is None:
        return []
    _, trouble = oidc_discovery.find_endpoints(cluster.login.issuer, cluster.login.ca, find_provider_cache(paths))
    if trouble is None:
        return []
    return [f"Users cannot log in until the provider answers: {trouble}. Its earlier answer is used until then"]


def build_fingerprint(cluster: ClusterSettings) -> str:
    """Return a text that changes with the files that [login] names."""
    files = (cluster.login.client_secret_file, cluster.login.ca)
    return "\n".join(_stamp(file) for file in files if file is not None)


def _stamp(file: Path) -> str:
    status = file.stat()
    return f"{file} {status.st_ino} {status.st_mtime_ns}"


def describe_login(cluster: ClusterSettings, paths: Paths, hub_url: str) -> list[str]:
    """Return lines with a title and a text about the login, for the administrator who started the hub."""
    users = cluster.users
    allowed = [*users.allowed, *_members(users.allowed_groups)] or ["only the administrators"]
    lines = [f"Who can log in: {', '.join(allowed)}"]
    if users.admins or users.admin_groups:
        lines.append(f"Administrators: {', '.join([*users.admins, *_members(users.admin_groups)])}")
    match users.login:
        case "password":
            lines.append(f"Password:       {secrets.read_secret(paths, secrets.USER_PASSWORD)}")
            if users.admins:
                lines.append(f"Administrators': in {paths.secrets / secrets.ADMIN_PASSWORD}")
        case "first-use":
            lines.append(
                f"Password:       each user chooses one at the first login, {MIN_PASSWORD_LENGTH} characters or more"
            )
        case "pam":
            lines.append("Password:       that of the user's account on this machine")
        case "ldap":
            lines.append(f"Password:       that of the user's account at {cluster.login.server}")
        case _:
            lines.append(
                f"Log in at:      {cluster.login.issuer or users.login}, where this address must be registered:"
            )
            lines.append(f"                {build_callback_url(hub_url)}")
    return lines


def _members(groups: tuple[str, ...]) -> list[str]:
    return [f"members of {group}" for group in groups]
