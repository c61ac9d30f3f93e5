"""Who may use a node, as names of groups: those of cluster.toml, an owner, and preemptible work."""

from __future__ import annotations

from collections.abc import Iterable

_OWNER = "owner:"
_SCAVENGING = "scavenging:"
_GUESTS = "guests:"


def owner_group(name: str) -> str:
    """Return the group that only this user is in."""
    return f"{_OWNER}{name}"


def scavenging_group(group: str = "") -> str:
    """Return the group of the scavenging jobs of a group's members; of all users without one."""
    return f"{_SCAVENGING}{group}"


def guest_group(group: str = "") -> str:
    """Return the group of the jobs of a group's members that may run on guests; of all users without one."""
    return f"{_GUESTS}{group}"


def is_reserved(group: str) -> bool:
    """Return whether a name is one of those above, which no login and no table of cluster.toml may give."""
    return group.startswith((_OWNER, _SCAVENGING, _GUESTS))


def check_group(group: str) -> str:
    """Return the name of a group of cluster.toml.

    Raises:
        ValueError: It is reserved.
    """
    if is_reserved(group):
        raise ValueError(f"{group!r} is reserved for owners of nodes and for guests: use a name that does not begin so")
    return group


def find_request_groups(groups: Iterable[str], *, scavenge: bool, guests: bool = False) -> frozenset[str]:
    """Return the groups by which nodes admit a request of an owner in `groups`; with `guests`, guests alone do."""
    own = frozenset(groups)
    if guests:
        return frozenset({guest_group(), *(guest_group(group) for group in own)})
    if not scavenge:
        return own
    return own | {scavenging_group(), *(scavenging_group(group) for group in own)}


def describe_access(groups: Iterable[str]) -> str:
    """Return whom a node is restricted to, such as `only for members of vision or nlp`, or
    `only for mia, and for scavenging jobs of members of vision`.
    """
    ordered = sorted(groups)
    if ordered and all(group.startswith(_GUESTS) for group in ordered):
        members = [member for group in ordered if (member := group.removeprefix(_GUESTS))]
        return "only for jobs with --guests" + (f" of members of {' or '.join(members)}" if members else "")
    owners = [group.removeprefix(_OWNER) for group in ordered if group.startswith(_OWNER)]
    if not owners:
        return f"only for members of {' or '.join(ordered)}"
    members = [member for group in ordered if (member := group.removeprefix(_SCAVENGING)) != group and member]
    of_members = f" of members of {' or '.join(members)}" if members else ""
    return f"only for {' or '.join(owners)}, and for scavenging jobs{of_members}"
