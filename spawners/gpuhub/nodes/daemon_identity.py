"""Identities of Docker daemons: proofs of what runs where rely on each node having its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def describe_shared_identities(ids: Mapping[str, str | None]) -> list[str]:
    """Return an error text for each id that several nodes have.

    Args:
        ids: Node → the id of its Docker daemon; None where it is unknown.
    """
    owners: dict[str, list[str]] = {}
    for node, daemon_id in ids.items():
        if daemon_id is not None:
            owners.setdefault(daemon_id, []).append(node)
    return [describe_shared_identity(nodes, daemon_id) for daemon_id, nodes in owners.items() if len(nodes) > 1]


def describe_shared_identity(nodes: Iterable[str], daemon_id: str) -> str:
    """Return the error text for nodes whose Docker daemons have the same id."""
    return (
        f"the Docker daemons of {' and '.join(nodes)} have the same identity {daemon_id}, so it cannot be proven which "
        f"one of them answers. {SHARED_IDENTITY_REMEDY}"
    )


#: Remedy for one machine under two names, copied disks, and practice closets that an older version of gpuhub started.
SHARED_IDENTITY_REMEDY = (
    "Two entries for one machine: remove one of them from cluster.toml. Two machines from one disk image: on one of "
    "them, remove /etc/docker/key.json and the file engine-id in Docker's data-root, and reboot it. In the practice "
    "closet: `sudo make down`, then `sudo make up`"
)
