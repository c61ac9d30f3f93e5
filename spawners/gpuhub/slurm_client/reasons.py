"""Explains Slurm's reasons why a job waits or has ended in plain English."""

from __future__ import annotations

import re

from gpuhub.slurm_client.models import SlurmJob, SlurmJobState

_WAITING = {
    "AccountingPolicy": "a limit of Slurm's accounting keeps it waiting",
    "AccountNotAllowed": "its account may not use this partition or QOS",
    "AssociationJobLimit": "its account has as many jobs as it may have",
    "AssociationResourceLimit": "its account has reached its limit of resources",
    "AssociationTimeLimit": "its account has used the time that it may use",
    "BadConstraints": "no node of the partition can ever run it",
    "BeginTime": "it may not start yet: Slurm waits before it starts a job again",
    "BurstBufferOperation": "its burst buffer could not be set up",
    "BurstBufferResources": "it waits for room in a burst buffer",
    "BurstBufferStageIn": "its files are being copied to a burst buffer",
    "Cleaning": "it was requeued, and its former nodes are still being cleaned",
    "Configuring": "its nodes are being started",
    "DeadLine": "it can no longer end before its deadline",
    "Dependency": "it waits for another job that it depends on",
    "DependencyNeverSatisfied": "the job that it depends on has failed: it will never start",
    "FedJobLock": "another cluster of the federation is handling it",
    "FrontEndDown": "Slurm's front end is down",
    "InactiveLimit": "it was not used for too long",
    "InvalidAccount": "Slurm does not know its account",
    "InvalidQOS": "Slurm does not know its QOS, or its account may not use it",
    "JobArrayTaskLimit": "the limit of concurrent jobs of its array is reached",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held; `scontrol release` releases it",
    "JobHoldMaxRequeue": "it was requeued too often and is held",
    "JobLaunchFailure": "it could not be started on its nodes",
    "Licenses": "it waits for a license",
    "MaxBBPerAccount": "its account has reached its limit of burst buffers",
    "MaxMemPerLimit": "it requests more memory than the partition allows",
    "MaxPoweredUpNodes": "the limit of powered-up nodes is reached",
    "NodeDown": "a node that it needs is down",
    "None": "Slurm has not considered it yet",
    "NonZeroExitCode": "it ended with an error",
    "OutOfMemory": "it used more memory than it had",
    "PartitionConfig": "the partition has no node with enough CPUs, memory or GPUs now",
    "PartitionDown": "its partition is switched off",
    "PartitionInactive": "its partition is switched off",
    "PartitionNodeLimit": "it requests more nodes than the partition allows, or some of them are down or drained",
    "PartitionTimeLimit": "its time limit is longer than the partition allows",
    "Priority": "jobs with a higher priority wait before it",
    "Prolog": "its nodes are being prepared",
    "QOSJobLimit": "its QOS has as many jobs as it may have",
    "QOSNotAllowed": "its QOS may not be used in this partition or with this account",
    "QOSResourceLimit": "its QOS has reached its limit of resources",
    "QOSTimeLimit": "its QOS has used the time that it may use",
    "QOSUsageThreshold": "the recent usage of its QOS is too high",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "it waits for its reservation to begin",
    "ReservationDeleted": "its reservation no longer exists",
    "Resources": "it is next, and waits for GPUs, CPUs or memory to be free",
    "SchedDefer": "it waits for Slurm's next full scheduling cycle",
    "SystemFailure": "something failed in Slurm or on a node",
    "TimeLimit": "its time limit was reached",
}
#: Families of reasons such as `QOSMaxGRESPerUser`, `AssocGrpGRESRunMinutes`, `MaxCpuPerAccount`.
_LIMIT = re.compile(
    r"(QOS|Assoc)?(Grp|Max|Min)(\w+?)(RunMinutes|Minutes|Secs)?(Limit)?(PerJob|PerUser|PerAccount|PerNode)?(Limit)?"
)
_WHOSE = {"QOS": "its QOS", "Assoc": "its account", None: "its account"}
_OF_WHAT = {
    "BB": "burst buffers",
    "Billing": "billing units",
    "CPU": "CPUs",
    "Cpu": "CPUs",
    "Energy": "energy",
    "GRES": "GPUs",
    "Job": "jobs",
    "Jobs": "jobs",
    "License": "licenses",
    "Mem": "memory",
    "Memory": "memory",
    "Node": "nodes",
    "Nodes": "nodes",
    "SubmitJob": "waiting jobs",
    "SubmitJobs": "waiting jobs",
    "Wall": "running time",
    "WallDuration": "running time",
}
_SCOPE = {
    "PerJob": " in one job",
    "PerUser": " for each user",
    "PerAccount": " for each account",
    "PerNode": " on a node",
}
#: Reasons that remain until an administrator changes a setting.
_NEVER_STARTS = frozenset(
    {
        "AccountNotAllowed",
        "BadConstraints",
        "DependencyNeverSatisfied",
        "InvalidAccount",
        "InvalidQOS",
        "MaxMemPerLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
        "ReservationDeleted",
    }
)
_ENDED = {
    SlurmJobState.BOOT_FAIL: "its nodes could not be started",
    SlurmJobState.CANCELLED: "its Slurm job was cancelled",
    SlurmJobState.COMPLETED: "its Slurm job has ended",
    SlurmJobState.COMPLETING: "its Slurm job was ended",
    SlurmJobState.DEADLINE: "its Slurm job could not end before its deadline",
    SlurmJobState.FAILED: "its Slurm job failed",
    SlurmJobState.NODE_FAIL: "a node of its Slurm job failed",
    SlurmJobState.OUT_OF_MEMORY: "its Slurm job used more memory than it had",
    SlurmJobState.PENDING: "Slurm has put its job back into the queue",
    SlurmJobState.PREEMPTED: "Slurm preempted its job for one with a higher priority",
    SlurmJobState.RUNNING: "its Slurm job runs",
    SlurmJobState.SUSPENDED: "Slurm has suspended its job",
    SlurmJobState.TIMEOUT: "the time limit of its Slurm job was reached",
}
#: States for which Slurm's reason adds information.
_EXPLAINED = frozenset({SlurmJobState.FAILED, SlurmJobState.BOOT_FAIL, SlurmJobState.NODE_FAIL, SlurmJobState.DEADLINE})


def explain_pending(job: SlurmJob) -> str:
    """Return why a job waits, as one line without a full stop. An unknown reason is quoted."""
    if job.state is not SlurmJobState.PENDING:
        return _ENDED[job.state]
    return _explain_reason(job.reason or "None")


def explain_end(job: SlurmJob | None) -> str:
    """Return why a job has ended or changed its state; None is a job that slurmctld no longer knows."""
    if job is None:
        return "Slurm no longer knows its job"
    text = _ENDED[job.state]
    if job.state in _EXPLAINED and job.reason not in {"", "None", "NodeDown", "DeadLine"}:
        return f"{text}: {_explain_reason(job.reason)}"
    return text


def can_never_start(job: SlurmJob) -> bool:
    """Return whether a pending job will never start; Slurm accepts such jobs without EnforcePartLimits."""
    if job.state is not SlurmJobState.PENDING:
        return False
    limit = _LIMIT.fullmatch(job.reason)
    return job.reason in _NEVER_STARTS or (limit is not None and (limit[6] == "PerJob" or limit[2] == "Min"))


def _explain_reason(reason: str) -> str:
    # `ReqNodeNotAvail, UnavailableNodes:sx[2-3]`: a reason and its details.
    name, _, rest = reason.partition(",")
    explanation = _WAITING.get(name) or _explain_limit(name)
    if explanation is None:
        return f"Slurm says: {reason}"
    return f"{explanation} ({rest.strip()})" if rest.strip() else explanation


def _explain_limit(word: str) -> str | None:
    match = _LIMIT.fullmatch(word)
    if match is None or match[3] not in _OF_WHAT:
        return None
    what = _OF_WHAT[match[3]] + (" × time" if match[4] else "")
    scope = _SCOPE.get(match[6] or "", "")
    if match[2] == "Min":
        return f"it requests fewer {what} than {_WHOSE[match[1]]} requires{scope} ({word})"
    return f"the limit of {_WHOSE[match[1]]} on {what}{scope} is reached ({word})"
