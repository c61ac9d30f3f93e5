"""The caller of an operation, as the hub identifies it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The user or service that sends a request."""

    name: str
    is_user: bool = True
    is_admin: bool = False
    #: May act for other owners, as the hub's spawner does.
    any_owner: bool = False
    #: Groups in the hub.
    groups: frozenset[str] = frozenset()

    @property
    def sees_all(self) -> bool:
        """Return whether it may read and end the leases of all users."""
        return self.is_admin or self.any_owner
