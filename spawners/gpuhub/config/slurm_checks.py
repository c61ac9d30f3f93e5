"""Checks of the keys in cluster.toml that need `engine = "slurm"`, or that Slurm's own configuration replaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

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
    "card_values": "TRESBillingWeights of the partition, such as GRES/gpu:rtx5090=2.0",
}
#: Limits that Slurm enforces, since they count jobs from outside gpuhub as well, with the settings that replace them.
LIMIT_KEYS = {
    "max_gpus": "MaxTRESPerUser=gres/gpu=N of a QOS, or GrpTRES=gres/gpu=N of a user or account (sacctmgr)",
    "gpu_hours_per_week": "GrpTRESMins=gres/gpu=N of a user or account (sacctmgr), and PriorityUsageResetPeriod=WEEKLY",
}
_DOCKER = 'write "unix:///run/docker.sock", "ssh://user@host" or "tcp://host:2376" with tls'
_PROFILE_KEYS = ("partition", "account", "qos", "reservation")


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


def _limits(where: str, written: set[str]) -> Iterator[str]:
    for key in sorted(written & LIMIT_KEYS.keys()):
        text = "jobs from outside gpuhub count as well, so Slurm must enforce it"
        yield f"{where}.{key}: {text}: remove it, and set {LIMIT_KEYS[key]}"


def _without_docker(cluster: ClusterSettings) -> Iterator[str]:
    """Only Docker mounts file servers, and limits the data written outside of the home."""
    why = f'with slurm.runtime = "{cluster.slurm.runtime}"'
    for key in ("home", "datasets"):
        if (getattr(cluster.storage, key) or "").startswith("nfs://"):
            yield f"storage.{key}: {why} gpuhub does not mount nfs:// on the nodes: mount it on all, and write the path"
    for profile in cluster.profiles:
        if profile.disk is not None:
            yield f"profiles: {profile.name!r}: disk: {why} that limit cannot be enforced: remove it"
