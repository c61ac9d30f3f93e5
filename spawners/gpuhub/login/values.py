"""From cluster.toml to JupyterHub's authenticator and its traits."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gpuhub import secrets
from gpuhub.errors import SettingsError
from gpuhub.login import discovery, files, rules
from gpuhub.paths import Paths
from gpuhub.policy import LoginKind
from gpuhub.settings import Cluster

#: Where the login's own side tells groups; with the others JupyterHub's administrators keep the hub's groups.
_WITHOUT_GROUPS: frozenset[LoginKind] = frozenset({"password", "first-use"})
_CLASSES: dict[LoginKind, str] = {
    "password": "gpuhub.login.forms.Password",
    "first-use": "gpuhub.login.forms.FirstUse",
    "pam": "gpuhub.login.forms.Pam",
    "ldap": "gpuhub.login.directory.Ldap",
    "oidc": "gpuhub.login.providers.Oidc",
    "github": "gpuhub.login.providers.GitHub",
    "gitlab": "gpuhub.login.providers.GitLab",
    "google": "gpuhub.login.providers.Google",
    "cilogon": "gpuhub.login.providers.CILogon",
}
T = TypeVar("T")
LEAST_PASSWORD = 8
GITLAB = "https://gitlab.com"
_LDAP_PORTS = {"ldap": 389, "ldaps": 636}
_PATIENCE_S = 10


def authenticator_class(cluster: Cluster) -> str:
    """Where JupyterHub finds the class."""
    return _CLASSES[cluster.users.login]


def authenticator_settings(cluster: Cluster, paths: Paths, hub_url: str) -> dict[str, dict[str, Any]]:
    """Class → trait → value; `hub_url`: what browsers call the hub, without a slash at its end. Holds secrets.

    Reads the secrets' files, and for `oidc` the provider's endpoints.

    Raises:
        SettingsError: a file is not as it should be.
        SetupError: the provider does not answer, and never did.
    """
    kind = cluster.users.login
    own: dict[str, Any] = {}
    more: dict[str, dict[str, Any]] = {}
    match kind:
        case "password":
            own = {
                "user_password": secrets.read_secret(paths, secrets.USER_PASSWORD),
                "admin_password": secrets.read_secret(paths, secrets.ADMIN_PASSWORD),
                "hint": "Everybody has the same password here. Whoever started this hub knows it.",
            }
        case "first-use":
            own = {
                "dbm_path": str(paths.secrets / "chosen-passwords"),
                "min_password_length": LEAST_PASSWORD,
                "hint": f"Here for the first time? The password that you enter now, {LEAST_PASSWORD} characters or "
                "more, will be yours.",
            }
        case "pam":
            own = {"open_sessions": False, "hint": "With your account on the head node."}
        case "ldap":
            own = _ldap(cluster)
        case _:
            own = _provider(cluster, paths)
            more = {"OAuthenticator": _oauth(cluster, paths, hub_url)}
    name = authenticator_class(cluster).rpartition(".")[2]
    return {"Authenticator": _common(cluster), "Ruled": {"rules": rules.rules_of(cluster)}, **more, name: own}


def _common(cluster: Cluster) -> dict[str, Any]:
    return {
        # JupyterHub makes these users at its start, so that administrators see them.
        "allowed_users": set(cluster.users.allowed),
        "admin_users": set(cluster.users.admins),
        "allow_all": False,
        # Else whoever was ever allowed would be for good.
        "allow_existing_users": False,
        # There is one always; JupyterHub does not find it where it is a group.
        "any_allow_config": True,
        "manage_groups": cluster.users.login not in _WITHOUT_GROUPS,
        # Nothing of ours needs the provider's tokens after the login.
        "enable_auth_state": False,
        # Who may not log in any more does nothing with a token either.
        "auth_refresh_strict": True,
    }


def _ldap(cluster: Cluster) -> dict[str, Any]:
    login = cluster.login
    server = urlsplit(_given(login.server))
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
    # The library's own default is to check nothing.
    values: dict[str, Any] = {"validate": ssl.CERT_REQUIRED}
    return values if authority is None else {**values, "ca_certs_file": str(authority)}


def _oauth(cluster: Cluster, paths: Paths, hub_url: str) -> dict[str, Any]:
    login = cluster.login
    request: dict[str, Any] = {"connect_timeout": _PATIENCE_S, "request_timeout": _PATIENCE_S}
    if login.ca is not None:
        request["ca_certs"] = str(login.ca)
    return {
        "client_id": login.client_id,
        "client_secret": files.read_client_secret(_given(login.client_secret_file)),
        "oauth_callback_url": callback_url(hub_url),
        # Said, because the library would take it from the environment.
        "validate_server_cert": True,
        "http_request_kwargs": request,
        "provider": provider_name(cluster),
        "accounts_file": str(paths.state / "login-accounts.json"),
        "domains": list(login.domains),
    }


def _provider(cluster: Cluster, paths: Paths) -> dict[str, Any]:
    login = cluster.login
    match cluster.users.login:
        case "oidc":
            issuer = _given(login.issuer)
            endpoints, _ = discovery.find_endpoints(issuer, login.ca, provider_cache(paths))
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


def _given(value: T | None) -> T:
    """A value without which `logins.mistakes` lets no settings pass."""
    if value is None:
        raise SettingsError("[login] lacks a value")
    return value


def callback_url(hub_url: str) -> str:
    """What is registered with the provider."""
    return f"{hub_url}/hub/oauth_callback"


def provider_name(cluster: Cluster) -> str:
    """Whose numbers of accounts are kept."""
    issuer = cluster.login.issuer
    return cluster.users.login if issuer is None else f"{cluster.users.login} {issuer.rstrip('/')}"


def provider_cache(paths: Paths) -> Path:
    """Where a provider's endpoints are kept."""
    return paths.state / "login-provider.json"
