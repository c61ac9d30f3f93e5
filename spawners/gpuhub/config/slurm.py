"""`[slurm]` in cluster.toml, and checks of the keys that Slurm needs or replaces."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gpuhub.common.gpu import shorten_model
from gpuhub.common.units import Span
from gpuhub.config.base import ListOf, NodeName, SettingsTable, SlurmName, Text

if TYPE_CHECKING:
    from gpuhub.config.settings import ClusterSettings

#: Keys of [scheduling] that Slurm decides, with the settings of Slurm that replace them.
SCHEDULING_KEYS = {
    "half_life": "PriorityDecayHalfLife in slurm.conf",
    "fair_share": "PriorityType=priority/multifactor and PriorityWeightFairshare in slurm.conf",
    "interactive_first": "a QOS with a higher Priority, named by qos in the notebooks' profiles",
    "priority_step": "PriorityWeightQOS and a QOS for each step, or a partition's PriorityJobFactor",
    "backfill": "SchedulerType=sched/backfill in slurm.conf",
    "preemption": "PreemptType and PreemptMode in slurm.conf, and a QOS or partition that may be preempted",
    "preempt_grace": "GraceTime of the QOS or partition that may be preempted",
    "suspend_scavengers": "PreemptMode=REQUEUE or CANCEL: Slurm's SUSPEND leaves the memory on the GPU",
    "card_values": "TRESBillingWeights of the partition, such as GRES/gpu:rtx5090=2.0",
}
#: Limits that Slurm enforces, since they count jobs from outside gpuhub as well, with the settings that replace them.
LIMIT_KEYS = {
    "max_gpus": "MaxTRESPerUser=gres/gpu=N of a QOS, or GrpTRES=gres/gpu=N of a user or account (sacctmgr)",
    "gpu_hours_per_week": "GrpTRESMins=gres/gpu=N of a user or account (sacctmgr), and PriorityUsageResetPeriod=WEEKLY",
}
_DOCKER = 'write "unix:///run/docker.sock", "ssh://user@host" or "tcp://host:2376" with tls'
_PROFILE_KEYS = ("partition", "account", "qos", "reservation")


class SlurmPartitionSettings(SettingsTable):
    """A partition of the Slurm that `gpuhub slurm init` installs."""

    #: Name in Slurm, by which `partition` of a profile chooses it.
    name: SlurmName
    #: Names of its nodes, which are in no other partition.
    nodes: Annotated[ListOf[NodeName], Field(min_length=1)]
    #: The system's groups whose members alone may submit jobs to it (AllowGroups); empty for all users.
    groups: ListOf[SlurmName] = ()


class SlurmSettings(SettingsTable):
    """Connection to Slurm, defaults of its jobs, and what runs notebooks and workers on its nodes."""

    #: Interface to Slurm. `cli`: Slurm's commands on the head node; `rest`: slurmrestd.
    api: Literal["cli", "rest"] = "cli"
    #: Folder of sbatch, squeue and the other commands; None: they are found on PATH.
    commands: Path | None = None
    #: Path of slurm.conf; None: the default of Slurm's commands.
    conf: Path | None = None
    #: Address of slurmrestd: `unix:///run/slurmrestd.sock`, `http://127.0.0.1:6820` (http on loopback only), or
    #: `https://` with a certificate that this machine trusts.
    rest_url: str | None = None
    #: File of the JWT key, as in slurm.conf (`AuthAltParameters=jwt_key=…`), with mode 0600.
    rest_key: Path | None = None
    #: User as whom gpuhub queries all jobs through slurmrestd: SlurmUser, or an operator.
    rest_user: SlurmName = "root"
    #: Partition of gpuhub's jobs unless the profile sets one; None: Slurm's default.
    partition: SlurmName | None = None
    #: Account of gpuhub's jobs unless the profile sets one; None: Slurm's default.
    account: SlurmName | None = None
    #: QOS of gpuhub's jobs unless the profile sets one; None: Slurm's default.
    qos: SlurmName | None = None
    #: Reservation of gpuhub's jobs unless the profile sets one; None: none.
    reservation: SlurmName | None = None
    #: Slurm's GPU types by model, where they are not the model in lower case without blanks ("rtx5090").
    gpu_types: dict[Text, SlurmName] = Field(default_factory=dict)
    #: What runs notebooks and workers. `docker`: gpuhub creates containers on the nodes; `apptainer`: the job runs the
    #: image file `image`; `plain`: the job runs `command` as installed on the nodes.
    runtime: Literal["docker", "apptainer", "plain"] = "docker"
    #: Apptainer image file, with the same path on every node; `gpuhub image build` and `push` make and copy it.
    image: Path | None = None
    #: Program that starts a notebook with `runtime = "plain"`: an absolute path on the nodes.
    command: Path | None = None
    #: Partitions that `gpuhub slurm init` writes for some of the nodes; all others are in `partition`. A Slurm of the
    #: site has its own.
    partitions: ListOf[SlurmPartitionSettings] = ()
    #: Whether gpuhub drains a node in Slurm whose GPU its agents find failed, until the GPU is proven to work again.
    drain_failed: bool = True
    #: Interval between two queries of all jobs, seconds; 60 at most.
    poll: Annotated[Span, Field(le=60)] = 2

    @field_validator("commands", "conf", "rest_key", "image", "command", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) else value

    @field_validator("commands", "conf", "rest_key", "image", "command")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and (not value.is_absolute() or not re.fullmatch(r"[A-Za-z0-9/_.@+-]+", str(value))):
            raise ValueError(f"{str(value)!r}: an absolute path of letters, digits and / _ . @ + - is needed")
        return value

    @field_validator("rest_url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None:
            url = urlsplit(value)
            is_socket = url.scheme == "unix" and not url.netloc and len(url.path) > 1
            is_http = url.scheme in {"http", "https"} and url.hostname and url.path in {"", "/"}
            if not is_socket and not is_http:
                raise ValueError(f'{value!r}: write "unix:///run/slurmrestd.sock" or "http://127.0.0.1:6820"')
            if url.scheme == "http" and not _is_loopback(url.hostname or ""):
                raise ValueError(
                    f"{value!r}: http is for loopback only, because others on the network could read tokens, which can "
                    'stand for any user of Slurm: write "https://HOST:PORT"'
                )
            return value.rstrip("/")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.api == "rest" and (self.rest_url is None or self.rest_key is None):
            raise ValueError('api = "rest" needs rest_url and rest_key')
        if self.runtime == "apptainer" and self.image is None:
            raise ValueError('runtime = "apptainer" needs image: the file that the nodes run')
        if self.runtime == "plain" and self.command is None:
            raise ValueError('runtime = "plain" needs command, such as "/opt/gpuhub/bin/jupyterhub-singleuser"')
        return self

    def gpu_type(self, model: str) -> str:
        """Return Slurm's type of a model: the one in `gpu_types`, else `rtx5090` for `RTX 5090`."""
        wanted = shorten_model(model).casefold()
        configured = (gpu_type for name, gpu_type in self.gpu_types.items() if shorten_model(name).casefold() == wanted)
        return next(configured, "".join(wanted.split()))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_missing_docker(cluster: ClusterSettings) -> Iterator[str]:
    """Return one line for each node without the address of its Docker daemon."""
    for node in cluster.nodes:
        if not node.docker:
            yield f"nodes: {node.name}: docker is missing: {_DOCKER}"


def find_misplaced_slurm_keys(cluster: ClusterSettings) -> Iterator[str]:
    """Return one line for each key of Slurm in settings with another backend."""
    engine = f'engine = "{cluster.engine}"'
    hint = 'write engine = "slurm" at the top of the file, or remove it'
    if "slurm" in cluster.model_fields_set:
        yield f"[slurm] has no meaning with {engine}: {hint}"
    for node in cluster.nodes:
        if node.slurm is not None:
            yield f"nodes: {node.name}: slurm = {node.slurm!r} has no meaning with {engine}: {hint}"
    for profile in cluster.profiles:
        for key in _PROFILE_KEYS:
            if (value := getattr(profile, key)) is not None:
                yield f"profiles: {profile.name!r}: {key} = {value!r} is a key of Slurm, and {engine}: {hint}"


def find_slurm_mistakes(cluster: ClusterSettings) -> Iterator[str]:
    """Return one line for each key that does not go with Slurm: the key, the reason, and what to write instead."""
    for name, count in Counter(node.slurm_name for node in cluster.nodes).items():
        if count > 1:
            yield f"nodes: slurm = {name!r} occurs {count} times; each needs its own"
    for node in cluster.nodes:
        if node.groups:
            yield (
                f"nodes: {node.name}: groups: Slurm decides whose jobs run on a node: remove it, and set "
                f"AllowGroups={','.join(node.groups)} of its partition in slurm.conf, or for `gpuhub slurm init` its "
                "node and groups in slurm.partitions"
            )
        if node.owner_first:
            yield (
                f"nodes: {node.name}: owner_first: Slurm decides whose jobs are preempted: remove it, and give "
                f"{node.owner} a partition or QOS of this node with a higher PriorityTier and PreemptMode in slurm.conf"
            )
    yield from _find_partition_mistakes(cluster)
    for key in sorted(cluster.scheduling.model_fields_set & SCHEDULING_KEYS.keys()):
        yield f'scheduling.{key}: Slurm orders the queue (engine = "slurm"): remove it, set {SCHEDULING_KEYS[key]}'
    yield from _limits("users", cluster.users.model_fields_set)
    for group in cluster.groups:
        yield from _limits(f"groups: {group.name!r}: each", group.each.model_fields_set)
        yield from _limits(f"groups: {group.name!r}: together", group.together.model_fields_set)
        if "weight" in group.model_fields_set:
            yield (
                f'groups: {group.name!r}: weight: with engine = "slurm" Slurm keeps fair share: remove it, and set '
                "fairshare=N of the account (sacctmgr)"
            )
    for profile in cluster.profiles:
        if profile.gpu_share > 1:
            yield (
                f"profiles: {profile.name!r}: gpu_share = {profile.gpu_share}: Slurm allocates whole GPUs: remove "
                "it, or divide the GPU by MIG and define a type for each part in gres.conf"
            )
    if cluster.slurm.runtime != "docker":
        yield from _without_docker(cluster)


def _find_partition_mistakes(cluster: ClusterSettings) -> Iterator[str]:
    partitions, nodes = cluster.slurm.partitions, [node.name for node in cluster.nodes]
    for name, count in Counter(partition.name for partition in partitions).items():
        if count > 1 or name == cluster.slurm.partition:
            yield f"slurm.partitions: {name!r} is another partition's name: each needs its own"
    named = Counter(name for partition in partitions for name in partition.nodes)
    for name, count in named.items():
        if name not in nodes:
            yield f"slurm.partitions: there is no node {name!r}; there are {', '.join(nodes)}"
        elif count > 1:
            yield f"slurm.partitions: node {name!r} is listed {count} times: list it in one partition"
    if partitions and named.keys() >= set(nodes):
        yield "slurm.partitions: no node is left for slurm.partition: leave the nodes for all users out"


def _limits(where: str, written: set[str]) -> Iterator[str]:
    for key in sorted(written & LIMIT_KEYS.keys()):
        text = "jobs from outside gpuhub count as well, so Slurm must enforce it"
        yield f"{where}.{key}: {text}: remove it, and set {LIMIT_KEYS[key]}"


def _without_docker(cluster: ClusterSettings) -> Iterator[str]:
    """Only Docker mounts file servers, and limits the data written outside of the home."""
    why = f'with slurm.runtime = "{cluster.slurm.runtime}"'
    for key in ("home", "datasets", "models"):
        if (getattr(cluster.storage, key) or "").startswith("nfs://"):
            yield f"storage.{key}: {why} gpuhub does not mount nfs:// on the nodes: mount it on all, and write the path"
    for profile in cluster.profiles:
        if profile.disk is not None:
            yield f"profiles: {profile.name!r}: disk: {why} that limit cannot be enforced: remove it"
        if profile.tmp is not None:
            yield f"profiles: {profile.name!r}: tmp: {why} /tmp is the node's: remove it"
