"""The files of a Slurm that gpuhub installs, as text: slurm.conf, gres.conf, cgroup.conf, slurmdbd.conf and others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from gpuhub.ops.slurm.config_lines import (
    SlurmNodeConfig,
    SlurmPartitionConfig,
    build_accounting_settings,
    build_cluster_settings,
    build_jwt_settings,
    check_node_words,
    check_words,
    format_gpu,
    format_lines,
    format_node,
    format_partition,
    format_settings,
)
from gpuhub.ops.slurm.power import (
    PROGRAMS,
    SlurmPower,
    build_power_settings,
    format_program,
    format_sudo_rule,
    format_switch_script,
)

#: First line of every file that gpuhub writes for Slurm; a slurm.conf without it belongs to the site.
MARKER = "# Written by `gpuhub slurm init`, which replaces changes made here."
_FOLDER = Path("/etc/slurm")
SLURM_CONF = _FOLDER / "slurm.conf"
GRES_CONF = _FOLDER / "gres.conf"
CGROUP_CONF = _FOLDER / "cgroup.conf"
SLURMDBD_CONF = _FOLDER / "slurmdbd.conf"
EPILOG = _FOLDER / "gpuhub-epilog.sh"
HEALTH_CHECK = _FOLDER / "gpuhub-health.sh"
#: The program that switches nodes as root, those that slurmctld calls for it, and the rule that lets it.
POWER_SCRIPT = _FOLDER / "gpuhub-power.sh"
SUDO_RULE = Path("/etc/sudoers.d/gpuhub-slurm-power")
JWT_KEY = _FOLDER / "jwt_hs256.key"
MUNGE_KEY = Path("/etc/munge/munge.key")
REST_DROP_IN = Path("/etc/systemd/system/slurmrestd.service.d/gpuhub.conf")
#: slurmrestd refuses to run as root or as Slurm's own user.
REST_USER = "slurmrest"
REST_URL = "http://127.0.0.1:6820"
#: Database and database user of slurmdbd.
DATABASE = "slurm_acct_db"
DATABASE_USER = "slurm"
#: Settings of the health check; the interval in seconds.
_HEALTH_CHECK_SETTINGS = {"HealthCheckProgram": HEALTH_CHECK, "HealthCheckInterval": 60}
#: A free GPU is allocated within a second, see docs/slurm.md.
_SCHEDULER = "batch_sched_delay=0,sched_interval=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledNode:
    """A node of Slurm, and the device files of its GPUs."""

    config: SlurmNodeConfig
    #: In the order of `config.gpus`.
    devices: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledCluster:
    """A whole cluster with the distribution's packages, in their folders and with their user `slurm`."""

    name: str
    #: The output of `hostname -s` on slurmctld's machine, and its address.
    head_name: str
    head_address: str
    nodes: tuple[InstalledNode, ...]
    #: Name of the partition of all nodes that are in none of `partitions`.
    partition: str
    partitions: tuple[SlurmPartitionConfig, ...] = ()
    has_accounting: bool = False
    #: slurmrestd's plugins; None without slurmrestd.
    rest_plugins: str | None = None
    #: Power saving; None where all nodes stay on.
    power: SlurmPower | None = None
    #: Whether Slurm checks the GPUs, as on nodes without Docker, which have no GPU agent.
    has_health_check: bool = False

    def __post_init__(self) -> None:
        check_words(self.name, self.head_name, self.head_address, self.partition)
        check_node_words(node.config for node in self.nodes)
        for partition in self.partitions:
            check_words(partition.name, *partition.nodes, *partition.groups)

    @property
    def jwt_key(self) -> Path | None:
        return None if self.rest_plugins is None else JWT_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSecrets:
    """The keys and the password; they are written to files that only their daemons can read, and never shown."""

    munge_key: bytes
    #: Empty without slurmrestd.
    jwt_key: bytes = b""
    #: Letters and digits; empty without accounting.
    database_password: str = ""

    def __repr__(self) -> str:
        return "ClusterSecrets(…)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFile:
    """A file on a machine."""

    path: Path
    content: bytes
    owner: str = "root"
    mode: int = 0o644
    #: Its content is never shown.
    is_secret: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def __repr__(self) -> str:
        return f"SlurmFile({self.path})"


def list_files(
    cluster: InstalledCluster, secrets: ClusterSecrets, *, is_head: bool, computes: bool
) -> Iterator[SlurmFile]:
    """Return the files of one machine.

    Args:
        is_head: slurmctld runs there, and slurmdbd and slurmrestd where the cluster has them.
        computes: slurmd runs there.
    """
    yield SlurmFile(path=MUNGE_KEY, content=secrets.munge_key, owner="munge", mode=0o400, is_secret=True)
    yield SlurmFile(path=SLURM_CONF, content=format_slurm_conf(cluster).encode())
    yield SlurmFile(path=GRES_CONF, content=format_gres_conf(cluster).encode())
    yield SlurmFile(path=CGROUP_CONF, content=format_cgroup_conf().encode())
    if computes:
        yield SlurmFile(path=EPILOG, content=_read_script("epilog.sh"), mode=0o755)
    if computes and cluster.has_health_check:
        yield SlurmFile(path=HEALTH_CHECK, content=_read_script("health.sh"), mode=0o755)
    if is_head and cluster.has_accounting:
        text = format_slurmdbd_conf(cluster, secrets.database_password)
        yield SlurmFile(path=SLURMDBD_CONF, content=text.encode(), owner="slurm", mode=0o600, is_secret=True)
    if is_head and cluster.rest_plugins is not None:
        yield SlurmFile(path=JWT_KEY, content=secrets.jwt_key, owner="slurm", mode=0o600, is_secret=True)
        yield SlurmFile(path=REST_DROP_IN, content=format_rest_drop_in(cluster.rest_plugins).encode())
    if is_head and cluster.power is not None:
        yield from _list_power_files(cluster.power)


def _list_power_files(power: SlurmPower) -> Iterator[SlurmFile]:
    for action in PROGRAMS.values():
        yield _build_script(_FOLDER / f"gpuhub-{action}.sh", format_program(action, _FOLDER))
    yield _build_script(POWER_SCRIPT, format_switch_script(power))
    rule = f"{MARKER}\n{format_sudo_rule(_FOLDER)}"
    yield SlurmFile(path=SUDO_RULE, content=rule.encode(), mode=0o440)


def _build_script(path: Path, text: str) -> SlurmFile:
    return SlurmFile(path=path, content=f"#!/bin/sh\n{MARKER}\n{text}".encode(), mode=0o755)


def format_slurm_conf(cluster: InstalledCluster) -> str:
    """Return the text of slurm.conf, the same on all machines."""
    nodes = [node.config for node in cluster.nodes]
    settings = {
        **build_cluster_settings(
            cluster.name, f"{cluster.head_name}({cluster.head_address})", user="slurm", jwt_key=cluster.jwt_key
        ),
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmctldLogFile": "/var/log/slurm/slurmctld.log",
        "StateSaveLocation": "/var/lib/slurm/slurmctld",
        "SlurmdPidFile": "/run/slurmd.pid",
        "SlurmdSpoolDir": "/var/lib/slurm/slurmd",
        "SlurmdLogFile": "/var/log/slurm/slurmd.log",
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/cgroup,task/affinity",
        "DefMemPerCPU": min((node.memory_mib // node.cpus for node in nodes), default=1),
        "SchedulerParameters": _SCHEDULER,
        "EnforcePartLimits": "ALL",
        "Epilog": EPILOG,
        **(_HEALTH_CHECK_SETTINGS if cluster.has_health_check else {}),
        **({} if cluster.power is None else build_power_settings(cluster.power, _FOLDER)),
        **build_accounting_settings(cluster.head_address if cluster.has_accounting else None, nodes),
        **({"JobAcctGatherType": "jobacct_gather/cgroup"} if cluster.has_accounting else {}),
    }
    taken = {name for partition in cluster.partitions for name in partition.nodes}
    shared = tuple(node.name for node in nodes if node.name not in taken) if taken else ()
    partitions = (SlurmPartitionConfig(name=cluster.partition, nodes=shared), *cluster.partitions)
    lines = [*format_settings(settings), *map(format_node, nodes), *map(format_partition, partitions)]
    return format_lines([MARKER, *lines])


def format_gres_conf(cluster: InstalledCluster) -> str:
    """Return the text of gres.conf: a line for each GPU, in the order of the driver."""
    gpus = (
        format_gpu(node.config.name, kind, device)
        for node in cluster.nodes
        for kind, device in zip(node.config.gpus, node.devices, strict=True)
    )
    return format_lines([MARKER, *gpus])


def format_cgroup_conf() -> str:
    """Return the text of cgroup.conf, which limits jobs to their GPUs, CPUs and memory."""
    limits = {"ConstrainDevices": "yes", "ConstrainCores": "yes", "ConstrainRAMSpace": "yes"}
    return format_lines([MARKER, *format_settings(limits)])


def format_slurmdbd_conf(cluster: InstalledCluster, password: str) -> str:
    """Return the text of slurmdbd.conf, which has the database's password."""
    settings = {
        "AuthType": "auth/munge",
        **build_jwt_settings(cluster.jwt_key),
        "DbdHost": cluster.head_name,
        "DbdAddr": cluster.head_address,
        "SlurmUser": "slurm",
        "PidFile": "/run/slurmdbd.pid",
        "LogFile": "/var/log/slurm/slurmdbd.log",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageLoc": DATABASE,
        "StorageUser": DATABASE_USER,
        "StoragePass": password,
    }
    return format_lines([MARKER, *format_settings(settings)])


def parse_database_password(text: str) -> str:
    """Return the password in slurmdbd.conf; empty if it has none."""
    lines = (line.partition("=") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip().lower() == "storagepass"), "")


def format_rest_drop_in(plugins: str) -> str:
    """Return systemd's settings of slurmrestd: a user of its own, tokens only, loopback only."""
    address = REST_URL.removeprefix("http://")
    return format_lines(
        [
            MARKER,
            "[Service]",
            f"User={REST_USER}",
            f"Group={REST_USER}",
            "Environment=SLURM_JWT=daemon",
            "ExecStart=",
            f"ExecStart=/usr/sbin/slurmrestd -a rest_auth/jwt -s {plugins} {address}",
        ]
    )


def _read_script(name: str) -> bytes:
    return resources.files("gpuhub.slurm_client").joinpath(name).read_bytes()
