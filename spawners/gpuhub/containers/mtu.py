"""The MTU of users' networks: from the settings, or from the head node's ways to the nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuhub.errors import SetupError
from gpuhub.settings import Cluster

#: What VXLAN's header takes from each packet, bytes.
VXLAN_HEADER = 50
#: What every IPv4 network carries, and containers need, bytes.
LEAST = 576
#: Ethernet's. More is used only where the settings say that the whole way carries it: of other machines' interfaces and
#: of switches nothing is known here.
USUAL = 1500
_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How this machine reaches an address."""

    address: str
    interface: str
    #: Bytes; None where the kernel does not tell.
    mtu: int | None


def find_mtu(cluster: Cluster) -> int:
    """The MTU of the nodes' own network; asks the kernel where the settings leave it open; blocks.

    Raises:
        SetupError: it is too small for users' networks.
    """
    if cluster.network.mtu != "auto":
        return cluster.network.mtu
    return choose_mtu([way for node in cluster.nodes if (way := read_way(node.address)) is not None])


def choose_mtu(ways: Iterable[Way]) -> int:
    """The smallest MTU of the ways that leave this machine; that of Ethernet where there are none. Pure.

    Raises:
        SetupError: an overlay above would be too small; with the interface.
    """
    outward = [(way.mtu, way) for way in ways if way.interface != "lo" and way.mtu is not None]
    if not outward:
        return USUAL
    mtu, way = min(outward, key=lambda each: each[0])
    if mtu < LEAST + VXLAN_HEADER:
        raise SetupError(
            f"the way to {way.address} over {way.interface} has an MTU of {mtu} bytes, and users' networks need "
            f"{LEAST + VXLAN_HEADER} at least: raise it there, or set network.mtu in cluster.toml"
        )
    return min(mtu, USUAL)


def read_way(address: str) -> Way | None:
    """How this machine reaches an address; None where it does not, or nobody can tell."""
    try:
        asked = subprocess.run(
            ["ip", "-json", "route", "get", address], capture_output=True, check=True, timeout=_DEADLINE_S
        )
        return parse_way(address, asked.stdout, Path("/sys/class/net"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def parse_way(address: str, text: bytes, interfaces: Path) -> Way | None:
    """What `ip -json route get` says, such as `[{"dst": "10.0.0.7", "dev": "wg0", "metrics": [{"mtu": 1400}]}]`; the
    interface's own MTU stands in `interfaces`, as in `/sys/class/net`.
    """
    found = next(iter(json.loads(text)), None)
    if not isinstance(found, dict) or "dev" not in found:
        return None
    interface = "lo" if found.get("type") == "local" else str(found["dev"])
    told = [int(metric["mtu"]) for metric in found.get("metrics", ()) if "mtu" in metric]
    own = interfaces / interface / "mtu"
    if own.exists():
        told.append(int(own.read_text(encoding="ascii")))
    return Way(address=address, interface=interface, mtu=min(told, default=None))
