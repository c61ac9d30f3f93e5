"""Whose a job is: a user as one who submits, and the job that stands for a user's lease. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpuhub.identity import Identity
from gpuhub.slurm.values import LIVE, Job, Submitter


def build_submitter(identity: Identity) -> Submitter:
    """A user as one who submits jobs; Slurm's machines must know the same numbers."""
    return Submitter(name=identity.name, uid=identity.uid, gid=identity.gid, groups=identity.groups)


def find_own(jobs: Iterable[Job], name: str, uid: int | None) -> Job | None:
    """The job that stands for the lease whose name it carries: of those that wait or run the oldest, should there be
    several after a submission of which nobody knew whether it went through. By its name alone anybody's could be taken
    for it, so it must be the owner's, by UID; None for nobody's.
    """
    own = [job for job in jobs if job.name == name and job.user_id == uid and job.state in LIVE]
    return min(own, key=lambda job: job.id, default=None)
