"""Containers that a node's Docker daemon reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuhub.common import names
from gpuhub.nodes.status import NodeIdentity

_ENDED = frozenset({"exited", "dead", "removing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedContainer:
    """One container of this instance in the daemon's list."""

    id: str
    kind: str
    lease: str
    epoch: int
    worker: int | None
    #: Docker's state: created, running, paused, restarting, removing, exited or dead.
    state: str
    #: The GPUs that it was created with; None if that is not known yet.
    devices: frozenset[str] | None = None

    @property
    def is_alive(self) -> bool:
        """True if its program runs or may still start."""
        return self.state not in _ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """All containers of this instance on one node at one moment."""

    node: str
    #: The ids of the daemon that made the list and of the machine's boot.
    identity: NodeIdentity
    containers: tuple[ObservedContainer, ...]
    #: When the query began, seconds since 1970.
    observed_at: float
    #: Leases for which the broker was creating containers during the query.
    starting_leases: frozenset[str] = frozenset()


def parse_container(raw: Mapping[str, Any], devices: frozenset[str] | None = None) -> ObservedContainer:
    """Parse one entry of the daemon's list, such as `{"Id": "3f…", "State": "running", "Labels": {"gpuhub.lease": "l1",
    …}}`.
    """
    labels: Mapping[str, str] = raw.get("Labels") or {}
    return ObservedContainer(
        id=raw["Id"],
        kind=labels.get(names.LABEL_KIND, ""),
        lease=labels.get(names.LABEL_LEASE, ""),
        epoch=_parse_number(labels.get(names.LABEL_EPOCH)) or 0,
        worker=_parse_number(labels.get(names.LABEL_WORKER)),
        state=str(raw.get("State") or "").lower(),
        devices=devices,
    )


def parse_devices(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the GPUs that a container was created with, from `inspect`; `all` for a request without names."""
    requests = (raw.get("HostConfig") or {}).get("DeviceRequests") or ()
    return frozenset(device for request in requests for device in request.get("DeviceIDs") or ("all",))


def _parse_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
