"""The files of a small Slurm cluster as text: slurm.conf, gres.conf, slurmdbd.conf, and the accounts of its users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import SettingsError
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

__all__ = [
    "SlurmAccount",
    "SlurmAccountingConfig",
    "SlurmConfig",
    "SlurmNodeConfig",
    "SlurmPartitionConfig",
    "format_accounts",
    "format_gres_conf",
    "format_slurm_conf",
    "format_slurmdbd_conf",
]

#: The quickest for few nodes: no delay after a submission, a full scheduling pass each second.
SCHEDULER = "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmAccountingConfig:
    """The address of slurmdbd, which reaches its MySQL or MariaDB as root through the socket in `MYSQL_UNIX_PORT`."""

    host: str = "127.0.0.1"
    port: int = 6819


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """A whole cluster, with all its files below one folder; its daemons run as root, as slurmds must."""

    cluster: str
    nodes: tuple[SlurmNodeConfig, ...]
    folder: Path
    munge_socket: Path
    #: Host name and address of slurmctld's machine. `localhost` fits any machine.
    head_name: str = "localhost"
    head_address: str = "127.0.0.1"
    #: The port of slurmctld.
    port: int = 6817
    partitions: tuple[SlurmPartitionConfig, ...] = (SlurmPartitionConfig(),)
    #: A program that runs as root on each node of a job that has ended, before its GPUs are allocated again.
    epilog: Path | None = None
    accounting: SlurmAccountingConfig | None = None
    #: The key of slurmrestd's tokens; it needs Debian's slurm-wlm-jwt-plugin.
    jwt_key: Path | None = None
    scheduler_parameters: str = SCHEDULER
    #: Time between SIGTERM and SIGKILL, seconds.
    kill_wait_s: int = 30
    #: slurmctld keeps a job that has ended for this time, seconds.
    min_job_age_s: int = 300
    #: A node that does not answer for this time is down, seconds.
    slurmd_timeout_s: int = 300
    #: Whether Slurm limits jobs to their GPUs, CPUs and memory. Containers of theirs have their own limits.
    has_cgroups: bool = False
    #: Additional lines of slurm.conf.
    extra_lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def conf(self) -> Path:
        """slurm.conf, which `SLURM_CONF` must name; the other files are in the same folder."""
        return self.folder / "slurm.conf"

    @property
    def gres_conf(self) -> Path:
        """gres.conf."""
        return self.folder / "gres.conf"

    @property
    def cgroup_conf(self) -> Path:
        """cgroup.conf."""
        return self.folder / "cgroup.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        """slurmdbd.conf; slurmdbd requires mode 600."""
        return self.folder / "slurmdbd.conf"

    @property
    def state(self) -> Path:
        """The folder of slurmctld's queue, which must exist."""
        return self.folder / "state"

    @property
    def spool(self) -> Path:
        """The folder of all nodes' jobs, which must exist."""
        return self.folder / "spool"

    def device(self, node: SlurmNodeConfig, index: int) -> Path:
        """Return the file that stands for a GPU: a device file, or a link to one such as /dev/null. It must exist."""
        return self.folder / "dev" / node.name / f"nvidia{index}"

    @property
    def devices(self) -> tuple[Path, ...]:
        """The device files of all GPUs."""
        return tuple(self.device(node, index) for node in self.nodes for index in range(len(node.gpus)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmAccount:
    """A user with an account on Slurm's machines, and a group of the same name and number."""

    name: str
    uid: int
    home: Path
    #: Further groups: name → number.
    groups: tuple[tuple[str, int], ...] = ()


def format_slurm_conf(files: SlurmConfig) -> str:
    """Return the text of slurm.conf, the same for daemons and commands."""
    settings = {
        **build_cluster_settings(
            files.cluster, f"{files.head_name}({files.head_address})", user="root", jwt_key=files.jwt_key
        ),
        "SlurmdUser": "root",
        "AuthInfo": f"socket={files.munge_socket}",
        "SlurmctldPort": files.port,
        "SlurmctldPidFile": files.folder / "slurmctld.pid",
        "SlurmctldLogFile": files.folder / "slurmctld.log",
        "StateSaveLocation": files.state,
        "SlurmdPidFile": files.folder / "%n.pid",
        "SlurmdSpoolDir": files.spool / "%n",
        "SlurmdLogFile": files.folder / "%n.log",
        # Without control groups, processes belong to jobs by their parents, and have no limits.
        "ProctrackType": "proctrack/cgroup" if files.has_cgroups else "proctrack/linuxproc",
        "TaskPlugin": "task/cgroup" if files.has_cgroups else "task/none",
        **_accounting(files),
        "DefMemPerCPU": 100,
        "SchedulerParameters": files.scheduler_parameters,
        # The nodes may have more CPUs than this machine.
        "SlurmdParameters": "config_overrides",
        "KillWait": files.kill_wait_s,
        "MinJobAge": files.min_job_age_s,
        "SlurmdTimeout": files.slurmd_timeout_s,
        "MaxArraySize": 100001,
        "MaxJobCount": 200000,
        **({} if files.epilog is None else {"Epilog": files.epilog}),
    }
    nodes, partitions = map(format_node, files.nodes), map(format_partition, files.partitions)
    return format_lines([*format_settings(settings), *files.extra_lines, *nodes, *partitions])


def format_gres_conf(files: SlurmConfig) -> str:
    """Return the text of gres.conf: a line for each GPU, in the order of its node's indices."""
    return format_lines(_gres(files))


def format_slurmdbd_conf(files: SlurmConfig) -> str:
    """Return the text of slurmdbd.conf.

    Raises:
        SettingsError: The cluster has no accounting.
    """
    if files.accounting is None:
        raise SettingsError("slurmdbd.conf is for a cluster with accounting")
    settings = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={files.munge_socket}",
        **build_jwt_settings(files.jwt_key),
        "DbdHost": "localhost",
        "DbdAddr": files.accounting.host,
        "DbdPort": files.accounting.port,
        "SlurmUser": "root",
        "PidFile": files.folder / "slurmdbd.pid",
        "LogFile": files.folder / "slurmdbd.log",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageLoc": "slurm_acct",
        "StorageUser": "root",
    }
    return format_lines(format_settings(settings))


def format_accounts(passwd: str, group: str, users: Sequence[SlurmAccount]) -> tuple[str, str]:
    """Return the texts of passwd and group with these users; they replace lines with their names or numbers."""
    for user in users:
        check_words(user.name, str(user.home), *(name for name, _ in user.groups))
    members: dict[tuple[str, int], list[str]] = {(user.name, user.uid): [] for user in users}
    for user in users:
        for key in user.groups:
            members.setdefault(key, []).append(user.name)
    people = [f"{user.name}:x:{user.uid}:{user.uid}::{user.home}:/bin/bash" for user in users]
    groups = [f"{name}:x:{number}:{','.join(names)}" for (name, number), names in members.items()]
    return (
        format_lines([*_others(passwd, {(user.name, user.uid) for user in users}), *people]),
        format_lines([*_others(group, set(members)), *groups]),
    )


def _accounting(files: SlurmConfig) -> dict[str, object]:
    if files.accounting is None:
        return build_accounting_settings(None, files.nodes)
    return {
        **build_accounting_settings(files.accounting.host, files.nodes),
        "AccountingStoragePort": files.accounting.port,
        # Clients of slurmdbd read the socket of munge here, not from AuthInfo.
        "AccountingStoragePass": files.munge_socket,
        "AccountingStorageEnforce": "associations,limits,qos",
    }


def _gres(files: SlurmConfig) -> Iterator[str]:
    for node in files.nodes:
        for index, kind in enumerate(node.gpus):
            yield format_gpu(node.name, kind, files.device(node, index))


def _others(text: str, taken: set[tuple[str, int]]) -> Iterator[str]:
    names = {name for name, _ in taken}
    numbers = {str(number) for _, number in taken}
    for line in text.splitlines():
        fields = line.split(":")
        if fields[0] not in names and (len(fields) < 3 or fields[2] not in numbers):
            yield line


def _check(files: SlurmConfig) -> None:
    paths = (files.folder, files.munge_socket, files.epilog, files.jwt_key)
    check_words(files.cluster, files.head_name, files.head_address, *(str(path) for path in paths if path is not None))
    check_node_words(files.nodes)
    for partition in files.partitions:
        check_words(partition.name, *partition.nodes)
