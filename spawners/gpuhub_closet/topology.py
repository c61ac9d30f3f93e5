"""The parts of a practice closet: nodes, GPUs, addresses and names, the same on every run of an instance."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuhub.common.errors import SettingsError
from gpuhub.common.gpu import GpuSpec

#: Interface names hold 15 characters: an instance of 8, a dash, and a node of 6.
MAX_NODE_NAME = 6
#: Nodes get the addresses .11, .12 … of the subnet; the head is .1.
FIRST_NODE_OFFSET = 11
#: Each node has its own /16 for its local bridges, 172.21.0.0/16 to 172.30.0.0/16.
MAX_NODES = 10
FIRST_POOL = 21
#: Ends the model of a simulated GPU where a real GPU has the same one: profiles choose by the model.
SIMULATED = " simulated"

_SUBNETS = {"gpuhub": "10.77.0.0/24", "ghtest": "10.87.0.0/24"}
_POWER_LIMITS_W = {"RTX 5090": 575, "RTX 5070": 250, "RTX 5060": 145, "A100-SXM4-80GB": 400}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMigDevice:
    """A MIG device of a simulated GPU."""

    #: NVIDIA's name: slices and memory, for example `1g.10gb`.
    profile: str
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGpu:
    """A simulated GPU."""

    #: The product name, for example `RTX 5090`.
    model: str
    memory_mib: int
    #: CUDA compute capability.
    capability: tuple[int, int] = (12, 0)
    #: The MIG devices of a GPU in MIG mode, at most 7; empty without MIG mode.
    mig_devices: tuple[SimulatedMigDevice, ...] = ()

    @property
    def name(self) -> str:
        """The name in NVIDIA's library, for example `NVIDIA GeForce RTX 5090`."""
        return f"NVIDIA {'GeForce ' if self.model.startswith('RTX 50') else ''}{self.model}"

    @property
    def grantable_gpus(self) -> tuple[SimulatedGpu, ...]:
        """The units of a lease: the GPU itself, or its MIG devices, named as in NVIDIA's library."""
        return tuple(
            SimulatedGpu(
                model=f"{self.model} MIG {part.profile}", memory_mib=part.memory_mib, capability=self.capability
            )
            for part in self.mig_devices
        ) or (self,)

    @property
    def power_limit_w(self) -> int:
        """Watts."""
        return _POWER_LIMITS_W.get(self.model.removesuffix(SIMULATED), 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosetNode:
    """A simulated machine: a network namespace with its own Docker daemon."""

    name: str
    gpus: tuple[SimulatedGpu, ...]
    address: ipaddress.IPv4Address
    #: This machine's own GPUs, which the node has in place of simulated ones; usually none.
    real_gpus: tuple[GpuSpec, ...] = ()

    @property
    def grantable_gpus(self) -> tuple[SimulatedGpu | GpuSpec, ...]:
        """The units of a lease."""
        return self.real_gpus or tuple(unit for gpu in self.gpus for unit in gpu.grantable_gpus)

    @property
    def whole_gpus(self) -> tuple[SimulatedGpu | GpuSpec, ...]:
        """The GPUs without MIG mode."""
        return self.real_gpus or tuple(gpu for gpu in self.gpus if not gpu.mig_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """The speed of each node's network link."""

    rate_mbit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosetPlan:
    """A whole practice closet: its nodes, GPUs, addresses and names."""

    instance: str
    subnet: ipaddress.IPv4Network
    nodes: tuple[ClosetNode, ...]
    #: None for links without a limit.
    link: NodeLink | None = NodeLink(rate_mbit=2500)

    def __post_init__(self) -> None:
        _check_nodes(self)

    @property
    def head(self) -> ipaddress.IPv4Address:
        """The head node's address: that of this machine on the closet's bridge."""
        return self.subnet.network_address + 1

    @property
    def bridge(self) -> str:
        """The name of the bridge that connects the nodes."""
        return f"{self.instance}-br"

    def netns_name(self, node: ClosetNode) -> str:
        """Return the name of a node's network namespace, and of its link's end on the bridge."""
        return f"{self.instance}-{node.name}"

    def node(self, name: str) -> ClosetNode:
        """Return the node of that name.

        Raises:
            SettingsError: There is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        names = ", ".join(node.name for node in self.nodes)
        raise SettingsError(f"closet node {name!r} does not exist; there are: {names}")

    def bridge_pool(self, node: ClosetNode) -> ipaddress.IPv4Network:
        """Return the range of addresses of the local bridges of the node's Docker."""
        return ipaddress.IPv4Network(f"172.{FIRST_POOL + self.nodes.index(node)}.0.0/16")

    def gpu_uuids(self, node: ClosetNode) -> tuple[str, ...]:
        """Return the UUIDs of the node's GPUs, by index."""
        return tuple(gpu_uuid(self.instance, node.name, index) for index in range(len(node.gpus)))


def gpu_uuid(instance: str, node: str, index: int) -> str:
    """Return a GPU's UUID in NVIDIA's form `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, always the same."""
    return f"GPU-{_uuid(f'{instance}/{node}/{index}')}"


def mig_uuid(gpu: str, slot: int) -> str:
    """Return the UUID of a MIG device of the GPU with that UUID, always the same."""
    return f"MIG-{_uuid(f'{gpu}/{slot}')}"


def _uuid(text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


def build_subnet(instance: str) -> ipaddress.IPv4Network:
    """Return the closet's subnet: fixed for the two usual instances, for others derived from the name."""
    if instance in _SUBNETS:
        return ipaddress.IPv4Network(_SUBNETS[instance])
    first, second = hashlib.sha256(instance.encode()).digest()[:2]
    return ipaddress.IPv4Network(f"10.{64 + first % 192}.{1 + second % 255}.0/24")


def build_nodes(subnet: ipaddress.IPv4Network, gpus: Mapping[str, tuple[SimulatedGpu, ...]]) -> tuple[ClosetNode, ...]:
    """Return nodes with these names and GPUs, and addresses from .11 upwards."""

    def nodes() -> Iterator[ClosetNode]:
        for offset, (name, node_gpus) in enumerate(gpus.items(), start=FIRST_NODE_OFFSET):
            yield ClosetNode(name=name, gpus=node_gpus, address=subnet.network_address + offset)

    return tuple(nodes())


def _check_nodes(plan: ClosetPlan) -> None:
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
