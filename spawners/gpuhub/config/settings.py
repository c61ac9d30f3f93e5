"""The whole of cluster.toml as frozen, validated values, and its reader.

`load(path)` returns `ClusterSettings` or raises `SettingsError` with one line for each mistake: the key, what is wrong
with its value, and what to write instead. Every key is explained in `cluster.example.toml`.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Protocol, Self, cast

from pydantic import AfterValidator, StringConstraints, ValidationError, model_validator

from gpuhub.common import gpu
from gpuhub.common.errors import SettingsError
from gpuhub.config.backends import check_backend, find_backends
from gpuhub.config.base import ListOf, SettingsTable, describe_mistakes
from gpuhub.config.containers.idle import IdleSettings, find_idle_mistakes
from gpuhub.config.containers.images import ImageSettings
from gpuhub.config.containers.jobs import JobSettings
from gpuhub.config.containers.profiles import ProfileSettings, unsatisfiable_profiles
from gpuhub.config.containers.services import ServiceSettings, find_service_mistakes
from gpuhub.config.costs import CostSettings, find_cost_mistakes
from gpuhub.config.database import DatabaseSettings
from gpuhub.config.machines.circuits import CircuitSettings, find_circuit_mistakes
from gpuhub.config.machines.data_network import find_data_address_mistakes, find_data_network_mistakes
from gpuhub.config.machines.guests import GuestSettings, find_guest_mistakes
from gpuhub.config.machines.network import HubSettings, NetworkSettings
from gpuhub.config.machines.nodes import DockerTlsFiles, ExpectedGpus, NodeSettings
from gpuhub.config.machines.power import LOCAL_SOCKETS, PowerSettings, find_power_mistakes
from gpuhub.config.machines.storage import StorageSettings, serve_from
from gpuhub.config.monitoring import MonitoringSettings, find_port_mistakes
from gpuhub.config.notifications import NotificationSettings
from gpuhub.config.own_address import find_own_address, find_source_address
from gpuhub.config.slurm import SlurmSettings
from gpuhub.config.users.login_keys import LoginSettings, explain_unknown_group, find_login_mistakes
from gpuhub.config.users.users import GroupSettings, LimitSettings, SchedulingSettings, UserSettings

#: Managers of the Swarm where there are enough nodes.
_SWARM_MANAGERS = 3

__all__ = [
    "CircuitSettings",
    "ClusterSettings",
    "CostSettings",
    "DatabaseSettings",
    "DockerTlsFiles",
    "ExpectedGpus",
    "GroupSettings",
    "HubSettings",
    "IdleSettings",
    "ImageSettings",
    "JobSettings",
    "LimitSettings",
    "LoginSettings",
    "MonitoringSettings",
    "NetworkSettings",
    "NodeSettings",
    "NotificationSettings",
    "PowerSettings",
    "ProfileSettings",
    "SchedulingSettings",
    "ServiceSettings",
    "SlurmSettings",
    "StorageSettings",
    "UserSettings",
    "load",
]


class ClusterSettings(SettingsTable):
    """All tables and top-level keys of cluster.toml."""

    nodes: ListOf[NodeSettings]
    circuits: ListOf[CircuitSettings] = ()
    profiles: ListOf[ProfileSettings]
    users: UserSettings
    login: LoginSettings = LoginSettings()
    groups: ListOf[GroupSettings] = ()
    scheduling: SchedulingSettings = SchedulingSettings()
    storage: StorageSettings = StorageSettings()
    network: NetworkSettings = NetworkSettings()
    jobs: JobSettings = JobSettings()
    idle: IdleSettings = IdleSettings()
    costs: CostSettings = CostSettings()
    hub: HubSettings = HubSettings()
    guests: GuestSettings = GuestSettings()
    power: PowerSettings = PowerSettings()
    monitoring: MonitoringSettings = MonitoringSettings()
    notifications: NotificationSettings = NotificationSettings()
    database: DatabaseSettings = DatabaseSettings()
    images: ImageSettings = ImageSettings()
    services: ListOf[ServiceSettings] = ()
    #: Scheduling backend that assigns GPUs: `builtin` is gpuhub's own, `slurm` the Slurm cluster that the nodes belong
    #: to.
    engine: Annotated[str, AfterValidator(check_backend)] = "builtin"
    slurm: SlurmSettings = SlurmSettings()
    #: Notice on the spawn form and in the output of `make up`, such as "simulated GPUs: training runs on the CPU".
    notice: Annotated[str, StringConstraints(max_length=300)] = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mistakes = [
            *(f"{key}: is empty; at least one is needed" for key in ("nodes", "profiles") if not getattr(self, key)),
            *_duplicates("nodes", "name", [node.name for node in self.nodes]),
            *_duplicates("nodes", "address", [node.address for node in self.nodes]),
            *find_data_address_mistakes(self.nodes, self.own_nodes),
            *find_data_network_mistakes(
                self.network, self.own_nodes if self.has_overlay else (), machines=self._machine_addresses
            ),
            *_duplicates("nodes", "docker", [node.docker for node in self.nodes if node.docker]),
            *_duplicates("circuits", "name", [circuit.name for circuit in self.circuits]),
            *find_circuit_mistakes(self.circuits, self.base_watts),
            *_duplicates("profiles", "name", [profile.name for profile in self.profiles]),
            *_duplicates("groups", "name", [group.name for group in self.groups]),
            *_duplicates("services", "name", [service.name for service in self.services]),
            *find_service_mistakes(self.services, self.nodes, self.storage),
            *_unsatisfiable(self),
            *_find_backend_mistakes(self),
            *find_login_mistakes(self.users, self.login),
            *_find_group_mistakes(self),
            *_find_owner_mistakes(self),
            *_find_preemption_mistakes(self),
            *find_port_mistakes(self.monitoring, self.hub),
            *find_idle_mistakes(self.idle, [(profile.name, profile.idle) for profile in self.profiles]),
            *_find_staging_mistakes(self),
            *_find_overlay_mistakes(self),
            *find_guest_mistakes(self.guests, self.nodes, is_builtin=self.engine == "builtin"),
            *find_cost_mistakes(self.costs, [profile.name for profile in self.profiles]),
            *find_power_mistakes(
                self.power,
                self.nodes,
                self.storage,
                is_builtin=self.engine == "builtin",
                swarm_manager=next(
                    (node.name for node in self.swarm_managers if self.has_overlay and node.docker), None
                ),
            ),
        ]
        if self.network.kind == "bridge" and len(self.own_nodes) > 1:
            mistakes.append(
                f'network.kind = "bridge" joins one node only, and there are {len(self.own_nodes)}: use "overlay"'
            )
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    @property
    def own_nodes(self) -> tuple[NodeSettings, ...]:
        """The nodes that are not guests: only these have homes, datasets and users' networks."""
        return tuple(node for node in self.nodes if not node.guest)

    def without_guests(self) -> ClusterSettings:
        """Return the settings with the closet's own nodes alone."""
        return self.model_copy(update={"nodes": self.own_nodes})

    @property
    def base_watts(self) -> Mapping[str, float]:
        """What each node draws without its GPUs, watts; guests are elsewhere."""
        return {node.name: node.base_watts for node in self.own_nodes}

    @property
    def enforced_circuits(self) -> tuple[CircuitSettings, ...]:
        """The circuits whose power limits what is granted; none where another scheduler than gpuhub's grants."""
        return tuple(circuit for circuit in self.circuits if circuit.enforce and self.engine == "builtin")

    def find_power(self, name: str) -> PowerSettings | None:
        """Return how the node of that name is switched on and off; None where it stays on."""
        own = self.node(name).power
        return None if own is None else own.merge(self.power)

    @property
    def power_nodes(self) -> tuple[NodeSettings, ...]:
        """The nodes that may sleep."""
        return tuple(node for node in self.nodes if node.power is not None)

    @property
    def has_overlay(self) -> bool:
        """True where users' networks span nodes."""
        return self.network.kind == "overlay" or (self.network.kind == "auto" and len(self.own_nodes) > 1)

    @property
    def swarm_managers(self) -> tuple[NodeSettings, ...]:
        """The nodes that keep users' networks: the head node if it is one, else the first three that never sleep.

        Without its head node a cluster starts nothing, so no other node need be on for its networks. Of three managers
        of a Swarm one may be away; of two, both are needed, so that of fewer than three nodes one manages it.
        """
        steady = [node for node in self.own_nodes if node.docker and node.power is None] or self.own_nodes
        if not self.has_overlay or len(steady) < _SWARM_MANAGERS:
            return tuple(steady[:1])
        head = [node for node in steady if node.docker in LOCAL_SOCKETS]
        return tuple(head[:1] or steady[:_SWARM_MANAGERS])

    @property
    def has_encrypted_overlay(self) -> bool:
        """True where users' networks span nodes and are encrypted between them."""
        return self.has_overlay and self.network.encrypt

    @property
    def _machine_addresses(self) -> set[str]:
        head = set() if self.hub.address is None else {self.hub.address}
        return head.union(*({node.address, node.rank_address} for node in self.nodes))

    @property
    def has_data_network(self) -> bool:
        """True where ranks on several nodes use the nodes' own network cards instead of overlays."""
        return self.has_overlay and any(node.data_interface for node in self.own_nodes)

    @property
    def has_internal_tls(self) -> bool:
        """True where proxy, hub, broker and notebooks use TLS among each other."""
        return len(self.nodes) > 1 if self.hub.internal_tls == "auto" else self.hub.internal_tls

    @property
    def stops_idle_notebooks(self) -> bool:
        """True where notebooks of some profile are stopped while they do not use their GPUs."""
        return any(profile.gpu_count and profile.idle.merge(self.idle).is_on for profile in self.profiles)

    @property
    def suspends_idle_notebooks(self) -> bool:
        """True where notebooks of some profile lend their GPU while they are idle."""
        return any(profile.gpu_count and profile.idle.merge(self.idle).suspend_after for profile in self.profiles)

    @property
    def moves_gpu_memory(self) -> bool:
        """Whether notebooks or jobs are suspended for others."""
        return self.suspends_idle_notebooks or self.scheduling.suspend_scavengers

    @property
    def node_groups(self) -> frozenset[str]:
        """The groups that some node is restricted to."""
        return frozenset(group for node in self.nodes for group in node.access_groups)

    @property
    def access_groups(self) -> frozenset[str]:
        """The groups that some node or profile is restricted to."""
        return self.node_groups.union(*(profile.groups for profile in self.profiles))

    @property
    def service_groups(self) -> frozenset[str]:
        """The groups that some service is restricted to."""
        return frozenset(group for service in self.services for group in service.groups)

    def service(self, name: str) -> ServiceSettings | None:
        """Return the service of that name, or None."""
        return next((service for service in self.services if service.name == name), None)

    def node(self, name: str) -> NodeSettings:
        """Return the node of that name.

        Raises:
            KeyError: the node does not exist.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def counts_machines(self) -> bool:
        """Whether gpuhub counts the CPU and memory of nodes; Slurm counts them itself."""
        return self.engine == "builtin"

    def profile(self, name: str) -> ProfileSettings | None:
        """Return the profile of that name, or None."""
        return next((profile for profile in self.profiles if profile.name == name), None)


def load(path: Path) -> ClusterSettings:
    """Read and check a cluster.toml.

    Raises:
        SettingsError: with one line for each mistake.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file; start from cluster.example.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None
    try:
        cluster = ClusterSettings.model_validate(raw)
    except ValidationError as error:
        lines = describe_mistakes(error, ClusterSettings)
        raise SettingsError("\n".join(f"{path}: {line}" for line in lines)) from None
    for node in cluster.power_nodes:
        if find_source_address(node.address) == node.address:
            raise SettingsError(
                f"{path}: nodes: {node.name!r}: power: {node.address} is this machine, the head node, which has to "
                "stay on: remove it"
            )
    if not cluster.storage.serve:
        return cluster
    address = cluster.hub.address or find_own_address(node.address for node in cluster.own_nodes)
    if address is None:
        raise SettingsError(f"{path}: storage.serve: this machine has no address for nodes: set hub.address")
    return cluster.model_copy(update={"storage": serve_from(cluster.storage, address)})


class _SettingsCheck(Protocol):
    """What an entry point of the group does for the settings; see `gpuhub.backends.plugin.BackendPlugin`."""

    def check_settings(self, cluster: ClusterSettings) -> Iterable[str]:
        """Return one line for each key that does not go with the backend."""
        ...


def _find_backend_mistakes(cluster: ClusterSettings) -> Iterable[str]:
    """Return one line for each key that does not go with the cluster's backend."""
    plugin = cast("_SettingsCheck", find_backends()[cluster.engine].load())
    return plugin.check_settings(cluster)


def _duplicates(table: str, key: str, values: list[str]) -> list[str]:
    return [
        f"{table}: {key} = {value!r} occurs {count} times; each needs its own"
        for value, count in Counter(values).items()
        if count > 1
    ]


def _find_overlay_mistakes(cluster: ClusterSettings) -> Iterable[str]:
    """Return one line for each IPv6 address of a node whose containers use overlays."""
    if not cluster.has_overlay or (cluster.engine == "slurm" and cluster.slurm.runtime != "docker"):
        return
    for node in cluster.own_nodes:
        for address in sorted({node.address, node.rank_address}):
            if ":" in address:
                yield (
                    f"nodes: {node.name!r}: {address!r} is an IPv6 address, and users' networks between nodes work "
                    "over IPv4 only: give the node's IPv4 address"
                )


def _find_group_mistakes(cluster: ClusterSettings) -> Iterable[str]:
    """Return one line for each group of a profile, node or service of which nobody could be a member."""
    members = {group.name: group.members for group in cluster.groups}
    tables: tuple[tuple[str, Iterable[NodeSettings | ProfileSettings | ServiceSettings]], ...] = (
        ("nodes", cluster.nodes),
        ("profiles", cluster.profiles),
        ("services", cluster.services),
    )
    for table, entries in tables:
        for entry in entries:
            for group in entry.groups:
                reason = explain_unknown_group(cluster.users.login, cluster.login, group)
                if reason is not None and not members.get(group):
                    yield (
                        f"{table}: {entry.name!r}: groups: {group!r} {reason}; or list the group's members in a "
                        "[[groups]] table of that name"
                    )


def _find_owner_mistakes(cluster: ClusterSettings) -> Iterable[str]:
    """Return one line for each node that is its owner's first and lacks what that needs."""
    for node in cluster.nodes:
        if not node.owner_first:
            continue
        if node.owner is None:
            yield f'nodes: {node.name!r}: owner_first: whose? Add owner = "NAME"'
        if cluster.engine == "builtin" and not cluster.scheduling.preemption:
            yield (
                f"nodes: {node.name!r}: owner_first: others' scavenging jobs are preempted only with preemption = true "
                "in [scheduling]: add it"
            )


def _find_preemption_mistakes(cluster: ClusterSettings) -> Iterable[str]:
    """Return one line if jobs shall be suspended in place of a preemption that is off."""
    if cluster.scheduling.suspend_scavengers and cluster.engine == "builtin" and not cluster.scheduling.preemption:
        yield "scheduling: suspend_scavengers = true is for jobs that are preempted: add preemption = true"


def _find_staging_mistakes(cluster: ClusterSettings) -> Iterable[str]:
    """Return one line for each profile that stages datasets where there are none."""
    if cluster.storage.datasets is None:
        for profile in cluster.profiles:
            if profile.stage:
                yield (f"profiles: {profile.name!r}: stage: copies are made of storage.datasets, which is not set")


def _unsatisfiable(cluster: ClusterSettings) -> list[str]:
    """Return one line for each profile that no node could serve, if every node lists its GPUs."""
    if any(node.gpus is None for node in cluster.nodes):
        return []
    cards = {
        node.name: [
            gpu.GpuSpec(model=gpu.shorten_model(card.model), memory_mib=card.memory // 1024**2)
            for card in node.gpus or ()
            for _ in range(card.count)
        ]
        for node in cluster.nodes
    }
    return unsatisfiable_profiles(cluster.profiles, cards)
