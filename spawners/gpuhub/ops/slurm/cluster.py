"""The Slurm that a cluster gets: its nodes from the machines' states, and its keys."""

from __future__ import annotations

import base64
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.ops.slurm.config_lines import SlurmNodeConfig, SlurmPartitionConfig
from gpuhub.ops.slurm.files import (
    JWT_KEY,
    MUNGE_KEY,
    SLURMDBD_CONF,
    ClusterSecrets,
    InstalledCluster,
    InstalledNode,
    parse_database_password,
)
from gpuhub.ops.slurm.machine_state import SlurmMachineState
from gpuhub.ops.slurm.machines import ScriptRunner
from gpuhub.ops.slurm.plan import REST_PLUGINS, UNVERSIONED_PLUGINS
from gpuhub.ops.slurm.power import find_slurm_power

#: Part of a node's memory that Slurm allocates, percent: a node that has less than its RealMemory is drained, and
#: kernels differ in what they reserve.
_MEMORY_PERCENT = 98
#: munge reads keys of 32 to 1024 bytes.
_MUNGE_KEY_BYTES = 1024
_JWT_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFeatures:
    """Options of the installed Slurm."""

    #: Name of the cluster in Slurm.
    name: str
    partition: str
    has_accounting: bool = False
    has_rest: bool = False
    #: gpuhub's program with its options, for Slurm's power saving; empty for none.
    power_command: tuple[str, ...] = ()


def find_models(cluster: ClusterSettings, agents: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the models of each node's GPUs in the driver's order: from its GPU agent, else from `gpus` of its table.

    Args:
        agents: The models that the agents read, by node; a node may be missing, or have none.

    Raises:
        SetupError: Nothing says which GPUs a node has.
    """
    models: dict[str, tuple[str, ...]] = {}
    unknown = []
    for node in cluster.nodes:
        if agents.get(node.name):
            models[node.name] = tuple(agents[node.name])
        elif node.gpus is not None:
            models[node.name] = tuple(gpus.model for gpus in node.gpus for _ in range(gpus.count))
        else:
            unknown.append(node.name)
    if unknown:
        raise SetupError(
            f"nothing says which GPUs {', '.join(unknown)} {'has' if len(unknown) == 1 else 'have'}: start gpuhub "
            "(`sudo make up`), whose agents read them, or write them in the order of nvidia-smi into the node's table "
            'of cluster.toml: gpus = [{model = "RTX 5090", memory = "32G", count = 2}] ([] for a node without any)'
        )
    return models


def build_cluster(
    features: SlurmFeatures,
    settings: ClusterSettings,
    head: tuple[SlurmMachineState, str],
    nodes: Sequence[tuple[NodeSettings, SlurmMachineState]],
    models: Mapping[str, Sequence[str]],
) -> InstalledCluster:
    """Return the cluster for machines in these states.

    Args:
        head: State and address of the head node.
        nodes: The machines that compute.
        models: Models of each node's GPUs, by its name in gpuhub.

    Raises:
        SetupError: The machines cannot be one Slurm.
    """
    state, address = head
    _check_machines(state, nodes)
    names = {node.name: node.slurm_name for node, _ in nodes}
    partitions = _build_partitions(settings, names)
    if features.partition in {partition.name for partition in partitions}:
        raise SetupError(f"--partition {features.partition}: slurm.partitions in cluster.toml has one of this name")
    if {name for partition in partitions for name in partition.nodes} >= set(names.values()):
        raise SetupError(
            f"no machine that computes is left for the partition {features.partition}: see slurm.partitions"
        )
    plugins = REST_PLUGINS.get((state.distribution, state.release), UNVERSIONED_PLUGINS)
    return InstalledCluster(
        name=features.name,
        head_name=state.hostname,
        head_address=address,
        nodes=tuple(_build_node(settings, node, node_state, models[node.name]) for node, node_state in nodes),
        partition=features.partition,
        partitions=partitions,
        has_accounting=features.has_accounting,
        rest_plugins=",".join(plugins[: 2 if features.has_accounting else 1]) if features.has_rest else None,
        power=find_slurm_power(settings, [node.name for node, _ in nodes], features.power_command),
        has_health_check=settings.slurm.runtime != "docker",
    )


def _build_partitions(settings: ClusterSettings, names: Mapping[str, str]) -> tuple[SlurmPartitionConfig, ...]:
    """Return the partitions of the settings with the nodes that compute; `names` are Slurm's by gpuhub's."""
    return tuple(
        SlurmPartitionConfig(
            name=partition.name,
            nodes=tuple(names[name] for name in partition.nodes if name in names),
            is_default=False,
            groups=partition.groups,
        )
        for partition in settings.slurm.partitions
        if not names.keys().isdisjoint(partition.nodes)
    )


def _check_machines(head: SlurmMachineState, nodes: Sequence[tuple[NodeSettings, SlurmMachineState]]) -> None:
    if not nodes:
        raise SetupError("no machine would compute: add nodes to cluster.toml, or leave --no-head-computes out")
    for node, state in nodes:
        if (state.distribution, state.release) != (head.distribution, head.release):
            raise SetupError(
                f"{node.name} has {state.os}, and the head node {head.os}: all parts of Slurm must have one release, "
                "so all machines need the same release of the same distribution"
            )
    names = Counter(state.hostname for _, state in nodes)
    doubles = [f"{node.name} ({state.hostname})" for node, state in nodes if names[state.hostname] > 1]
    if doubles:
        raise SetupError(
            f"machines have the same host name: {', '.join(doubles)}. slurmd finds its node by the host name: give "
            "each its own with `hostnamectl set-hostname NAME`"
        )


def _build_node(
    settings: ClusterSettings, node: NodeSettings, state: SlurmMachineState, models: Sequence[str]
) -> InstalledNode:
    if state.minors and len(state.minors) != len(models):
        raise SetupError(
            f"{node.name}: NVIDIA's driver has {len(state.minors)} GPUs, and the GPU agent, or `gpus` in cluster.toml, "
            f"{len(models)}: `gpuhub doctor` names a GPU that fails; otherwise correct `gpus` of the node's table"
        )
    # Where the driver is not loaded yet, its usual numbers are taken.
    minors = state.minors or tuple(range(len(models)))
    config = SlurmNodeConfig(
        name=node.slurm_name,
        hostname=state.hostname,
        address=node.address,
        gpus=tuple(settings.slurm.gpu_type(model) for model in models),
        cpus=state.cpus,
        memory_mib=state.memory_kib * _MEMORY_PERCENT // 100 // 1024,
    )
    return InstalledNode(config=config, devices=tuple(Path(f"/dev/nvidia{minor}") for minor in minors))


def read_secrets(features: SlurmFeatures, state: SlurmMachineState, head: ScriptRunner) -> ClusterSecrets:
    """Return the keys and the password that the head node has; those that it does not have are new.

    Raises:
        SetupError: A file cannot be read.
    """
    jwt_key, password = b"", ""
    if features.has_rest:
        jwt_key = _read(JWT_KEY, state, head) or secrets.token_bytes(_JWT_KEY_BYTES)
    if features.has_accounting:
        password = parse_database_password(_read(SLURMDBD_CONF, state, head).decode()) or secrets.token_hex(16)
    return ClusterSecrets(
        munge_key=_read(MUNGE_KEY, state, head) or secrets.token_bytes(_MUNGE_KEY_BYTES),
        jwt_key=jwt_key,
        database_password=password,
    )


def _read(path: Path, state: SlurmMachineState, head: ScriptRunner) -> bytes:
    if str(path) not in state.files:
        return b""
    return base64.b64decode(head.run(f"base64 -w0 {path}\n", as_root=state.sudo != "root"), validate=True)
