"""GPUs that Slurm gives to others as well: what it says of them, as everybody sees it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from gpuhub.broker import views
from gpuhub.broker.schemas import GpuState, Holder, NodeState, NodeView, PartitionView, Purpose
from gpuhub.containers.telling import count_kinds
from gpuhub.engines.base import Engine
from gpuhub.nodes.health import GpuCondition, NodeCondition
from gpuhub.settings import Cluster
from gpuhub.slurm.site import find_partition, find_terms
from gpuhub.slurm.values import Job, Partition, Site

#: How the engine calls others' jobs.
_OTHER = "slurm-"
#: Slurm's words for jobs that would not start if all were free.
_NOT_YET = frozenset({"BeginTime", "Dependency", "DependencyNeverSatisfied", "JobHeldAdmin", "JobHeldUser"})


@runtime_checkable
class Shared(Protocol):
    """An engine whose GPUs are not gpuhub's alone."""

    site: Site | None

    def outside(self) -> Mapping[str, Job]:
        """GPUs that others' jobs have, by UUID."""
        ...

    def away(self) -> Mapping[str, str]:
        """Nodes that get no work, and why."""
        ...

    def order(self, now: float) -> list[str]:
        """All that wait; others' jobs are `slurm-` and a number."""
        ...

    def job(self, job_id: int | None) -> Job | None:
        """A job of that number; None where nobody knows it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What another scheduler says at one moment; nothing where gpuhub itself is the engine."""

    site: Site | None = None
    outside: Mapping[str, Job] = field(default_factory=dict)
    away: Mapping[str, str] = field(default_factory=dict)
    #: Others' jobs that wait for GPUs, and for nothing else.
    waiting: int = 0


def look_beside(engine: Engine, now: float) -> Beside:
    """What the engine knows of others' jobs."""
    if not isinstance(engine, Shared):
        return Beside()
    others = (engine.job(int(one.removeprefix(_OTHER))) for one in engine.order(now) if one.startswith(_OTHER))
    return Beside(
        site=engine.site,
        outside=engine.outside(),
        away=engine.away(),
        waiting=sum(job is not None and "gpu" in job.wants and job.reason not in _NOT_YET for job in others),
    )


def build_holder(job: Job, now: float) -> Holder:
    """Whoever has a GPU by a job beside gpuhub's."""
    return Holder(
        owner=describe_owner(job),
        purpose=Purpose.JOB,
        since=views.as_time(now if job.started_at is None else job.started_at),
        until=views.as_time_or_none(job.ends_at),
        slurm_job=job.id,
        is_outside=True,
    )


def describe_owner(job: Job) -> str:
    """The user's name, or the number where Slurm's name service does not know it."""
    return job.user_name or f"user {job.user_id}"


def describe_job(job: Job, now: float) -> str:
    """Such as `Slurm job 17 of carol, until 21:40`, in the head node's time."""
    text = f"Slurm job {job.id} of {describe_owner(job)}"
    if job.ends_at is None:
        return f"{text}, without a time limit"
    end, today = (views.as_time(at).astimezone() for at in (job.ends_at, now))
    clock = end.strftime("%H:%M") if end.date() == today.date() else f"{end.day} {end.strftime('%b %H:%M')}"
    return f"{text}, until {clock}"


def judge_gpu(beside: Beside, node: str, uuid: str, condition: GpuCondition, now: float) -> GpuCondition:
    """Where nobody here holds it: a job beside gpuhub's may have it, and its node may get no work from Slurm."""
    job, away = beside.outside.get(uuid), beside.away.get(node)
    if job is not None and condition.state in {GpuState.FREE, GpuState.OUTSIDE}:
        return replace(condition, state=GpuState.OUTSIDE, message=describe_job(job, now))
    if away is not None and condition.state is GpuState.FREE:
        return replace(condition, state=GpuState.UNAVAILABLE, message=_describe_away(away))
    return condition


def judge_node(beside: Beside, node: str, condition: NodeCondition) -> NodeCondition:
    """A node that answers, and gets no work from Slurm."""
    away = beside.away.get(node)
    if away is None or condition.state is not NodeState.UP:
        return condition
    told = "; ".join(text for text in (_describe_away(away), condition.message) if text)
    return NodeCondition(state=NodeState.CORDONED, message=told)


def _describe_away(why: str) -> str:
    return f"Slurm gives it no work: {why}"


def build_partitions(cluster: Cluster, site: Site | None, nodes: Iterable[NodeView]) -> tuple[PartitionView, ...]:
    """Slurm's partitions that have nodes of gpuhub's, with what is free there."""
    if site is None:
        return ()
    ours = {node.slurm_name: node.name for node in cluster.nodes}
    there = {node.name: node for node in nodes}
    return tuple(
        _build_partition(cluster, site, one, [there[ours[name]] for name in one.nodes if ours.get(name) in there])
        for one in site.partitions
        if any(name in ours for name in one.nodes)
    )


def _build_partition(cluster: Cluster, site: Site, one: Partition, nodes: list[NodeView]) -> PartitionView:
    users = (
        profile.name
        for profile in cluster.profiles
        if find_partition(site, find_terms(cluster.slurm, profile).partition) is one
    )
    return PartitionView(
        name=one.name,
        is_default=one.is_default,
        is_up=one.is_up,
        longest_s=one.longest_s,
        usual_s=one.usual_s,
        most_nodes=one.most_nodes,
        nodes=len(nodes),
        gpus=count_kinds(gpu for node in nodes for gpu in node.gpus),
        profiles=tuple(users),
    )
