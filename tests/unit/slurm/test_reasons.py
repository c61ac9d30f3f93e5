"""Slurm's words in plain ones."""

from __future__ import annotations

import pytest

from gpuhub.slurm.reasons import _WAITING, explain, explain_end, is_hopeless
from gpuhub.slurm.values import Job, State


def job(reason: str = "", state: State = State.PENDING) -> Job:
    return Job(id=1, name="n", user_id=1000, state=state, reason=reason)


@pytest.mark.parametrize(
    ("reason", "plain"),
    [
        ("Resources", "it is next, and waits for GPUs, CPUs or memory to be free"),
        ("Priority", "jobs with a higher priority wait before it"),
        ("", "Slurm has not looked at it yet"),
        ("None", "Slurm has not looked at it yet"),
        ("JobHeldUser", "it is held back; `scontrol release` lets it go on"),
        (
            "ReqNodeNotAvail, UnavailableNodes:sx[2-3]",
            "nodes that it needs are down, drained or reserved (UnavailableNodes:sx[2-3])",
        ),
        ("QOSMaxGRESPerUser", "the limit of its QOS on GPUs for each user is reached (QOSMaxGRESPerUser)"),
        ("QOSGrpGRES", "the limit of its QOS on GPUs is reached (QOSGrpGRES)"),
        ("AssocGrpGRESRunMinutes", "the limit of its account on GPUs × time is reached (AssocGrpGRESRunMinutes)"),
        ("AssocMaxJobsLimit", "the limit of its account on jobs is reached (AssocMaxJobsLimit)"),
        ("AssocGrpCPUMinutesLimit", "the limit of its account on CPUs × time is reached (AssocGrpCPUMinutesLimit)"),
        (
            "QOSMaxWallDurationPerJobLimit",
            "the limit of its QOS on running time in one job is reached (QOSMaxWallDurationPerJobLimit)",
        ),
        (
            "QOSMaxSubmitJobPerUserLimit",
            "the limit of its QOS on waiting jobs for each user is reached (QOSMaxSubmitJobPerUserLimit)",
        ),
        ("QOSMinGRES", "it asks for fewer GPUs than its QOS wants (QOSMinGRES)"),
        ("MaxCpuPerAccount", "the limit of its account on CPUs for each account is reached (MaxCpuPerAccount)"),
        ("FutureWord", "Slurm says: FutureWord"),
        ("AssocGrpUnicorns", "Slurm says: AssocGrpUnicorns"),
        ("Nodes required for job are DOWN, DRAINED", "Slurm says: Nodes required for job are DOWN, DRAINED"),
    ],
)
def test_why_it_waits(reason: str, plain: str) -> None:
    assert explain(job(reason)) == plain


def test_every_explanation_is_one_line_without_a_full_stop() -> None:
    for reason in _WAITING:
        said = explain(job(reason))
        assert said
        assert "\n" not in said
        assert not said.endswith(".")
    for state in State:
        for reason in ("", "None", "SystemFailure", "TimeLimit"):
            said = explain_end(job(reason, state))
            assert said
            assert "\n" not in said
            assert not said.endswith(".")


@pytest.mark.parametrize(
    ("state", "reason", "plain"),
    [
        (State.CANCELLED, "Priority", "its Slurm job was cancelled"),
        (State.TIMEOUT, "TimeLimit", "the time limit of its Slurm job was reached"),
        (State.PREEMPTED, "", "Slurm took its GPUs for a job that goes first"),
        (State.NODE_FAIL, "NodeDown", "a node of its Slurm job failed"),
        (State.PENDING, "BeginTime", "Slurm has put its job back into the queue"),
        (State.COMPLETING, "", "its Slurm job was ended"),
        (State.COMPLETED, "", "its Slurm job has ended"),
        (State.FAILED, "BadConstraints", "its Slurm job failed: no node of the partition can ever run it"),
        (State.FAILED, "Strange", "its Slurm job failed: Slurm says: Strange"),
        (State.OUT_OF_MEMORY, "OutOfMemory", "its Slurm job used more memory than it had"),
    ],
)
def test_why_it_ended(state: State, reason: str, plain: str) -> None:
    assert explain_end(job(reason, state)) == plain


def test_one_that_nobody_knows() -> None:
    assert explain_end(None) == "Slurm does not know its job any more"


@pytest.mark.parametrize(
    "reason", ["PartitionTimeLimit", "BadConstraints", "InvalidQOS", "QOSMaxGRESPerJob", "QOSMinGRES"]
)
def test_hopeless(reason: str) -> None:
    assert is_hopeless(job(reason))
    assert not is_hopeless(job(reason, State.RUNNING))


@pytest.mark.parametrize(
    "reason",
    ["", "Resources", "Priority", "PartitionNodeLimit", "PartitionConfig", "QOSGrpGRES", "QOSMaxGRESPerUser", "New"],
)
def test_not_hopeless(reason: str) -> None:
    assert not is_hopeless(job(reason))
