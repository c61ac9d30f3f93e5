"""The access rules of every login: who may log in, and who is an administrator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuhub.broker.api.auth import ADMIN_SCOPE
from gpuhub.config.settings import ClusterSettings

#: Scopes of JupyterHub's role `admin` here: the admin page, starting and stopping servers, deleting users, groups, and
#: the broker's administration. Not JupyterHub's own: no access to users' servers, no tokens of other users, no users
#: created or renamed, no changes of the proxy.
ADMINISTRATOR_SCOPES = (
    "admin-ui",
    "list:users",
    "read:users",
    "delete:users",
    "servers",
    "admin:groups",
    "list:services",
    "read:services",
    "read:hub",
    "read:metrics",
    ADMIN_SCOPE,
)
#: gpuhub's own scopes in the roles of users, as JupyterHub has them defined before it reads such a role.
USER_SCOPES = {ADMIN_SCOPE: {"description": "Administer the GPU broker: all leases, nodes and reservations"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessDecision:
    """The rights of a user."""

    allowed: bool
    admin: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """The names and groups of cluster.toml."""

    allowed: frozenset[str]
    admins: frozenset[str]
    allowed_groups: frozenset[str]
    admin_groups: frozenset[str]
    #: Groups with their own limits, nodes or profiles.
    other_groups: frozenset[str]

    def decide(self, name: str, groups: Iterable[str]) -> AccessDecision:
        """Decide by name and groups; administrators are always allowed."""
        member_of = frozenset(groups)
        admin = name in self.admins or bool(member_of & self.admin_groups)
        return AccessDecision(
            allowed=admin or name in self.allowed or bool(member_of & self.allowed_groups), admin=admin
        )

    @property
    def known_groups(self) -> frozenset[str]:
        """The groups in the settings: the hub keeps a user's membership of these and of no others."""
        return self.allowed_groups | self.admin_groups | self.other_groups

    def filter_known(self, groups: Iterable[str]) -> frozenset[str]:
        """Return those of the groups that the settings name."""
        return self.known_groups & frozenset(groups)


def build_rules(cluster: ClusterSettings) -> AccessRules:
    """Build the rules from the settings."""
    return AccessRules(
        allowed=frozenset(cluster.users.allowed),
        admins=frozenset(cluster.users.admins),
        allowed_groups=frozenset(cluster.users.allowed_groups),
        admin_groups=frozenset(cluster.users.admin_groups),
        other_groups=frozenset(group.name for group in cluster.groups) | cluster.access_groups | cluster.service_groups,
    )
