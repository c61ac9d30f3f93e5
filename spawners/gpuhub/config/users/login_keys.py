"""`[login]` in cluster.toml: the keys that each kind of login needs, and checks of their values."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from pydantic import field_validator

from gpuhub.config.base import HostName, ListOf, SettingsTable, Text
from gpuhub.config.users.users import LoginKind, UserSettings


class LoginSettings(SettingsTable):
    """Login provider or LDAP server; `KEYS_BY_LOGIN` lists which keys each value of `users.login` takes."""

    #: OAuth and OpenID Connect: the client id, as registered with the provider.
    client_id: Text | None = None
    #: OAuth and OpenID Connect: a file with the client secret, readable only by root.
    client_secret_file: Path | None = None
    #: `oidc`: the URL below which the provider serves `/.well-known/openid-configuration`; `gitlab`: the URL of a
    #: self-hosted server.
    issuer: str | None = None
    #: `oidc`, `cilogon`: the claim that holds the user name.
    username_claim: Text | None = None
    #: `oidc`: the claim that lists the user's groups.
    groups_claim: Text | None = None
    #: `google`, `oidc`, `cilogon`: the domains whose accounts may log in; with a single one, the user name is the part
    #: before the @.
    domains: ListOf[HostName] = ()
    #: `cilogon`: entity ids of the accepted identity providers.
    idps: ListOf[Text] = ()
    #: `ldap`: URL of the server, such as `ldaps://ldap.example.org`.
    server: str | None = None
    #: `ldap`: template of a user's entry, such as `uid={username},ou=people,dc=example,dc=org`.
    user_dn: Text | None = None
    #: `ldap`: entry below which groups are searched.
    group_base: Text | None = None
    #: PEM file of the certificate authority that signed the provider's or server's certificate; None: the authorities
    #: of the system.
    ca: Path | None = None

    @field_validator("client_secret_file", "ca", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) else value

    @field_validator("issuer")
    @classmethod
    def _issuer(cls, value: str | None) -> str | None:
        if value is not None:
            url = urlsplit(value)
            if url.scheme != "https" and not (url.scheme == "http" and url.hostname in {"127.0.0.1", "localhost"}):
                raise ValueError(f'{value!r}: an https:// address is needed, such as "https://auth.example.org/"')
        return value

    @field_validator("server")
    @classmethod
    def _server(cls, value: str | None) -> str | None:
        if value is not None and (urlsplit(value).scheme not in {"ldap", "ldaps"} or not urlsplit(value).hostname):
            raise ValueError(f'{value!r} is not an LDAP server: write one such as "ldaps://ldap.example.org"')
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginKeys:
    """Keys of `[login]` that one kind of login needs or accepts."""

    required: frozenset[str] = field(default_factory=frozenset)
    optional: frozenset[str] = field(default_factory=frozenset)


_OAUTH = frozenset({"client_id", "client_secret_file"})

KEYS_BY_LOGIN: Mapping[LoginKind, LoginKeys] = MappingProxyType(
    {
        "password": LoginKeys(),
        "first-use": LoginKeys(),
        "pam": LoginKeys(),
        "ldap": LoginKeys(required=frozenset({"server", "user_dn"}), optional=frozenset({"group_base", "ca"})),
        "oidc": LoginKeys(
            required=_OAUTH | {"issuer"}, optional=frozenset({"username_claim", "groups_claim", "domains", "ca"})
        ),
        "github": LoginKeys(required=_OAUTH),
        "gitlab": LoginKeys(required=_OAUTH, optional=frozenset({"issuer", "ca"})),
        "google": LoginKeys(required=_OAUTH, optional=frozenset({"domains"})),
        "cilogon": LoginKeys(required=_OAUTH | {"idps"}, optional=frozenset({"username_claim", "domains"})),
    }
)

_GITHUB_GROUP = re.compile(r"[A-Za-z0-9-]{1,39}(:[A-Za-z0-9._-]{1,100})?")
_DOMAIN = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")
_DISCOVERY = "/.well-known/"


def find_login_mistakes(users: UserSettings, login: LoginSettings) -> list[str]:
    """Return one line for each key that is missing, unused or wrong with this kind of login."""
    kind, needs = users.login, KEYS_BY_LOGIN[users.login]
    given = {key for key in LoginSettings.model_fields if getattr(login, key) not in (None, ())}
    accepted = ", ".join(sorted(needs.required | needs.optional)) or "none at all"
    mistakes = [
        *(f'login.{key} is missing: users.login = "{kind}" needs it' for key in sorted(needs.required - given)),
        *(
            f'login.{key} has no meaning with users.login = "{kind}"; keys that do: {accepted}'
            for key in sorted(given - needs.required - needs.optional)
        ),
    ]
    return mistakes or [*_wrong_values(login), *_wrong_groups(users, login)]


def _wrong_values(login: LoginSettings) -> list[str]:
    wrong = []
    if login.user_dn is not None and _fields(login.user_dn) != {"username"}:
        wrong.append(
            f"login.user_dn: {login.user_dn!r}: put {{username}} in place of the user name, and no other braces, such "
            'as "uid={username},ou=people,dc=example,dc=org"'
        )
    if login.issuer is not None and _DISCOVERY in login.issuer:
        wrong.append(f"login.issuer: {login.issuer!r}: leave out what begins with {_DISCOVERY}")
    wrong += [
        f'login.idps: {idp!r} is not an entity id: write one such as "https://idp.uni.edu/idp/shibboleth"'
        for idp in login.idps
        if not idp.startswith(("https://", "http://", "urn:"))
    ]
    return wrong


def _fields(template: str) -> set[str | None]:
    """Return the names in braces; {None} where the braces do not match."""
    try:
        return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError:
        return {None}


def _wrong_groups(users: UserSettings, login: LoginSettings) -> list[str]:
    """Return one line for each group that the login provider could never report."""
    groups = [
        *(("allowed_groups", group) for group in users.allowed_groups),
        *(("admin_groups", group) for group in users.admin_groups),
    ]
    if users.login == "ldap" and groups and login.group_base is None:
        return ["login.group_base is missing: allowed_groups and admin_groups of an LDAP server are searched there"]
    reasons = ((key, group, explain_unknown_group(users.login, login, group)) for key, group in groups)
    return [f"users.{key}: {group!r} {reason}" for key, group, reason in reasons if reason is not None]


def explain_unknown_group(kind: LoginKind, login: LoginSettings, group: str) -> str | None:
    """Return why the login provider could never report a group, to follow its name; None if it could."""
    match kind:
        case "password" | "first-use":
            return f'has no members: login = "{kind}" has no groups'
        case "ldap" if login.group_base is None:
            return "has no members: groups of an LDAP server are searched below login.group_base, which is missing"
        case "github" if not _GITHUB_GROUP.fullmatch(group):
            return 'is not a group of GitHub: write "organisation" or "organisation:team"'
        case "google" if not _DOMAIN.fullmatch(group):
            return (
                'is not a domain: with Google, groups are Workspace domains, such as "example.org"; Google reports '
                "other groups to service accounts only"
            )
        case "cilogon" if group not in login.idps:
            return "is not in login.idps: with CILogon, groups are identity providers"
    return None
