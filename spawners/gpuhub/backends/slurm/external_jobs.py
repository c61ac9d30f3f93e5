"""Jobs on the same GPUs that are not gpuhub's, and the partitions that they share with gpuhub's."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from gpuhub.backends.interface import ExternalJob, ExternalUsage
from gpuhub.backends.slurm.scheduler import SlurmScheduler
from gpuhub.broker_api.schemas import NodeView, PartitionView
from gpuhub.broker_api.schemas.cluster import count_models
from gpuhub.config.settings import ClusterSettings
from gpuhub.slurm_client.models import SlurmJob, SlurmPartition, SlurmSite
from gpuhub.slurm_client.site import find_partition, find_terms

#: Slurm's reasons of pending jobs that would not start if all GPUs were free.
_NOT_YET = frozenset({"BeginTime", "Dependency", "DependencyNeverSatisfied", "JobHeldAdmin", "JobHeldUser"})


def build_usage(scheduler: SlurmScheduler, now: float) -> ExternalUsage:
    """Return what jobs that are not gpuhub's hold now."""
    pending = scheduler.list_external_pending()
    return ExternalUsage(
        gpus={uuid: _build_job(job, now) for uuid, job in scheduler.find_external_jobs().items()},
        unavailable={
            node: f"Slurm starts no jobs on this node: {why}" for node, why in scheduler.find_unavailable().items()
        },
        waiting=sum("gpu" in job.wants and job.reason not in _NOT_YET for job in pending),
    )


def _build_job(job: SlurmJob, now: float) -> ExternalJob:
    return ExternalJob(
        id=job.id,
        owner=describe_owner(job),
        text=describe_job(job, now),
        started_at=job.started_at,
        ends_at=job.ends_at,
    )


def describe_owner(job: SlurmJob) -> str:
    """Return the user's name, or the number where Slurm's name service does not know it."""
    return job.user_name or f"user {job.user_id}"


def describe_job(job: SlurmJob, now: float) -> str:
    """Return such as `Slurm job 17 of carol, until 21:40`, in the head node's time."""
    text = f"Slurm job {job.id} of {describe_owner(job)}"
    if job.ends_at is None:
        return f"{text}, without a time limit"
    end, today = (datetime.fromtimestamp(moment, UTC).astimezone() for moment in (job.ends_at, now))
    clock = end.strftime("%H:%M") if end.date() == today.date() else f"{end.day} {end.strftime('%b %H:%M')}"
    return f"{text}, until {clock}"


def build_partitions(
    cluster: ClusterSettings, site: SlurmSite | None, nodes: Iterable[NodeView]
) -> tuple[PartitionView, ...]:
    """Return Slurm's partitions that have nodes of cluster.toml, with what is free there."""
    if site is None:
        return ()
    views = {node.name: node for node in nodes}
    known = {node.slurm_name: views[node.name] for node in cluster.nodes if node.name in views}
    names = {node.slurm_name for node in cluster.nodes}
    return tuple(
        _build_partition(cluster, site, partition, [known[name] for name in partition.nodes if name in known])
        for partition in site.partitions
        if not names.isdisjoint(partition.nodes)
    )


def _build_partition(
    cluster: ClusterSettings, site: SlurmSite, partition: SlurmPartition, nodes: list[NodeView]
) -> PartitionView:
    users = (
        profile.name
        for profile in cluster.profiles
        if find_partition(site, find_terms(cluster.slurm, profile).partition) is partition
    )
    return PartitionView(
        name=partition.name,
        is_default=partition.is_default is True,
        is_up=partition.is_up,
        longest_s=partition.max_time_s,
        usual_s=partition.default_time_s,
        most_nodes=partition.max_nodes,
        nodes=len(nodes),
        gpus=count_models(gpu for node in nodes for gpu in node.gpus),
        profiles=tuple(users),
    )
