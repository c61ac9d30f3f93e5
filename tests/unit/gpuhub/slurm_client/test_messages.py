"""Slurm's words in plain ones."""

from __future__ import annotations

import pytest

from gpuhub.slurm_client.messages import _WAITING, can_never_start, explain_end, explain_pending
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState


def job(reason: str = "", state: SlurmJobState = SlurmJobState.PENDING) -> SlurmJob:
    return SlurmJob(id=1, name="n", user_id=1000, state=state, reason=reason)


@pytest.mark.parametrize(
    ("reason", "plain"),
    [
        ("Resources", "it is next, and waits for GPUs, CPUs or memory to be free"),
        ("Priority", "jobs with a higher priority are ahead of it"),
        ("", "Slurm has not considered it yet"),
        ("None", "Slurm has not considered it yet"),
        ("JobHeldUser", "it is held; `scontrol release` releases it"),
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
        ("QOSMinGRES", "it requests fewer GPUs than its QOS requires (QOSMinGRES)"),
        ("MaxCpuPerAccount", "the limit of its account on CPUs for each account is reached (MaxCpuPerAccount)"),
        ("FutureWord", "Slurm says: FutureWord"),
        ("AssocGrpUnicorns", "Slurm says: AssocGrpUnicorns"),
        ("Nodes required for job are DOWN, DRAINED", "Slurm says: Nodes required for job are DOWN, DRAINED"),
    ],
)
def test_slurm_pending_reasons_are_explained(reason: str, plain: str) -> None:
    assert explain_pending(job(reason)) == plain


def test_explanations_are_one_line_without_a_full_stop() -> None:
    for reason in _WAITING:
        said = explain_pending(job(reason))
        assert said
        assert "\n" not in said
        assert not said.endswith(".")
    for state in SlurmJobState:
        for reason in ("", "None", "SystemFailure", "TimeLimit"):
            said = explain_end(job(reason, state))
            assert said
            assert "\n" not in said
            assert not said.endswith(".")


@pytest.mark.parametrize(
    ("state", "reason", "plain"),
    [
        (SlurmJobState.CANCELLED, "Priority", "its Slurm job was cancelled"),
        (SlurmJobState.TIMEOUT, "TimeLimit", "the time limit of its Slurm job was reached"),
        (SlurmJobState.PREEMPTED, "", "Slurm preempted its job for one with a higher priority"),
        (SlurmJobState.NODE_FAIL, "NodeDown", "a node of its Slurm job failed"),
        (SlurmJobState.PENDING, "BeginTime", "Slurm requeued its job"),
        (SlurmJobState.COMPLETING, "", "its Slurm job was ended"),
        (SlurmJobState.COMPLETED, "", "its Slurm job has ended"),
        (SlurmJobState.FAILED, "BadConstraints", "its Slurm job failed: no node of the partition can ever run it"),
        (SlurmJobState.FAILED, "Strange", "its Slurm job failed: Slurm says: Strange"),
        (SlurmJobState.OUT_OF_MEMORY, "OutOfMemory", "its Slurm job ran out of memory"),
    ],
)
def test_end_of_a_slurm_job_is_explained(state: SlurmJobState, reason: str, plain: str) -> None:
    assert explain_end(job(reason, state)) == plain


def test_end_of_an_unknown_job_is_explained() -> None:
    assert explain_end(None) == "Slurm no longer knows its job"


@pytest.mark.parametrize(
    "reason", ["PartitionTimeLimit", "BadConstraints", "InvalidQOS", "QOSMaxGRESPerJob", "QOSMinGRES"]
)
def test_reasons_that_can_never_resolve(reason: str) -> None:
    assert can_never_start(job(reason))
    assert not can_never_start(job(reason, SlurmJobState.RUNNING))


@pytest.mark.parametrize(
    "reason",
    ["", "Resources", "Priority", "PartitionNodeLimit", "PartitionConfig", "QOSGrpGRES", "QOSMaxGRESPerUser", "New"],
)
def test_reasons_that_can_resolve(reason: str) -> None:
    assert not can_never_start(job(reason))
