"""What is asked of Slurm for a notebook, and what its answers mean for the notebook. Pure."""

from __future__ import annotations

from gpuhub.broker.schemas import ClusterView, Lease
from gpuhub.containers.telling import card_of
from gpuhub.engines.base import NodeSupply, Request, Slot
from gpuhub.errors import Conflict
from gpuhub.identity import Identity
from gpuhub.settings import Cluster, Profile, gpu_requirement
from gpuhub.slurm.choice import build_submission, choose
from gpuhub.slurm.owners import build_submitter
from gpuhub.slurm.values import LIVE, Job, Look, Site, State, Submission

_MIB = 1024**2


def build_notebook_submission(
    lease: Lease,
    profile: Profile,
    identity: Identity,
    *,
    cluster: Cluster,
    view: ClusterView,
    look: Look,
    site: Site,
    name: str,
) -> Submission:
    """The job that runs a notebook, without its script yet: who is left out decides what is in it.

    Raises:
        Conflict: none of Slurm's nodes that gpuhub knows could ever run it.
    """
    request = Request(
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
    choice = choose(request, _supplies(cluster, view), look.nodes, cluster.slurm)
    if choice is None:
        raise Conflict("None of Slurm's nodes that gpuhub knows has such a GPU: choose another profile.")
    submitter = build_submitter(identity)
    return build_submission(
        request, choice, name=name, submitter=submitter, table=cluster.slurm, profile=profile, site=site
    )


def _supplies(cluster: Cluster, view: ClusterView) -> dict[str, NodeSupply]:
    """Our nodes by Slurm's names."""
    names = {node.name: node.slurm_name for node in cluster.nodes}
    return {
        names[node.name]: NodeSupply(
            name=node.name,
            driver=node.driver,
            slots=tuple(Slot(uuid=gpu.uuid, node=node.name, index=gpu.index, card=card_of(gpu)) for gpu in node.gpus),
        )
        for node in view.nodes
        if node.name in names
    }


def is_live(job: Job | None) -> bool:
    """Whether it may still get, or has, its GPUs; None is a job that slurmctld knows no more."""
    return job is not None and job.state in LIVE and not job.is_completing


def exit_code(job: Job | None) -> int | None:
    """As `Spawner.poll` says it: None while the job is alive."""
    if is_live(job):
        return None
    return 0 if job is None or job.state is State.COMPLETED else 1
