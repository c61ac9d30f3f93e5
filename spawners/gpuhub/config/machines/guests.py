"""`[guests]` in cluster.toml: the WireGuard interface through which lent machines join over the internet."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import StringConstraints, field_validator

from gpuhub.config.base import Port, SettingsTable, private_network
from gpuhub.config.machines.nodes import NodeSettings

#: Guests' sshd, on the WireGuard address alone.
SSH_PORT = 8022
#: The account on guests with which the head node reaches Docker's socket, and nothing else.
SSH_USER = "gpuhub-guest"


class GuestSettings(SettingsTable):
    """Where guests' machines reach the head node, and their addresses there."""

    #: Name or address, and UDP port, at which the internet reaches this head node's WireGuard, such as
    #: "home.example.org:51820"; the router forwards this port. None: no guests.
    endpoint: Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9.-]+|\[[0-9a-f:]+\]):[0-9]{1,5}$")] | None = None
    #: UDP port of WireGuard on the head node.
    port: Port = 51820
    #: Private network of the guests and the head node, which has its first address; /16 to /29.
    subnet: Annotated[str, private_network("10.213.77.0/24", range(16, 30))] = "10.213.77.0/24"
    #: TCP port at which the head node answers guests, inside the tunnel only.
    service_port: Port = 8012

    @field_validator("endpoint")
    @classmethod
    def _endpoint(cls, value: str | None) -> str | None:
        if value is not None and not 0 < int(value.rpartition(":")[2]) < 65536:
            raise ValueError(f'{value!r} has no valid port: write one such as "home.example.org:51820"')
        return value

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(self.subnet)

    @property
    def head_address(self) -> str:
        """The head node's address in the tunnel."""
        return str(self.network.network_address + 1)


def find_guest_mistakes(guests: GuestSettings, nodes: Sequence[NodeSettings], *, is_builtin: bool) -> Iterable[str]:
    """Return one line for each guest that does not go with the other settings."""
    names = [node.name for node in nodes if node.guest]
    if names and len(names) == len(nodes):
        yield "nodes: all are guests, and homes need a node of your own: add one"
    if names and not is_builtin:
        yield f'nodes: {names[0]!r}: guest = true needs engine = "builtin": Slurm has no lent machines'
    if names and guests.endpoint is None:
        yield (
            f"nodes: {names[0]!r}: guest = true needs endpoint in [guests], where the internet reaches this machine, "
            'such as "home.example.org:51820"'
        )
    for node in nodes:
        if node.guest and ipaddress.ip_address(node.address) not in guests.network:
            yield f"nodes: {node.name!r}: guest = true needs an address in guests.subnet, {guests.subnet}"
