"""Which job stands for a lease."""

from __future__ import annotations

from typing import Any

from gpuhub.identity import Identity
from gpuhub.slurm.owners import build_submitter, find_own
from gpuhub.slurm.values import Job, State, Submitter


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {"id": 7, "name": "gh-lease-l1", "user_id": 61001, "state": State.RUNNING}
    return Job(**(values | changes))


def test_a_job_is_known_by_name_and_user() -> None:
    """Anybody may give a job that name; one that has ended is no longer it."""
    own = job(id=3, state=State.PENDING)
    others = [job(id=1, user_id=61002), job(id=2, state=State.FAILED), job(id=4, name="other")]
    assert find_own([*others, own], "gh-lease-l1", 61001) is own
    assert find_own(others, "gh-lease-l1", 61001) is None
    assert find_own([own], "gh-lease-l1", None) is None


def test_of_several_the_oldest_counts_however_they_are_listed() -> None:
    """A submission of which nobody knew whether it went through was made twice; hub and broker choose the same one."""
    jobs = [job(id=9), job(id=8, state=State.PENDING), job(id=11)]
    assert find_own(jobs, "gh-lease-l1", 61001) is jobs[1]
    assert find_own(reversed(jobs), "gh-lease-l1", 61001) is jobs[1]


def test_who_submits_is_told_by_numbers() -> None:
    who = Identity(name="ada", uid=61001, gid=61002, groups=(5, 6), group_names=("a", "b", "c"))
    assert build_submitter(who) == Submitter(name="ada", uid=61001, gid=61002, groups=(5, 6))
