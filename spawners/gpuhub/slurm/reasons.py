"""Slurm's words for why a job waits and why it ended, in plain ones. Pure."""

from __future__ import annotations

import re

from gpuhub.slurm.values import Job, State

_WAITING = {
    "AccountingPolicy": "a limit of Slurm's accounting keeps it waiting",
    "AccountNotAllowed": "its account may not use this partition or QOS",
    "AssociationJobLimit": "its account has as many jobs as it may have",
    "AssociationResourceLimit": "its account has as much as it may have",
    "AssociationTimeLimit": "its account has used the time that it may use",
    "BadConstraints": "no node of the partition can ever run it",
    "BeginTime": "it may not start yet: Slurm waits a while before it starts a job again",
    "BurstBufferOperation": "its burst buffer could not be set up",
    "BurstBufferResources": "it waits for room in a burst buffer",
    "BurstBufferStageIn": "its files are being brought to a burst buffer",
    "Cleaning": "it was put back into the queue, and its former nodes are still being cleaned",
    "Configuring": "its nodes are being started",
    "DeadLine": "it can't end before its deadline any more",
    "Dependency": "it waits for another job that it depends on",
    "DependencyNeverSatisfied": "the job that it depends on has failed: it will never start",
    "FedJobLock": "another cluster of the federation is looking at it",
    "FrontEndDown": "Slurm's front end is down",
    "InactiveLimit": "it was not used for too long",
    "InvalidAccount": "Slurm does not know its account",
    "InvalidQOS": "Slurm does not know its QOS, or its account may not use it",
    "JobArrayTaskLimit": "as many jobs of its array run as may run at once",
    "JobHeldAdmin": "an administrator holds it back",
    "JobHeldUser": "it is held back; `scontrol release` lets it go on",
    "JobHoldMaxRequeue": "it was put back into the queue too often, and is held back",
    "JobLaunchFailure": "it could not be started on its nodes",
    "Licenses": "it waits for a license",
    "MaxBBPerAccount": "its account has as much of the burst buffers as it may have",
    "MaxMemPerLimit": "it asks for more memory than the partition gives",
    "MaxPoweredUpNodes": "as many nodes are switched on as may be",
    "NodeDown": "a node that it needs is down",
    "None": "Slurm has not looked at it yet",
    "NonZeroExitCode": "it ended with an error",
    "OutOfMemory": "it used more memory than it had",
    "PartitionConfig": "the partition has no node with so many CPUs, so much memory or so many GPUs at present",
    "PartitionDown": "its partition is switched off",
    "PartitionInactive": "its partition is switched off",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives, or some of them are down or drained",
    "PartitionTimeLimit": "its time limit is longer than the partition allows",
    "Priority": "jobs with a higher priority wait before it",
    "Prolog": "its nodes are being prepared",
    "QOSJobLimit": "its QOS has as many jobs as it may have",
    "QOSNotAllowed": "its QOS may not be used in this partition or with this account",
    "QOSResourceLimit": "its QOS has as much as it may have",
    "QOSTimeLimit": "its QOS has used the time that it may use",
    "QOSUsageThreshold": "its QOS has used too much lately",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "it waits for its reservation to begin",
    "ReservationDeleted": "its reservation is no longer there",
    "Resources": "it is next, and waits for GPUs, CPUs or memory to be free",
    "SchedDefer": "Slurm lets it wait for its next full look at the queue",
    "SystemFailure": "something failed in Slurm or on a node",
    "TimeLimit": "its time limit was reached",
}
#: The families such as `QOSMaxGRESPerUser`, `AssocGrpGRESRunMinutes`, `MaxCpuPerAccount`.
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
#: These stay as they are until an administrator changes something.
_HOPELESS = frozenset(
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
    State.BOOT_FAIL: "its nodes could not be started",
    State.CANCELLED: "its Slurm job was cancelled",
    State.COMPLETED: "its Slurm job has ended",
    State.COMPLETING: "its Slurm job was ended",
    State.DEADLINE: "its Slurm job could not end before its deadline",
    State.FAILED: "its Slurm job failed",
    State.NODE_FAIL: "a node of its Slurm job failed",
    State.OUT_OF_MEMORY: "its Slurm job used more memory than it had",
    State.PENDING: "Slurm has put its job back into the queue",
    State.PREEMPTED: "Slurm took its GPUs for a job that goes first",
    State.RUNNING: "its Slurm job runs",
    State.SUSPENDED: "Slurm has suspended its job",
    State.TIMEOUT: "the time limit of its Slurm job was reached",
}
#: States for whose reason Slurm has a word that says more.
_EXPLAINED = frozenset({State.FAILED, State.BOOT_FAIL, State.NODE_FAIL, State.DEADLINE})


def explain(job: Job) -> str:
    """Why a job waits: one line without a full stop. A word that is not known here is quoted."""
    if job.state is not State.PENDING:
        return _ENDED[job.state]
    return _explain(job.reason or "None")


def explain_end(job: Job | None) -> str:
    """Why a job has ended, or is not what it was; None for one that slurmctld does not know any more."""
    if job is None:
        return "Slurm does not know its job any more"
    said = _ENDED[job.state]
    if job.state in _EXPLAINED and job.reason not in {"", "None", "NodeDown", "DeadLine"}:
        return f"{said}: {_explain(job.reason)}"
    return said


def is_hopeless(job: Job) -> bool:
    """Whether a job that waits will wait for ever: without EnforcePartLimits Slurm takes jobs that it never starts."""
    if job.state is not State.PENDING:
        return False
    limit = _LIMIT.fullmatch(job.reason)
    return job.reason in _HOPELESS or (limit is not None and (limit[6] == "PerJob" or limit[2] == "Min"))


def _explain(reason: str) -> str:
    # `ReqNodeNotAvail, UnavailableNodes:sx[2-3]`: a word, and what it is about.
    word, _, rest = reason.partition(",")
    plain = _WAITING.get(word) or _explain_limit(word)
    if plain is None:
        return f"Slurm says: {reason}"
    return f"{plain} ({rest.strip()})" if rest.strip() else plain


def _explain_limit(word: str) -> str | None:
    match = _LIMIT.fullmatch(word)
    if match is None or match[3] not in _OF_WHAT:
        return None
    what = _OF_WHAT[match[3]] + (" × time" if match[4] else "")
    scope = _SCOPE.get(match[6] or "", "")
    if match[2] == "Min":
        return f"it asks for fewer {what} than {_WHOSE[match[1]]} wants{scope} ({word})"
    return f"the limit of {_WHOSE[match[1]]} on {what}{scope} is reached ({word})"
