"""Refusal of requests that Slurm cannot serve, with what to do instead."""

from __future__ import annotations

from gpuhub.broker_api.schemas import JobRequest
from gpuhub.common.errors import InvalidRequest
from gpuhub.common.names import DEFAULT_IMAGE
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain.models import LeaseRow
from gpuhub.slurm_client.models import SlurmSite
from gpuhub.slurm_client.site import JobShape, check_job_shape, find_terms

RESERVATIONS = (
    "with Slurm, reservations are made there: scontrol create reservation starttime=… duration=… users=… nodes=…; "
    "a profile uses one that its reservation names"
)


def refuse_notebook(cluster: ClusterSettings, profile_name: str) -> None:
    """Refuse a profile that Slurm cannot serve.

    Raises:
        InvalidRequest: With what to do instead.
    """
    profile = cluster.profile(profile_name)
    if profile is not None and profile.gpu_share > 1:
        raise InvalidRequest(
            f"profile {profile.name!r} gives parts of GPUs (gpu_share), and with Slurm gpuhub gets whole ones: choose "
            "another profile; the administrator may cut cards by MIG and give their parts types of their own in "
            "gres.conf"
        )


def refuse_job(cluster: ClusterSettings, request: JobRequest) -> None:
    """Refuse a job that cannot run under Slurm.

    Raises:
        InvalidRequest: With what to do instead.
    """
    if cluster.slurm.runtime != "docker":
        _refuse_without_docker(cluster, request)
    if request.priority > 0:
        raise InvalidRequest(
            f"priority {request.priority}: with Slurm only its operators let a job go before others: scontrol update "
            "jobid=… nice=-…, or a QOS with a higher Priority"
        )
    if request.scavenge:
        raise InvalidRequest(
            "scavenge: who is preempted is Slurm's to say: ask the administrator for a partition or QOS that may be, "
            "and submit there with sbatch"
        )


def _refuse_without_docker(cluster: ClusterSettings, request: JobRequest) -> None:
    """Workers are tasks of one step there, one on each node, in the environment of all of the site's jobs."""
    if request.gpus is not None:
        raise InvalidRequest(
            f"gpus: {request.gpus} GPUs on any nodes need containers, and this site runs jobs with "
            f"{cluster.slurm.runtime}: ask for nnodes and nproc_per_node, the same number of GPUs on each node"
        )
    for node in cluster.nodes:
        if ":" in node.address and node.name not in request.exclude_nodes:
            raise InvalidRequest(
                f"workers find each other by the nodes' IPv4 addresses, and the address of {node.name}, "
                f"{node.address}, is none: the administrator may write another one in its [[nodes]] table; or leave "
                "that node out (exclude_nodes)"
            )
    profile = cluster.profile(request.profile or "")
    if profile is not None and profile.image != DEFAULT_IMAGE:
        raise InvalidRequest(
            f"profile {profile.name!r} has an image of its own, {profile.image}, and this site runs jobs with "
            f"{cluster.slurm.runtime}, all in the same environment: leave the profile out"
        )


def refuse_lease(cluster: ClusterSettings, site: SlurmSite | None, lease: LeaseRow) -> None:
    """Refuse a lease that no partition, account or QOS of the site allows; nothing, where the site is not known.

    Raises:
        InvalidRequest: With what there is.
    """
    ask = lease.resources
    wish = JobShape(
        nodes=ask.least_nodes,
        gpus_per_node=0 if ask.spread is not None else ask.gpus_per_node,
        spread=ask.spread,
        models=ask.models,
        cpus=ask.cpu_milli / 1000,
        memory_mib=ask.memory_mib,
        time_limit_s=lease.time_limit_s,
        terms=find_terms(cluster.slurm, cluster.profile(lease.profile or "")),
    )
    mistakes = [] if site is None else check_job_shape(cluster, site, wish)
    if mistakes:
        raise InvalidRequest("; ".join(mistakes))


def describe_cordon(cluster: ClusterSettings, node: str) -> str:
    """Return how a node is drained in Slurm, which would continue to give a node that only gpuhub cordons."""
    slurm_name = next((known.slurm_name for known in cluster.nodes if known.name == node), node)
    return (
        f"with Slurm, nodes are drained there: scontrol update nodename={slurm_name} state=drain reason=…; and back "
        "with state=resume"
    )
