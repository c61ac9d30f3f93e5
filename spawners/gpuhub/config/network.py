"""`[network]` in cluster.toml: users' private networks, and what their containers may reach."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import Field, field_validator

from gpuhub.config.base import ListOf, SettingsTable


class NetworkSettings(SettingsTable):
    """Networks and packet filter of users' containers."""

    #: `overlay`: one private network for each user over all nodes, by Docker Swarm; `bridge`: one on a single node;
    #: `auto`: `overlay` with more than one node.
    kind: Literal["auto", "overlay", "bridge"] = "auto"
    #: Private network from which each user's overlay gets a /24 subnet; /22 or larger.
    overlay_pool: str = "10.201.0.0/16"
    #: MTU of the network between the nodes, bytes; `auto`: that of the head node's routes to the nodes. Overlays get 50
    #: bytes less, for VXLAN's header.
    mtu: Literal["auto"] | Annotated[int, Field(ge=576, le=9216)] = "auto"
    #: Firewall on every node for users' containers: they reach hub and broker, the containers of the same user, and
    #: what `egress` allows; only the head node reaches their published ports.
    guard: bool = True
    #: Addresses outside that containers may reach. `internet`: all but private addresses; `open`: all but the nodes
    #: themselves and cloud metadata; `none`: nothing.
    egress: Literal["internet", "open", "none"] = "internet"
    #: Further addresses or networks that containers may reach, such as a licence server; never a node.
    reach: ListOf[str] = ()

    @field_validator("reach")
    @classmethod
    def _reach(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(
                    f'{text!r} is not an address or network: {error}; write one like "192.168.1.50"'
                ) from None
        return value

    @field_validator("overlay_pool")
    @classmethod
    def _pool(cls, value: str) -> str:
        try:
            network = ipaddress.ip_network(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is not a network: {error}") from None
        if not network.is_private or network.prefixlen > 22:
            raise ValueError(f'{value!r}: a private network of /22 or larger is needed, such as "10.201.0.0/16"')
        return value
