"""Who may log in and who is an administrator: one rule for every way to log in; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuhub.settings import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What somebody may do here."""

    allowed: bool
    admin: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The names and groups of cluster.toml."""

    allowed: frozenset[str]
    admins: frozenset[str]
    allowed_groups: frozenset[str]
    admin_groups: frozenset[str]
    #: Groups with limits of their own.
    limited_groups: frozenset[str]

    def decide(self, name: str, groups: Iterable[str]) -> Verdict:
        """Allowed by name or by group, never otherwise; administrators are allowed."""
        member_of = frozenset(groups)
        admin = name in self.admins or bool(member_of & self.admin_groups)
        return Verdict(allowed=admin or name in self.allowed or bool(member_of & self.allowed_groups), admin=admin)

    @property
    def known_groups(self) -> frozenset[str]:
        """Groups that mean something here: the hub keeps a user's membership of these and of no others."""
        return self.allowed_groups | self.admin_groups | self.limited_groups

    def known(self, groups: Iterable[str]) -> frozenset[str]:
        """Those that mean something here."""
        return self.known_groups & frozenset(groups)


def rules_of(cluster: Cluster) -> Rules:
    """The rules in the settings."""
    return Rules(
        allowed=frozenset(cluster.users.allowed),
        admins=frozenset(cluster.users.admins),
        allowed_groups=frozenset(cluster.users.allowed_groups),
        admin_groups=frozenset(cluster.users.admin_groups),
        limited_groups=frozenset(group.name for group in cluster.groups),
    )
