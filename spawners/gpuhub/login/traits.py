"""Which traits of JupyterHub's, oauthenticator's and the other authenticators an administrator may set.

gpuhub decides the rest itself, from cluster.toml. A value that had no effect, or let other users in than cluster.toml
names, would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: Traits that have their usual effect.
EFFECTIVE = frozenset(
    {
        # JupyterHub
        "auth_refresh_age", "auth_refresh_strict", "auto_login", "auto_login_oauth2_authorize", "blocked_users",
        "delete_invalid_users", "enable_auth_state", "post_auth_hook", "reconcile_auth_state_hook", "refresh_pre_spawn",
        "refresh_pre_stop", "username_map",
        # gpuhub
        "hint",
        # firstuseauthenticator
        "check_passwords_on_startup", "create_users", "min_password_length",
        # PAM
        "check_account", "encoding", "executor_threads", "open_sessions", "pam_normalize_username", "service",
        # ldapauthenticator
        "group_search_filter",
        # oauthenticator
        "cilogon_host", "custom_403_message", "enable_pkce", "extra_authorize_params", "extra_params", "github_api",
        "github_url", "google_api_url", "http_request_kwargs", "login_service", "logout_redirect_url",
        "modify_auth_state_hook", "populate_teams_in_auth_state", "scope", "skin", "token_params",
        "userdata_from_id_token", "userdata_params", "userdata_token_method",
    }
)  # fmt: skip

_ALLOWED = "set `allowed` and `allowed_groups` below [users] in cluster.toml"
_ADMINS = "set `admins` and `admin_groups` below [users] in cluster.toml"
_LOGIN = "set `login` below [users] and the keys below [login] in cluster.toml"
_ISSUER = "set `issuer` below [login] in cluster.toml; of the other providers, gpuhub knows the address"
_IDPS = "set `idps` below [login] in cluster.toml"
_DOMAINS = "set `domains` below [login] in cluster.toml"
_GROUPS = "the login decides about groups; with `oidc`, set `groups_claim` below [login] in cluster.toml"
_USERNAME = "set `username_claim` below [login] in cluster.toml, with `oidc` and `cilogon`"
_CLIENT = "set `client_id` and `client_secret_file` below [login] in cluster.toml"
_AUTHORITY = "set `ca` below [login] in cluster.toml"
_SERVER = "set `server` below [login] in cluster.toml"
_USER_DN = "set `user_dn` below [login] in cluster.toml: the hub binds as the user, and searches no users"
_GROUP_BASE = "set `group_base` below [login] in cluster.toml: groups have their common name"
_ROLES = "use `load_roles` of c.JupyterHub, which gpuhub's own roles need"
_ACCOUNTS = "set `accounts` and `uid_first` below [users] in cluster.toml; gpuhub creates no accounts"
_PASSWORDS = "`sudo make up` makes the passwords, and prints where they are"
_FORM = "the login form of gpuhub has a name and a password"
_SETTINGS = "cluster.toml decides it"

#: What to do instead, for each trait that is refused.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("allow_all", "allow_existing_users", "allowed_users", "any_allow_config", "whitelist", "allowed_groups",
         "group_whitelist", "allowed_scopes", "allowed_organizations", "github_organization_whitelist",
         "allowed_gitlab_groups", "gitlab_group_whitelist", "allowed_project_ids", "gitlab_project_id_whitelist",
         "allowed_google_groups", "google_group_whitelist", "google_service_account_keys", "gsuite_administrator",
         "include_nested_groups", "search_filter"),
        _ALLOWED,
    ),
    **dict.fromkeys(("admin_users", "admin_groups", "admin_google_groups"), _ADMINS),
    "rules": f"{_ALLOWED}, and `admins` and `admin_groups`",
    **dict.fromkeys(("manage_groups", "auth_state_groups_key", "claim_groups_key", "groups_claim"), _GROUPS),
    "password_groups": "administrators assign groups on the hub's admin page with this login",
    **dict.fromkeys(("manage_roles", "reset_managed_roles_on_startup"), _ROLES),
    "refresh_user_hook": "gpuhub compares users with [users] in cluster.toml instead",
    **dict.fromkeys(("otp_prompt", "request_otp"), _FORM),
    **dict.fromkeys(("username_pattern", "valid_username_regex"), "the form of user names is that of all of gpuhub"),
    **dict.fromkeys(("username_claim", "username_key", "additional_username_claims"), _USERNAME),
    **dict.fromkeys(("add_user_cmd", "create_system_users", "uids"), _ACCOUNTS),
    **dict.fromkeys(("user_password", "admin_password"), _PASSWORDS),
    "dbm_path": "gpuhub keeps chosen passwords with its secrets, where backups have them",
    **dict.fromkeys(("client_id", "client_secret", "github_client_id", "github_client_secret"), _CLIENT),
    "oauth_callback_url": "set `address`, and with a name `https`, below [hub] in cluster.toml",
    **dict.fromkeys(
        ("authorize_url", "token_url", "userdata_url", "basic_auth", "gitlab_url", "gitlab_api", "gitlab_api_version"),
        _ISSUER,
    ),
    **dict.fromkeys(("validate_server_cert", "tls_verify", "tls_kwargs"), _AUTHORITY),
    **dict.fromkeys(("domains", "hosted_domain", "strip_domain"), _DOMAINS),
    **dict.fromkeys(("idps", "allowed_idps", "idp", "idp_whitelist", "shown_idps", "strip_idp_domain"), _IDPS),
    **dict.fromkeys(("provider", "accounts_file"), _SETTINGS),
    **dict.fromkeys(("server_address", "server_port", "tls_strategy", "use_ssl"), _SERVER),
    **dict.fromkeys(
        ("bind_dn_template", "escape_userdn", "lookup_dn", "lookup_dn_search_filter", "lookup_dn_search_password",
         "lookup_dn_search_user", "lookup_dn_user_dn_attribute", "use_lookup_dn_username", "user_attribute",
         "user_search_base", "attributes", "auth_state_attributes"),
        _USER_DN,
    ),
    **dict.fromkeys(("group_base", "group_attributes"), _GROUP_BASE),
}  # fmt: skip


def list_mistakes(
    authenticator: type[Any], sections: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each setting in these sections that may not be set, or has no effect on logins.

    Args:
        authenticator: The class that logs users in.
        sections: The settings of an administrator, by class name and trait.
        config: All settings, with those of gpuhub.
    """
    classes = [kind.__name__ for kind in authenticator.__mro__]
    for section, values in sections.items():
        # c.JupyterHub.admin_users is an older name of c.Authenticator.admin_users.
        if section in classes or section == "JupyterHub":
            yield from (f"c.{section}.{name} is refused: {REFUSED[name]}" for name in values if name in REFUSED)
        elif section.endswith("Authenticator"):
            yield f"c.{section} has no effect: {authenticator.__name__} logs users in; {_LOGIN}"
        if section in classes:
            yield from _list_overridden(section, values, classes[: classes.index(section)], config)


def _list_overridden(
    section: str, values: Mapping[str, Any], subclasses: list[str], config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each setting of a class that one of its subclasses has a value of its own for."""
    for name in values.keys() - REFUSED.keys():
        for subclass in subclasses:
            if name in config.get(subclass, {}):
                yield f"c.{section}.{name} has no effect, because c.{subclass}.{name} has a value: set that one"
                break
