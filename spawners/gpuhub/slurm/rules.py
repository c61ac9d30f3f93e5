"""Settings that go with Slurm as the engine, and those that do not. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuhub.settings import Cluster

#: Keys of [scheduling] that Slurm rules: what says the same there.
ORDER = {
    "half_life": "PriorityDecayHalfLife in slurm.conf",
    "fair_share": "PriorityType=priority/multifactor and PriorityWeightFairshare in slurm.conf",
    "interactive_first": "a QOS with a higher Priority, named by qos in the notebooks' profiles",
    "priority_step": "PriorityWeightQOS and a QOS for each step, or a partition's PriorityJobFactor",
    "backfill": "SchedulerType=sched/backfill in slurm.conf",
    "preemption": "PreemptType and PreemptMode in slurm.conf, and a QOS or partition that may be preempted",
    "preempt_grace": "GraceTime of the QOS or partition that may be preempted",
    "card_values": "TRESBillingWeights of the partition, such as GRES/gpu:rtx5090=2.0",
}
#: Limits that Slurm keeps, since jobs beside gpuhub's count as well.
LIMITS = {
    "max_gpus": "MaxTRESPerUser=gres/gpu=N of a QOS, or GrpTRES=gres/gpu=N of a user or account (sacctmgr)",
    "gpu_hours_per_week": "GrpTRESMins=gres/gpu=N of a user or account (sacctmgr), and PriorityUsageResetPeriod=WEEKLY",
}
_DOCKER = 'write "unix:///run/docker.sock", "ssh://user@host" or "tcp://host:2376" with tls'
_PROFILE_KEYS = ("partition", "account", "qos", "reservation")


def find_mistakes(cluster: Cluster) -> list[str]:
    """One line for each key that does not go with the engine: the key, why, and what to write where instead."""
    found = list(_without_slurm(cluster) if cluster.engine == "builtin" else _with_slurm(cluster))
    if cluster.has_docker:
        found += [f"nodes: {node.name}: docker is missing: {_DOCKER}" for node in cluster.nodes if not node.docker]
    return found


def _without_slurm(cluster: Cluster) -> Iterator[str]:
    hint = 'write engine = "slurm" at the top of the file, or leave it out'
    if "slurm" in cluster.model_fields_set:
        yield f'[slurm] means nothing with engine = "builtin": {hint}'
    for node in cluster.nodes:
        if node.slurm is not None:
            yield f'nodes: {node.name}: slurm = {node.slurm!r} means nothing with engine = "builtin": {hint}'
    for profile in cluster.profiles:
        for key in _PROFILE_KEYS:
            if (value := getattr(profile, key)) is not None:
                yield f'profiles: {profile.name!r}: {key} = {value!r} is Slurm\'s, and engine = "builtin": {hint}'


def _with_slurm(cluster: Cluster) -> Iterator[str]:
    for key in sorted(cluster.scheduling.model_fields_set & ORDER.keys()):
        yield f'scheduling.{key}: with engine = "slurm" Slurm says who goes first: leave it out, and set {ORDER[key]}'
    yield from _limits("users", cluster.users.model_fields_set)
    for group in cluster.groups:
        yield from _limits(f"groups: {group.name!r}: each", group.each.model_fields_set)
        yield from _limits(f"groups: {group.name!r}: together", group.together.model_fields_set)
        if "weight" in group.model_fields_set:
            yield (
                f'groups: {group.name!r}: weight: with engine = "slurm" Slurm keeps fair share: leave it out, and set '
                "fairshare=N of the account (sacctmgr)"
            )
    for profile in cluster.profiles:
        if profile.gpu_share > 1:
            yield (
                f"profiles: {profile.name!r}: gpu_share = {profile.gpu_share}: Slurm gives whole GPUs to gpuhub: leave "
                "it out, or cut the card by MIG and give its parts types of their own in gres.conf"
            )
    if not cluster.has_docker:
        yield from _without_docker(cluster)


def _limits(where: str, written: set[str]) -> Iterator[str]:
    for key in sorted(written & LIMITS.keys()):
        text = "jobs beside gpuhub's count as well, so Slurm has to keep it"
        yield f"{where}.{key}: {text}: leave it out, and set {LIMITS[key]}"


def _without_docker(cluster: Cluster) -> Iterator[str]:
    """Nothing but Docker mounts file servers, and limits what is written outside of the home."""
    why = f'with slurm.runtime = "{cluster.slurm.runtime}"'
    for key in ("home", "datasets"):
        if (getattr(cluster.storage, key) or "").startswith("nfs://"):
            yield f"storage.{key}: {why} nobody mounts nfs:// on a node: mount it on all, and write the path"
    for profile in cluster.profiles:
        if profile.disk is not None:
            yield f"profiles: {profile.name!r}: disk: {why} nobody keeps that limit: leave it out"
