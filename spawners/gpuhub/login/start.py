"""What `gpuhub up` does about logins before anything starts, and what it tells at its end."""

from __future__ import annotations

from pathlib import Path

from gpuhub import secrets
from gpuhub.login import discovery, files
from gpuhub.login.values import LEAST_PASSWORD, callback_url, provider_cache
from gpuhub.paths import Paths
from gpuhub.settings import Cluster


def check(cluster: Cluster, paths: Paths) -> list[str]:
    """See that logins can work; notes on what does not for the moment.

    Raises:
        SettingsError: a file that [login] names is not as it should be.
        SetupError: the provider does not answer, and never did.
    """
    files.check_files(cluster)
    if cluster.users.login != "oidc" or cluster.login.issuer is None:
        return []
    _, trouble = discovery.find_endpoints(cluster.login.issuer, cluster.login.ca, provider_cache(paths))
    if trouble is None:
        return []
    return [f"Nobody can log in before the provider answers: {trouble}. What it said before is used meanwhile"]


def fingerprint(cluster: Cluster) -> str:
    """Changes with the files that [login] names."""
    named = (cluster.login.client_secret_file, cluster.login.ca)
    return "\n".join(_stamp(file) for file in named if file is not None)


def _stamp(file: Path) -> str:
    found = file.stat()
    return f"{file} {found.st_ino} {found.st_mtime_ns}"


def describe(cluster: Cluster, paths: Paths, hub_url: str) -> list[str]:
    """How people log in, for whoever started the hub: lines with a title and a text."""
    users = cluster.users
    allowed = [*users.allowed, *_members(users.allowed_groups)] or ["nobody but the administrators"]
    lines = [f"Who can log in: {', '.join(allowed)}"]
    if users.admins or users.admin_groups:
        lines.append(f"Administrators: {', '.join([*users.admins, *_members(users.admin_groups)])}")
    match users.login:
        case "password":
            lines.append(f"Password:       {secrets.read_secret(paths, secrets.USER_PASSWORD)}")
            if users.admins:
                lines.append(f"Administrators': in {paths.secrets / secrets.ADMIN_PASSWORD}")
        case "first-use":
            lines.append(f"Password:       each chooses one at the first login, {LEAST_PASSWORD} characters or more")
        case "pam":
            lines.append("Password:       that of their account on this machine")
        case "ldap":
            lines.append(f"Password:       that of their account at {cluster.login.server}")
        case _:
            lines.append(f"Log in at:      {cluster.login.issuer or users.login}, which must know the address")
            lines.append(f"                {callback_url(hub_url)}")
    return lines


def _members(groups: tuple[str, ...]) -> list[str]:
    return [f"members of {group}" for group in groups]
