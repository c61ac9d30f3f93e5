"""The MTU of users' networks: from the settings, or from the head node's routes to the nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.config.settings import ClusterSettings

#: Size of VXLAN's header in each packet, bytes.
VXLAN_OVERHEAD = 50
#: Smallest MTU of an IPv4 network, which containers need, bytes.
MIN_MTU = 576
#: Ethernet's MTU, bytes. A larger one needs a setting, because this machine cannot see the interfaces of other machines
#: or the switches on the route.
ETHERNET_MTU = 1500
_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The route from this machine to an address."""

    address: str
    interface: str
    #: Bytes; None where the kernel does not report it.
    mtu: int | None


def find_mtu(cluster: ClusterSettings) -> int:
    """Return the MTU of the nodes' own network, from the settings or else from the kernel. Blocks.

    Raises:
        SetupError: It is too small for users' networks.
    """
    if cluster.network.mtu != "auto":
        return cluster.network.mtu
    return choose_mtu([route for node in cluster.nodes if (route := read_route(node.address)) is not None])


def choose_mtu(routes: Iterable[Route]) -> int:
    """Return the smallest MTU of the routes that leave this machine, or Ethernet's if there are none.

    Raises:
        SetupError: An overlay network on top would be too small; the text names the interface.
    """
    outward = [(route.mtu, route) for route in routes if route.interface != "lo" and route.mtu is not None]
    if not outward:
        return ETHERNET_MTU
    mtu, route = min(outward, key=lambda each: each[0])
    if mtu < MIN_MTU + VXLAN_OVERHEAD:
        raise SetupError(
            f"the route to {route.address} over {route.interface} has an MTU of {mtu} bytes, and users' networks need "
            f"{MIN_MTU + VXLAN_OVERHEAD} at least: raise it there, or set network.mtu in cluster.toml"
        )
    return min(mtu, ETHERNET_MTU)


def read_route(address: str) -> Route | None:
    """Return this machine's route to an address, or None if it is unknown."""
    try:
        done = subprocess.run(
            ["ip", "-json", "route", "get", address], capture_output=True, check=True, timeout=_DEADLINE_S
        )
        return parse_route(address, done.stdout, Path("/sys/class/net"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def parse_route(address: str, text: bytes, interfaces: Path) -> Route | None:
    """Parse the output of `ip -json route get`, such as
    `[{"dst": "10.0.0.7", "dev": "wg0", "metrics": [{"mtu": 1400}]}]`.

    Args:
        interfaces: Folder with the interfaces' own MTUs, laid out like `/sys/class/net`.
    """
    entry = next(iter(json.loads(text)), None)
    if not isinstance(entry, dict) or "dev" not in entry:
        return None
    interface = "lo" if entry.get("type") == "local" else str(entry["dev"])
    mtus = [int(metric["mtu"]) for metric in entry.get("metrics", ()) if "mtu" in metric]
    mtu_file = interfaces / interface / "mtu"
    if mtu_file.exists():
        mtus.append(int(mtu_file.read_text(encoding="ascii")))
    return Route(address=address, interface=interface, mtu=min(mtus, default=None))
