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
    "with Slurm, reservations are created there: scontrol create reservation starttime=… duration=… users=… nodes=…; "
    "a profile uses the one in its key reservation"
)


def refuse_notebook(cluster: ClusterSettings, profile_name: str) -> None:
    """Refuse a profile that Slurm cannot serve.

    Raises:
        InvalidRequest: With what to do instead.
    """
    profile = cluster.profile(profile_name)
    if profile is not None and profile.gpu_share > 1:
        raise InvalidRequest(
            f"profile {profile.name!r} uses GPU shares (gpu_share), and Slurm allocates whole GPUs: choose another "
            "profile; an administrator can divide GPUs by MIG and define a type for each part in gres.conf"
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
            f"priority {request.priority}: only Slurm's operators can raise a job's priority: scontrol update jobid=… "
            "nice=-…, or a QOS with a higher Priority"
        )
    if request.scavenge:
        raise InvalidRequest(
            "scavenge: Slurm decides which jobs are preempted: ask the administrator for a partition or QOS whose jobs "
            "may be preempted, and submit there with sbatch"
        )


def _refuse_without_docker(cluster: ClusterSettings, request: JobRequest) -> None:
    """Workers are tasks of one step there, one on each node, in the environment of all of the site's jobs."""
    if request.stage:
        raise InvalidRequest(
            f"stage: copies of datasets need containers, and this site runs jobs with {cluster.slurm.runtime}: leave "
            "it out, and read the datasets where they are"
        )
    if request.gpus is not None:
        raise InvalidRequest(
            f"gpus: {request.gpus} GPUs on any nodes need containers, and this site runs jobs with "
            f"{cluster.slurm.runtime}: request nnodes and nproc_per_node, the same number of GPUs on each node"
        )
    for node in cluster.nodes:
        if ":" in node.address and node.name not in request.exclude_nodes:
            raise InvalidRequest(
                f"workers find each other by the nodes' IPv4 addresses, and the address of {node.name}, "
                f"{node.address}, is not an IPv4 address: exclude the node (exclude_nodes), or ask the administrator "
                "for an IPv4 address in its [[nodes]] table"
            )
    if request.image not in {None, DEFAULT_IMAGE}:
        raise InvalidRequest(
            f"image {request.image}: this site runs jobs with {cluster.slurm.runtime}, all in the same environment"
        )
    profile = cluster.profile(request.profile or "")
    if profile is not None and profile.image != DEFAULT_IMAGE:
        raise InvalidRequest(
            f"profile {profile.name!r} has its own image, {profile.image}, and this site runs jobs with "
            f"{cluster.slurm.runtime}, all in the same environment: submit without a profile"
        )


def refuse_lease(cluster: ClusterSettings, site: SlurmSite | None, lease: LeaseRow) -> None:
    """Refuse a lease that no partition, account or QOS of the site allows; nothing, where the site is not known.

    Raises:
        InvalidRequest: With what there is.
    """
    resources = lease.resources
    shape = JobShape(
        nodes=resources.least_nodes,
        gpus_per_node=0 if resources.spread is not None else resources.gpus_per_node,
        spread=resources.spread,
        models=resources.models,
        cpus=resources.cpu_milli / 1000,
        memory_mib=resources.memory_mib,
        time_limit_s=lease.time_limit_s,
        terms=find_terms(cluster.slurm, cluster.profile(lease.profile or "")),
    )
    mistakes = [] if site is None else check_job_shape(cluster, site, shape)
    if mistakes:
        raise InvalidRequest("; ".join(mistakes))


def describe_cordon(cluster: ClusterSettings, node: str) -> str:
    """Return how a node is drained in Slurm, which would continue to give a node that only gpuhub cordons."""
    slurm_name = next((known.slurm_name for known in cluster.nodes if known.name == node), node)
    return (
        f"with Slurm, nodes are drained there: scontrol update nodename={slurm_name} state=drain reason=…; "
        "state=resume ends it"
    )
