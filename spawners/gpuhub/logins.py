"""What each way to log in needs to know: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gpuhub.policy import LoginKind
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
        "oidc": Needs(required=_OAUTH | {"issuer"}, optional=frozenset({"username_claim", "groups_claim", "ca"})),
        "github": Needs(required=_OAUTH),
        "gitlab": Needs(required=_OAUTH, optional=frozenset({"issuer", "ca"})),
        "google": Needs(required=_OAUTH, optional=frozenset({"domains"})),
        "cilogon": Needs(required=_OAUTH | {"idps"}, optional=frozenset({"username_claim"})),
    }
)


def mistakes(kind: LoginKind, login: Login) -> list[str]:
    """One line for each key that is missing or means nothing with this kind of login."""
    needs = NEEDS[kind]
    given = {key for key in Login.model_fields if getattr(login, key) not in (None, ())}
    known = ", ".join(sorted(needs.required | needs.optional)) or "none at all"
    return [
        *(f'login.{key} is missing: users.login = "{kind}" needs it' for key in sorted(needs.required - given)),
        *(
            f'login.{key} means nothing with users.login = "{kind}"; keys that do: {known}'
            for key in sorted(given - needs.required - needs.optional)
        ),
    ]
