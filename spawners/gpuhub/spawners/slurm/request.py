"""Builds the Slurm submission of a notebook, and interprets the state of its job."""

from __future__ import annotations

from gpuhub.broker_api.schemas import ClusterView, LeaseView
from gpuhub.common.errors import Conflict
from gpuhub.config.identity import UserIdentity
from gpuhub.config.profiles import gpu_requirement
from gpuhub.config.settings import ClusterSettings, ProfileSettings
from gpuhub.scheduler.interface import GpuSlot, NodeCapacity, SchedulingRequest
from gpuhub.slurm_client.gpu_selection import build_submission, select_gpus
from gpuhub.slurm_client.jobs import build_submitter
from gpuhub.slurm_client.models import LIVE_STATES, SlurmJob, SlurmJobState, SlurmSite, SlurmSnapshot, SlurmSubmission
from gpuhub.web.text import build_card

_MIB = 1024**2


def build_notebook_submission(
    lease: LeaseView,
    profile: ProfileSettings,
    identity: UserIdentity,
    *,
    cluster: ClusterSettings,
    view: ClusterView,
    look: SlurmSnapshot,
    site: SlurmSite,
    name: str,
) -> SlurmSubmission:
    """Build the job that runs a notebook, without its script, which depends on the excluded nodes.

    Raises:
        Conflict: None of Slurm's nodes that gpuhub knows could ever run it.
    """
    request = SchedulingRequest(
        id=lease.id,
        owner=lease.owner,
        gpus_per_node=profile.gpu_count,
        requirement=gpu_requirement(profile),
        exclusive=profile.exclusive,
        priority=lease.priority,
        time_limit_s=profile.time_limit,
        cpu_milli=round(profile.cpus * 1000),
        memory_mib=profile.memory // _MIB,
    )
    choice = select_gpus(request, _build_capacities(cluster, view), look.nodes, cluster.slurm)
    if choice is None:
        raise Conflict("None of Slurm's nodes that gpuhub knows has such a GPU: choose another profile.")
    submitter = build_submitter(identity)
    return build_submission(
        request, choice, name=name, submitter=submitter, table=cluster.slurm, profile=profile, site=site
    )


def _build_capacities(cluster: ClusterSettings, view: ClusterView) -> dict[str, NodeCapacity]:
    """Return gpuhub's nodes by Slurm's names."""
    names = {node.name: node.slurm_name for node in cluster.nodes}
    return {
        names[node.name]: NodeCapacity(
            name=node.name,
            driver=node.driver,
            slots=tuple(
                GpuSlot(uuid=gpu.uuid, node=node.name, index=gpu.index, card=build_card(gpu)) for gpu in node.gpus
            ),
        )
        for node in view.nodes
        if node.name in names
    }


def is_live(job: SlurmJob | None) -> bool:
    """Return whether the job has its GPUs or may still get them; None is a job that slurmctld no longer knows."""
    return job is not None and job.state in LIVE_STATES and not job.is_completing


def compute_exit_code(job: SlurmJob | None) -> int | None:
    """Return the job's result for `Spawner.poll`: None while it is alive, 0 after success, else 1."""
    if is_live(job):
        return None
    return 0 if job is None or job.state is SlurmJobState.COMPLETED else 1
