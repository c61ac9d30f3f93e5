"""Lines of Slurm's configuration files that are the same for every cluster: nodes, GPUs, partitions, settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import SettingsError

_WORD = re.compile(r"[A-Za-z0-9/_.@+-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodeConfig:
    """A machine of the cluster."""

    name: str
    address: str
    #: The port of its slurmd; all nodes may have the same one if each has its own address.
    port: int = 6818
    #: The types of its GPUs by index; empty for a GPU without a type.
    gpus: tuple[str, ...] = ()
    cpus: int = 1
    memory_mib: int = 1000
    #: The output of `hostname` there; None for its name. Nodes on one address share `localhost`.
    hostname: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPartitionConfig:
    """A queue with its limits, in minutes; None for no limit."""

    name: str = "all"
    #: Empty for all nodes.
    nodes: tuple[str, ...] = ()
    is_default: bool = True
    max_minutes: int | None = None
    #: The limit of a job that asks for no time.
    default_minutes: int | None = None
    max_nodes: int | None = None
    #: The system's groups whose members may use it; empty for all users.
    groups: tuple[str, ...] = ()


def format_lines(lines: Iterable[str]) -> str:
    """Return the lines as a text, each with its end."""
    return "".join(f"{line}\n" for line in lines)


def format_settings(settings: Mapping[str, object]) -> list[str]:
    """Return a line for each setting."""
    return [f"{key}={value}" for key, value in settings.items()]


def format_node(node: SlurmNodeConfig) -> str:
    """Return the line of a node in slurm.conf."""
    counts = Counter(node.gpus)
    gres = ",".join(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in counts.items())
    return (
        f"NodeName={node.name} NodeHostname={node.hostname or node.name} NodeAddr={node.address} Port={node.port}"
        f" CPUs={node.cpus} RealMemory={node.memory_mib}{f' Gres={gres}' if gres else ''}"
    )


def format_partition(partition: SlurmPartitionConfig) -> str:
    """Return the line of a partition in slurm.conf."""
    longest, usual, most = partition.max_minutes, partition.default_minutes, partition.max_nodes
    groups = ",".join(partition.groups) or None
    limits = {"AllowGroups": groups, "MaxTime": longest, "DefaultTime": usual, "MaxNodes": most}
    return (
        f"PartitionName={partition.name} Nodes={','.join(partition.nodes) or 'ALL'} State=UP"
        f" Default={'YES' if partition.is_default else 'NO'}"
        + "".join(f" {name}={value}" for name, value in limits.items() if value is not None)
    )


def format_gpu(node: str, kind: str, device: Path) -> str:
    """Return the line of a GPU in gres.conf; `kind` is empty for a GPU without a type."""
    return f"NodeName={node} Name=gpu{f' Type={kind}' if kind else ''} File={device}"


def build_jwt_settings(key: Path | None) -> dict[str, str]:
    """Return the settings of slurmrestd's tokens; none without a key."""
    return {} if key is None else {"AuthAltTypes": "auth/jwt", "AuthAltParameters": f"jwt_key={key}"}


def build_cluster_settings(name: str, head: str, user: str, jwt_key: Path | None) -> dict[str, object]:
    """Return the settings of slurm.conf that gpuhub relies on, the same wherever it installs a Slurm.

    Args:
        name: The cluster's.
        head: Host name of slurmctld's machine, with its address in brackets.
        user: As whom slurmctld runs.
        jwt_key: The key of slurmrestd's tokens; None without slurmrestd.
    """
    return {
        "ClusterName": name,
        "SlurmctldHost": head,
        "SlurmUser": user,
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        **build_jwt_settings(jwt_key),
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "GresTypes": "gpu",
        "SchedulerType": "sched/backfill",
        "ReturnToService": 2,
    }


def build_accounting_settings(host: str | None, nodes: Iterable[SlurmNodeConfig]) -> dict[str, object]:
    """Return the settings of accounting by slurmdbd at `host`, which counts all GPUs and those of each type.

    None is for a cluster without accounting.
    """
    if host is None:
        return {"AccountingStorageType": "accounting_storage/none"}
    types = dict.fromkeys(kind for node in nodes for kind in node.gpus if kind)
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": host,
        "AccountingStorageTRES": ",".join(["gres/gpu", *(f"gres/gpu:{kind}" for kind in types)]),
        "PriorityType": "priority/multifactor",
        "PriorityWeightFairshare": 100000,
    }


def check_node_words(nodes: Iterable[SlurmNodeConfig]) -> None:
    """Check the texts of nodes; see `check_words`."""
    for node in nodes:
        check_words(node.name, node.address, node.hostname or node.name, *(kind for kind in node.gpus if kind))


def check_words(*values: str) -> None:
    """Check texts for Slurm's files, which have no quoting that works for all settings.

    Raises:
        SettingsError: A text has another character than letters, digits and / _ . @ + -.
    """
    for value in values:
        if not _WORD.fullmatch(value):
            raise SettingsError(
                f"{value!r} cannot be written to Slurm's files: only letters, digits and / _ . @ + - are allowed"
            )
