"""cluster.toml as frozen, validated values: the only reader of settings.

`load(path)` returns a `Cluster` or raises `SettingsError` with one line a mistake: the key, what is wrong with
its value, and what would be right. Every key is explained in `cluster.example.toml`.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import StringConstraints, ValidationError, model_validator

from gpuhub import gpus, logins
from gpuhub.errors import SettingsError
from gpuhub.mistakes import describe_mistakes
from gpuhub.policy import Allowance, Group, Scheduling, Users
from gpuhub.slurm import rules
from gpuhub.slurm.table import Slurm
from gpuhub.tables import (
    CardCount,
    Hub,
    Images,
    Jobs,
    Login,
    Many,
    Network,
    Node,
    Profile,
    Storage,
    Tls,
    Value,
)

__all__ = [
    "Allowance",
    "CardCount",
    "Cluster",
    "Group",
    "Hub",
    "Images",
    "Jobs",
    "Login",
    "Network",
    "Node",
    "Profile",
    "Scheduling",
    "Slurm",
    "Storage",
    "Tls",
    "Users",
    "gpu_requirement",
    "load",
    "unsatisfiable_profiles",
]


class Cluster(Value):
    """The whole of cluster.toml."""

    nodes: Many[Node]
    profiles: Many[Profile]
    users: Users
    login: Login = Login()
    groups: Many[Group] = ()
    scheduling: Scheduling = Scheduling()
    storage: Storage = Storage()
    network: Network = Network()
    jobs: Jobs = Jobs()
    hub: Hub = Hub()
    images: Images = Images()
    #: What decides who gets which GPU: gpuhub itself, or a Slurm cluster whose nodes these are.
    engine: Literal["builtin", "slurm"] = "builtin"
    slurm: Slurm = Slurm()
    #: Shown on the spawn form and by `make up`, such as "simulated GPUs: training runs on the CPU".
    notice: Annotated[str, StringConstraints(max_length=300)] = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        mistakes = [
            *(f"{key}: is empty; one at least is needed" for key in ("nodes", "profiles") if not getattr(self, key)),
            *_duplicates("nodes", "name", [node.name for node in self.nodes]),
            *_duplicates("nodes", "address", [node.address for node in self.nodes]),
            *_duplicates("nodes", "docker", [node.docker for node in self.nodes if node.docker]),
            *_duplicates("profiles", "name", [profile.name for profile in self.profiles]),
            *_duplicates("groups", "name", [group.name for group in self.groups]),
            *_duplicates("nodes", "slurm", [node.slurm_name for node in self.nodes if self.engine == "slurm"]),
            *_unsatisfiable(self),
            *rules.find_mistakes(self),
            *logins.mistakes(self.users, self.login),
        ]
        if self.network.kind == "bridge" and len(self.nodes) > 1:
            mistakes.append(
                f'network.kind = "bridge" joins one node only, and there are {len(self.nodes)}: use "overlay"'
            )
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    @property
    def has_overlay(self) -> bool:
        """Users' networks span nodes."""
        return self.network.kind == "overlay" or (self.network.kind == "auto" and len(self.nodes) > 1)

    @property
    def has_docker(self) -> bool:
        """Whether Docker runs on the nodes for gpuhub; without it their Slurm does all."""
        return self.engine == "builtin" or self.slurm.runtime == "docker"

    @property
    def has_internal_tls(self) -> bool:
        """Proxy, hub, broker and notebooks speak TLS to each other."""
        return len(self.nodes) > 1 if self.hub.internal_tls == "auto" else self.hub.internal_tls

    def node(self, name: str) -> Node:
        """The node of that name; KeyError when there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def profile(self, name: str) -> Profile | None:
        """The profile of that name, or None."""
        return next((profile for profile in self.profiles if profile.name == name), None)


def load(path: Path) -> Cluster:
    """Read and check a cluster.toml.

    Raises:
        SettingsError: with one line a mistake.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file; start from cluster.example.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None
    try:
        return Cluster.model_validate(raw)
    except ValidationError as error:
        lines = describe_mistakes(error, Cluster)
        raise SettingsError("\n".join(f"{path}: {line}" for line in lines)) from None


def gpu_requirement(profile: Profile) -> gpus.Requirement:
    """What a profile asks of each of its GPUs."""
    return gpus.Requirement(
        models=profile.models,
        least_memory_mib=profile.gpu_memory // 1024**2,
        least_driver=profile.gpu_driver,
        least_capability=None if profile.gpu_capability is None else gpus.parse_capability(profile.gpu_capability),
    )


def _duplicates(table: str, key: str, values: list[str]) -> list[str]:
    return [
        f"{table}: {key} = {value!r} stands {count} times; each needs its own"
        for value, count in Counter(values).items()
        if count > 1
    ]


def _unsatisfiable(cluster: Cluster) -> list[str]:
    """Profiles that no node could ever serve, where every node says what it has."""
    if any(node.gpus is None for node in cluster.nodes):
        return []
    cards = {
        node.name: [
            gpus.Card(model=gpus.short_model(card.model), memory_mib=card.memory // 1024**2)
            for card in node.gpus or ()
            for _ in range(card.count)
        ]
        for node in cluster.nodes
    }
    return unsatisfiable_profiles(cluster.profiles, cards)


def unsatisfiable_profiles(profiles: tuple[Profile, ...], cards: dict[str, list[gpus.Card]]) -> list[str]:
    """One line for each profile that none of the nodes (name → its cards) can ever satisfy."""
    return [
        f"profiles: {profile.name!r} wants {gpus.describe(profile.gpu_count, gpu_requirement(profile))} on one node, "
        f"and no node has that; there are: {gpus.describe_nodes(cards)}"
        for profile in profiles
        if profile.gpu_count
        and not any(
            sum(_known_part(gpu_requirement(profile)).accepts(card) for card in on_node) >= profile.gpu_count
            for on_node in cards.values()
        )
    ]


def _known_part(requirement: gpus.Requirement) -> gpus.Requirement:
    """What can be checked before a node was asked: the settings tell neither compute capabilities nor drivers."""
    return replace(requirement, least_capability=None, least_driver=None)
