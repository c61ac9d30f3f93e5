"""The kinds of login: JupyterHub's authenticator and its traits for each, and what `gpuhub up` checks and prints.

A further kind needs a name (`config.users.users`), its keys (`config.users.login_keys`), a class beside `oauth` and
`password_forms`, and its traits here.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from traitlets.utils.importstring import import_item

from gpuhub.common import secrets
from gpuhub.common.errors import SettingsError
from gpuhub.common.paths import Paths
from gpuhub.common.secrets import read_private_file
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.users import LoginKind
from gpuhub.login import oidc_discovery, rules
from gpuhub.login.accounts import AccountBindings

#: Logins without groups: JupyterHub's administrators manage the hub's groups there.
_WITHOUT_GROUPS: frozenset[LoginKind] = frozenset({"password", "first-use"})
_CLASSES: dict[LoginKind, str] = {
    "password": "gpuhub.login.password_forms.PasswordAuthenticator",
    "first-use": "gpuhub.login.password_forms.ChosenPasswordAuthenticator",
    "pam": "gpuhub.login.password_forms.PamAuthenticator",
    "ldap": "gpuhub.login.ldap.LdapAuthenticator",
    "oidc": "gpuhub.login.oauth.OidcAuthenticator",
    "github": "gpuhub.login.oauth.GitHubAuthenticator",
    "gitlab": "gpuhub.login.oauth.GitLabAuthenticator",
    "google": "gpuhub.login.oauth.GoogleAuthenticator",
    "cilogon": "gpuhub.login.oauth.CILogonAuthenticator",
}
T = TypeVar("T")
MIN_PASSWORD_LENGTH = 8
GITLAB = "https://gitlab.com"
_LDAP_PORTS = {"ldap": 389, "ldaps": 636}
#: Maximum wait for the provider, seconds.
_TIMEOUT_S = 10
_MAX_SECRET_BYTES = 4096


def find_authenticator_class(cluster: ClusterSettings) -> str:
    """Return the class's name for JupyterHub."""
    return _CLASSES[cluster.users.login]


def load_authenticator_class(cluster: ClusterSettings) -> type[Any]:
    """Return the class that logs users in."""
    loaded: type[Any] = import_item(find_authenticator_class(cluster))
    return loaded


def build_authenticator_settings(cluster: ClusterSettings, paths: Paths, hub_url: str) -> dict[str, dict[str, Any]]:
    """Return the traits of each class, with secrets; for `oidc` the provider's endpoints are requested.

    Args:
        hub_url: The hub's address for browsers, without a slash at its end.

    Raises:
        SettingsError: A file that [login] names cannot be used.
        SetupError: The provider does not answer, and no answer of an earlier start is stored.
    """
    kind = cluster.users.login
    traits: dict[str, Any] = {}
    shared: dict[str, dict[str, Any]] = {}
    match kind:
        case "password":
            traits = {
                "user_password": secrets.read_secret(paths, secrets.USER_PASSWORD),
                "admin_password": secrets.read_secret(paths, secrets.ADMIN_PASSWORD),
                "hint": "All users have the same password here. The administrator of this hub knows it.",
            }
        case "first-use":
            traits = {
                "dbm_path": str(paths.secrets / "chosen-passwords"),
                "min_password_length": MIN_PASSWORD_LENGTH,
                "hint": f"Here for the first time? The password that you enter now, {MIN_PASSWORD_LENGTH} characters "
                "or more, will be yours.",
            }
        case "pam":
            traits = {"open_sessions": False, "hint": "With your account on the head node."}
        case "ldap":
            traits = _ldap(cluster)
        case _:
            traits = _provider(cluster, paths)
            shared = {"OAuthenticator": _oauth(cluster, paths, hub_url)}
    name = find_authenticator_class(cluster).rpartition(".")[2]
    return {
        "Authenticator": _common(cluster),
        "PolicyAuthenticator": {"rules": rules.build_rules(cluster)},
        **shared,
        name: traits,
    }


def _common(cluster: ClusterSettings) -> dict[str, Any]:
    return {
        # JupyterHub creates these users when it starts, so that administrators see them.
        "allowed_users": set(cluster.users.allowed),
        "admin_users": set(cluster.users.admins),
        "allow_all": False,
        # Otherwise a user who was allowed once would stay allowed.
        "allow_existing_users": False,
        # Access is always limited, but JupyterHub does not detect a limit by groups.
        "any_allow_config": True,
        "manage_groups": cluster.users.login not in _WITHOUT_GROUPS,
        # gpuhub does not need the provider's tokens after the login.
        "enable_auth_state": False,
        # The tokens of a user who may no longer log in are refused as well.
        "auth_refresh_strict": True,
    }


def _ldap(cluster: ClusterSettings) -> dict[str, Any]:
    login = cluster.login
    server = urlsplit(_require(login.server))
    return {
        "server_address": server.hostname,
        "server_port": server.port or _LDAP_PORTS[server.scheme],
        "tls_strategy": "on_connect" if server.scheme == "ldaps" else "before_bind",
        "tls_kwargs": _tls(login.ca),
        "bind_dn_template": [login.user_dn],
        "group_base": login.group_base or "",
        "hint": f"With your account at {server.hostname}.",
    }


def _tls(authority: Path | None) -> dict[str, Any]:
    # Without this the library checks nothing.
    values: dict[str, Any] = {"validate": ssl.CERT_REQUIRED}
    return values if authority is None else {**values, "ca_certs_file": str(authority)}


def _oauth(cluster: ClusterSettings, paths: Paths, hub_url: str) -> dict[str, Any]:
    login = cluster.login
    request: dict[str, Any] = {"connect_timeout": _TIMEOUT_S, "request_timeout": _TIMEOUT_S}
    if login.ca is not None:
        request["ca_certs"] = str(login.ca)
    return {
        "client_id": login.client_id,
        "client_secret": read_client_secret(_require(login.client_secret_file)),
        "oauth_callback_url": build_callback_url(hub_url),
        # Set here, because the library would read it from the environment.
        "validate_server_cert": True,
        "http_request_kwargs": request,
        "provider": build_provider_name(cluster),
        "accounts_file": str(find_bindings_file(paths)),
        "domains": list(login.domains),
    }


def _provider(cluster: ClusterSettings, paths: Paths) -> dict[str, Any]:
    login = cluster.login
    match cluster.users.login:
        case "oidc":
            issuer = _require(login.issuer)
            endpoints, _ = oidc_discovery.find_endpoints(issuer, login.ca, find_provider_cache(paths))
            return {
                "login_service": urlsplit(issuer).hostname,
                "authorize_url": endpoints.authorize,
                "token_url": endpoints.token,
                "userdata_url": endpoints.userinfo,
                "scope": list(endpoints.scopes),
                "basic_auth": endpoints.basic_auth,
                "username_claim": login.username_claim or "preferred_username",
                "groups_claim": login.groups_claim or "groups",
            }
        case "github":
            return {"login_service": "GitHub", "scope": ["read:org"]}
        case "gitlab":
            url = (login.issuer or GITLAB).rstrip("/")
            return {
                "login_service": "GitLab" if url == GITLAB else urlsplit(url).hostname,
                "gitlab_url": url,
                "userdata_url": f"{url}/oauth/userinfo",
                "scope": ["openid", "profile"],
                "username_claim": "nickname",
            }
        case "google":
            return {"login_service": "Google", "hosted_domain": list(login.domains), "strip_domain": False}
        case _:
            claim = {"username_derivation": {"username_claim": login.username_claim or "eppn"}}
            return {"login_service": "CILogon", "idps": dict.fromkeys(login.idps, claim)}


def _require(value: T | None) -> T:
    """Return a value that the check of the settings requires."""
    if value is None:
        raise SettingsError("[login] lacks a value")
    return value


def build_callback_url(hub_url: str) -> str:
    """Return the address that is registered with the provider."""
    return f"{hub_url}/hub/oauth_callback"


def build_provider_name(cluster: ClusterSettings) -> str:
    """Return the name of the provider in the file of account bindings."""
    issuer = cluster.login.issuer
    return cluster.users.login if issuer is None else f"{cluster.users.login} {issuer.rstrip('/')}"


def has_provider(cluster: ClusterSettings) -> bool:
    """Return whether users log in at a provider, whose accounts have numbers."""
    return cluster.users.login not in _WITHOUT_GROUPS and not cluster.users.has_own_accounts


def find_bindings_file(paths: Paths) -> Path:
    """Return the file that keeps which account of a provider has which name."""
    return paths.state / "login-accounts.json"


def find_bound_names(cluster: ClusterSettings, paths: Paths) -> frozenset[str]:
    """Return the names that belong to accounts of the provider; none where only root can read them."""
    file = find_bindings_file(paths)
    if not has_provider(cluster) or not os.access(file, os.R_OK):
        return frozenset()
    return AccountBindings(file, build_provider_name(cluster)).names()


def find_provider_cache(paths: Paths) -> Path:
    """Return the file that keeps a provider's endpoints."""
    return paths.state / "login-provider.json"


def check_login(cluster: ClusterSettings, paths: Paths) -> list[str]:
    """Check that users can log in, and return notes on temporary problems.

    Raises:
        SettingsError: A file that [login] names cannot be used.
        SetupError: The provider does not answer, and no answer of an earlier start is stored.
    """
    check_files(cluster)
    if cluster.users.login != "oidc" or cluster.login.issuer is None:
        return []
    _, problem = oidc_discovery.find_endpoints(cluster.login.issuer, cluster.login.ca, find_provider_cache(paths))
    if problem is None:
        return []
    return [f"Users cannot log in until the provider answers: {problem}. Its earlier answer is used until then"]


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
    content = read_private_file(
        path, "login.client_secret_file", content="the provider's client secret", limit=_MAX_SECRET_BYTES
    )
    key = f"login.client_secret_file: {str(path)!r}"
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
