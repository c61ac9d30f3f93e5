"""Invitations and guests, in a file that only root can read, shared by `gpuhub node` and the service for guests."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from gpuhub.common.errors import Conflict, SetupError
from gpuhub.common.files import replace_file
from gpuhub.common.paths import Paths

#: How long an invitation may be used, seconds.
INVITATION_S = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """An invited or joined machine."""

    #: Name of its node.
    name: str
    #: Its address in the tunnel.
    address: str
    #: Its WireGuard key; until it has joined, that of the invitation.
    public_key: str
    #: When the invitation ends, seconds since 1970; None once it was used.
    expires_at: float | None
    #: The largest packet through the tunnel, bytes; 0 until it has joined.
    mtu: int = 0
    #: Whether its owner has paused it, and the broker knows that.
    is_paused: bool = False

    @property
    def has_joined(self) -> bool:
        return self.expires_at is None

    def is_valid(self, now: float) -> bool:
        """Return whether it may use the tunnel."""
        return self.expires_at is None or now < self.expires_at


class GuestRegistry:
    """The file with all guests; every change locks it."""

    def __init__(self, paths: Paths) -> None:
        self.file = paths.secrets / "guests.json"

    def read(self) -> dict[str, Guest]:
        """Return all guests by name.

        Raises:
            SetupError: The file cannot be understood.
        """
        try:
            text = self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        try:
            return {raw["name"]: _parse_guest(raw) for raw in json.loads(text)}
        except (ValueError, TypeError, KeyError) as error:
            raise SetupError(
                f"{self.file} cannot be understood ({error}): restore it, or remove it and invite again"
            ) from None

    def change(self, edit: Callable[[dict[str, Guest]], None]) -> None:
        """Edit the guests by name, and write them in one step."""
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            guests = self.read()
            edit(guests)
            replace_file(self.file, json.dumps([asdict(guest) for guest in guests.values()], indent=1))
        finally:
            os.close(lock)

    def put(self, guest: Guest) -> None:
        self.change(lambda guests: guests.update({guest.name: guest}))

    def update(self, name: str, **changes: Any) -> None:
        """Change a guest, unless it is gone."""

        def edit(guests: dict[str, Guest]) -> None:
            if name in guests:
                guests[name] = replace(guests[name], **changes)

        self.change(edit)

    def remove(self, name: str) -> None:
        def edit(guests: dict[str, Guest]) -> None:
            guests.pop(name, None)

        self.change(edit)


def choose_address(network: ipaddress.IPv4Network, used: Iterable[str]) -> str:
    """Return a free address in the tunnel; the first one is the head node's.

    Raises:
        Conflict: All are in use.
    """
    taken = {*used, str(network.network_address + 1)}
    for address in network.hosts():
        if str(address) not in taken:
            return str(address)
    raise Conflict(f"guests.subnet: {network} has no free address: remove a guest, or choose a larger network")


def _parse_guest(raw: Mapping[str, Any]) -> Guest:
    known = {field.name for field in fields(Guest)}
    return Guest(**{name: value for name, value in raw.items() if name in known})
