"""What each way to log in needs to know: pure."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gpuhub.policy import LoginKind, Users
from gpuhub.tables import Login


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Keys of `[login]` for one kind of login."""

    required: frozenset[str] = field(default_factory=frozenset)
    optional: frozenset[str] = field(default_factory=frozenset)


_OAUTH = frozenset({"client_id", "client_secret_file"})

NEEDS: Mapping[LoginKind, Needs] = MappingProxyType(
    {
        "password": Needs(),
        "first-use": Needs(),
        "pam": Needs(),
        "ldap": Needs(required=frozenset({"server", "user_dn"}), optional=frozenset({"group_base", "ca"})),
        "oidc": Needs(
            required=_OAUTH | {"issuer"}, optional=frozenset({"username_claim", "groups_claim", "domains", "ca"})
        ),
        "github": Needs(required=_OAUTH),
        "gitlab": Needs(required=_OAUTH, optional=frozenset({"issuer", "ca"})),
        "google": Needs(required=_OAUTH, optional=frozenset({"domains"})),
        "cilogon": Needs(required=_OAUTH | {"idps"}, optional=frozenset({"username_claim", "domains"})),
    }
)

_GITHUB_GROUP = re.compile(r"[A-Za-z0-9-]{1,39}(:[A-Za-z0-9._-]{1,100})?")
_DOMAIN = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")
_DISCOVERY = "/.well-known/"


def mistakes(users: Users, login: Login) -> list[str]:
    """One line for each key that is missing, means nothing with this kind of login, or is wrong for it."""
    kind, needs = users.login, NEEDS[users.login]
    given = {key for key in Login.model_fields if getattr(login, key) not in (None, ())}
    known = ", ".join(sorted(needs.required | needs.optional)) or "none at all"
    found = [
        *(f'login.{key} is missing: users.login = "{kind}" needs it' for key in sorted(needs.required - given)),
        *(
            f'login.{key} means nothing with users.login = "{kind}"; keys that do: {known}'
            for key in sorted(given - needs.required - needs.optional)
        ),
    ]
    return found or [*_wrong_values(login), *_wrong_groups(users, login)]


def _wrong_values(login: Login) -> list[str]:
    wrong = []
    if login.user_dn is not None and _fields(login.user_dn) != {"username"}:
        wrong.append(
            f"login.user_dn: {login.user_dn!r}: put {{username}} where the name stands, and no other braces, such as "
            '"uid={username},ou=people,dc=example,dc=org"'
        )
    if login.issuer is not None and _DISCOVERY in login.issuer:
        wrong.append(f"login.issuer: {login.issuer!r}: leave out what begins with {_DISCOVERY}")
    wrong += [
        f'login.idps: {idp!r} is no entity id: write such as "https://idp.uni.edu/idp/shibboleth"'
        for idp in login.idps
        if not idp.startswith(("https://", "http://", "urn:"))
    ]
    return wrong


def _fields(template: str) -> set[str | None]:
    """Names in braces; {None} where the braces do not match."""
    try:
        return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError:
        return {None}


def _wrong_groups(users: Users, login: Login) -> list[str]:
    """Groups that the login's own side could never tell."""
    groups = [
        *(("allowed_groups", group) for group in users.allowed_groups),
        *(("admin_groups", group) for group in users.admin_groups),
    ]
    match users.login:
        case "ldap" if groups and login.group_base is None:
            return ["login.group_base is missing: allowed_groups and admin_groups of an LDAP server are searched there"]
        case "github":
            return [
                f'users.{key}: {group!r} is no group of GitHub: write "organisation" or "organisation:team"'
                for key, group in groups
                if not _GITHUB_GROUP.fullmatch(group)
            ]
        case "google":
            return [
                f"users.{key}: {group!r} is no domain: with Google, groups are Workspace domains, such as "
                '"example.org"; Google tells other groups to service accounts only'
                for key, group in groups
                if not _DOMAIN.fullmatch(group)
            ]
        case "cilogon":
            return [
                f"users.{key}: {group!r} is not in login.idps: with CILogon, groups are identity providers"
                for key, group in groups
                if group not in login.idps
            ]
    return []
