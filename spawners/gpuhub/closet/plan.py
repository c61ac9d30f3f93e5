"""What a practice closet consists of: pure values, the same on every run for the same instance."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuhub.errors import SettingsError

#: Interface names hold 15 characters: an instance of 8, a dash, and a node of 6.
MAX_NODE_NAME = 6
#: Nodes get the addresses .11, .12 … of the subnet; the head is .1.
FIRST_NODE_OFFSET = 11
#: Each node has a /16 of its own for its local bridges, 172.21.0.0/16 to 172.30.0.0/16.
MAX_NODES = 10
FIRST_POOL = 21

_SUBNETS = {"gpuhub": "10.77.0.0/24", "ghtest": "10.87.0.0/24"}
_POWER_LIMIT_W = {"RTX 5090": 575, "RTX 5070": 250, "RTX 5060": 145}


@dataclass(frozen=True, slots=True, kw_only=True)
class MigPart:
    """A MIG device of a simulated card."""

    #: As NVIDIA names it: slices and memory, for example `1g.10gb`.
    profile: str
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A simulated graphics card."""

    #: As on the box, for example `RTX 5090`.
    model: str
    memory_mib: int
    #: CUDA compute capability.
    capability: tuple[int, int] = (12, 0)
    #: The MIG devices of a card in MIG mode, at most 7; empty for a card that is not.
    mig: tuple[MigPart, ...] = ()

    @property
    def name(self) -> str:
        """The name NVIDIA's library gives it, for example `NVIDIA GeForce RTX 5090`."""
        return f"NVIDIA {'GeForce ' if self.model.startswith('RTX 50') else ''}{self.model}"

    @property
    def given(self) -> tuple[Card, ...]:
        """What of it can be given: itself, or its MIG devices as NVIDIA's library names them."""
        return tuple(
            Card(model=f"{self.model} MIG {part.profile}", memory_mib=part.memory_mib, capability=self.capability)
            for part in self.mig
        ) or (self,)

    @property
    def power_limit_w(self) -> int:
        """The power limit in watts."""
        return _POWER_LIMIT_W.get(self.model, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosetNode:
    """A simulated machine: a network namespace with a Docker daemon of its own."""

    name: str
    cards: tuple[Card, ...]
    address: ipaddress.IPv4Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The speed of each node's network link; None as a plan's link means as fast as the machine can."""

    rate_mbit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole practice closet."""

    instance: str
    subnet: ipaddress.IPv4Network
    nodes: tuple[ClosetNode, ...]
    link: Link | None = Link(rate_mbit=2500)

    def __post_init__(self) -> None:
        _check_nodes(self)

    @property
    def head(self) -> ipaddress.IPv4Address:
        """The head node's address: this machine's, on the closet's bridge."""
        return self.subnet.network_address + 1

    @property
    def bridge(self) -> str:
        """The bridge on this machine that plays the switch."""
        return f"{self.instance}-br"

    def netns(self, node: ClosetNode) -> str:
        """The name of a node's network namespace; its link's end on the bridge is named the same."""
        return f"{self.instance}-{node.name}"

    def node(self, name: str) -> ClosetNode:
        """The node of that name; SettingsError when there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise SettingsError(f"closet node {name!r} does not exist; there are: {known}")

    def pool(self, node: ClosetNode) -> ipaddress.IPv4Network:
        """The addresses from which the node's Docker takes those of its local bridges."""
        return ipaddress.IPv4Network(f"172.{FIRST_POOL + self.nodes.index(node)}.0.0/16")

    def gpu_uuids(self, node: ClosetNode) -> tuple[str, ...]:
        """The UUIDs of the node's cards, by index."""
        return tuple(gpu_uuid(self.instance, node.name, index) for index in range(len(node.cards)))


def gpu_uuid(instance: str, node: str, index: int) -> str:
    """A card's UUID in NVIDIA's form `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, always the same for one card."""
    return f"GPU-{_uuid(f'{instance}/{node}/{index}')}"


def mig_uuid(gpu: str, slot: int) -> str:
    """The UUID of a MIG device of the card with that UUID, always the same."""
    return f"MIG-{_uuid(f'{gpu}/{slot}')}"


def _uuid(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


def build_subnet(instance: str) -> ipaddress.IPv4Network:
    """The closet's subnet: fixed for the two usual instances, drawn from 10.64–10.255 for others."""
    if instance in _SUBNETS:
        return ipaddress.IPv4Network(_SUBNETS[instance])
    first, second = hashlib.sha256(instance.encode()).digest()[:2]
    return ipaddress.IPv4Network(f"10.{64 + first % 192}.{1 + second % 255}.0/24")


def build_nodes(subnet: ipaddress.IPv4Network, cards: Mapping[str, tuple[Card, ...]]) -> tuple[ClosetNode, ...]:
    """Nodes of the given names and cards, with addresses from .11 upwards."""

    def nodes() -> Iterator[ClosetNode]:
        for offset, (name, held) in enumerate(cards.items(), start=FIRST_NODE_OFFSET):
            yield ClosetNode(name=name, cards=held, address=subnet.network_address + offset)

    return tuple(nodes())


def practice_plan(instance: str) -> Plan:
    """The closet one gets without asking: an RTX 5090, an RTX 5070 and an RTX 5060, one a node."""
    subnet = build_subnet(instance)
    cards = {
        "rig1": (Card(model="RTX 5090", memory_mib=32607),),
        "rig2": (Card(model="RTX 5070", memory_mib=12227),),
        "rig3": (Card(model="RTX 5060", memory_mib=8151),),
    }
    return Plan(instance=instance, subnet=subnet, nodes=build_nodes(subnet, cards))


def _check_nodes(plan: Plan) -> None:
    names = [node.name for node in plan.nodes]
    if not 1 <= len(names) <= MAX_NODES:
        raise SettingsError(f"a practice closet has 1 to {MAX_NODES} nodes, not {len(names)}")
    for name in names:
        if not (name.isascii() and name.isalnum() and name.islower() and len(name) <= MAX_NODE_NAME):
            raise SettingsError(
                f"closet node {name!r}: 1 to {MAX_NODE_NAME} lower-case letters and digits, a letter among them"
            )
        if names.count(name) > 1:
            raise SettingsError(f"closet node {name!r} is named twice")
