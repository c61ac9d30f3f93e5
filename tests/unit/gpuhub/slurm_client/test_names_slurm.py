"""Which job stands for a lease."""

from __future__ import annotations

from typing import Any

from gpuhub.config.users.identity import UserIdentity
from gpuhub.slurm_client.job_control import build_submitter, find_lease_job
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState, Submitter


def job(**changes: Any) -> SlurmJob:
    values: dict[str, Any] = {"id": 7, "name": "gh-lease-l1", "user_id": 71001, "state": SlurmJobState.RUNNING}
    return SlurmJob(**(values | changes))


def test_job_is_identified_by_name_and_user() -> None:
    """Other users may use the name, and an ended job no longer counts."""
    own = job(id=3, state=SlurmJobState.PENDING)
    others = [job(id=1, user_id=71002), job(id=2, state=SlurmJobState.FAILED), job(id=4, name="other")]
    assert find_lease_job([*others, own], "gh-lease-l1", 71001) is own
    assert find_lease_job(others, "gh-lease-l1", 71001) is None
    assert find_lease_job([own], "gh-lease-l1", None) is None


def test_oldest_of_several_matching_jobs_is_used() -> None:
    """If a submission was repeated after a timeout, hub and broker choose the same job."""
    jobs = [job(id=9), job(id=8, state=SlurmJobState.PENDING), job(id=11)]
    assert find_lease_job(jobs, "gh-lease-l1", 71001) is jobs[1]
    assert find_lease_job(reversed(jobs), "gh-lease-l1", 71001) is jobs[1]


def test_submitter_is_identified_by_uid_and_gids() -> None:
    who = UserIdentity(name="ada", uid=71001, gid=71002, groups=(5, 6), group_names=("a", "b", "c"))
    assert build_submitter(who) == Submitter(name="ada", uid=71001, gid=71002, groups=(5, 6))
