"""What a node's daemon says is there. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuhub import names
from gpuhub.nodes.records import Identity

_ENDED = frozenset({"exited", "dead", "removing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container of ours as the daemon lists it."""

    id: str
    kind: str
    lease: str
    epoch: int
    worker: int | None
    #: Docker's word: created, running, paused, restarting, removing, exited or dead.
    state: str
    #: The GPUs that it was made with; None where that was not asked yet.
    devices: frozenset[str] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its program runs, or may still begin to."""
        return self.state not in _ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All containers of ours on one node at one moment."""

    node: str
    #: The daemon's that made the list, and the machine's boot.
    identity: Identity
    containers: tuple[Container, ...]
    #: When the listing began, seconds since 1970.
    at: float
    #: Leases whose containers the broker was making meanwhile.
    busy: frozenset[str] = frozenset()


def parse_container(raw: Mapping[str, Any], devices: frozenset[str] | None = None) -> Container:
    """One entry of the daemon's list, such as
    `{"Id": "3f…", "State": "running", "Labels": {"gpuhub.lease": "l1", …}}`.
    """
    labels: Mapping[str, str] = raw.get("Labels") or {}
    return Container(
        id=raw["Id"],
        kind=labels.get(names.LABEL_KIND, ""),
        lease=labels.get(names.LABEL_LEASE, ""),
        epoch=_number(labels.get(names.LABEL_EPOCH)) or 0,
        worker=_number(labels.get(names.LABEL_WORKER)),
        state=str(raw.get("State") or "").lower(),
        devices=devices,
    )


def parse_devices(raw: Mapping[str, Any]) -> frozenset[str]:
    """The GPUs a container was made with, from what `inspect` says of it; `all` for a request without names."""
    requests = (raw.get("HostConfig") or {}).get("DeviceRequests") or ()
    return frozenset(device for request in requests for device in request.get("DeviceIDs") or ("all",))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
