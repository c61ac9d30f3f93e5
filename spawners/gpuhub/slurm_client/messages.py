"""Slurm's messages: why a job waits or has ended, for users; errors as gpuhub's exceptions; and its version."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from gpuhub.common.errors import SetupError
from gpuhub.slurm_client.interface import SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.models import SlurmJob, SlurmJobState

_WAITING = {
    "AccountingPolicy": "a limit of Slurm's accounting keeps it waiting",
    "AccountNotAllowed": "its account may not use this partition or QOS",
    "AssociationJobLimit": "its account has reached its limit of jobs",
    "AssociationResourceLimit": "its account has reached its limit of resources",
    "AssociationTimeLimit": "its account has used up its time",
    "BadConstraints": "no node of the partition can ever run it",
    "BeginTime": "its begin time has not been reached; Slurm also sets one when it requeues a job",
    "BurstBufferOperation": "its burst buffer could not be set up",
    "BurstBufferResources": "it waits for room in a burst buffer",
    "BurstBufferStageIn": "its files are being copied to a burst buffer",
    "Cleaning": "it was requeued, and its former nodes are still being cleaned",
    "Configuring": "its nodes are being started",
    "DeadLine": "it can no longer finish before its deadline",
    "Dependency": "it waits for another job that it depends on",
    "DependencyNeverSatisfied": "the job that it depends on has failed: it will never start",
    "FedJobLock": "another cluster of the federation is handling it",
    "FrontEndDown": "Slurm's front end is down",
    "InactiveLimit": "it was inactive for too long",
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
    "OutOfMemory": "it ran out of memory",
    "PartitionConfig": "the partition has no node with enough CPUs, memory or GPUs now",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it requests more nodes than the partition allows, or some of them are down or drained",
    "PartitionTimeLimit": "its time limit is longer than the partition allows",
    "Priority": "jobs with a higher priority are ahead of it",
    "Prolog": "its nodes are being prepared",
    "QOSJobLimit": "its QOS has reached its limit of jobs",
    "QOSNotAllowed": "its QOS may not be used in this partition or with this account",
    "QOSResourceLimit": "its QOS has reached its limit of resources",
    "QOSTimeLimit": "its QOS has used up its time",
    "QOSUsageThreshold": "the recent usage of its QOS is too high",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "it waits for its reservation to begin",
    "ReservationDeleted": "its reservation no longer exists",
    "Resources": "it is next, and waits for GPUs, CPUs or memory to be free",
    "SchedDefer": "it waits for Slurm's next full scheduling cycle",
    "SystemFailure": "Slurm or a node had a failure",
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
    SlurmJobState.DEADLINE: "its Slurm job could not finish before its deadline",
    SlurmJobState.FAILED: "its Slurm job failed",
    SlurmJobState.NODE_FAIL: "a node of its Slurm job failed",
    SlurmJobState.OUT_OF_MEMORY: "its Slurm job ran out of memory",
    SlurmJobState.PENDING: "Slurm requeued its job",
    SlurmJobState.PREEMPTED: "Slurm preempted its job for one with a higher priority",
    SlurmJobState.RUNNING: "its Slurm job is running",
    SlurmJobState.SUSPENDED: "Slurm suspended its job",
    SlurmJobState.TIMEOUT: "the time limit of its Slurm job was reached",
}
#: States for which Slurm's reason adds information.
_EXPLAINED = frozenset({SlurmJobState.FAILED, SlurmJobState.BOOT_FAIL, SlurmJobState.NODE_FAIL, SlurmJobState.DEADLINE})
#: Oldest supported version, the first with `--json` and slurmrestd's v0.0.38.
MIN_VERSION = (22, 5)
_T = TypeVar("_T")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
#: Prefixes of messages, such as `sbatch: error: ` and `slurm_load_jobs error: `.
_PREFIX = re.compile(r"^(?:[\w-]+: )?(?:error|fatal): |^\w+ error: ")
#: Messages of a Slurm that does not answer, or cannot yet. The message about a job's missing database index is not one:
#: slurmctld does answer then, and without slurmdbd the index is never set again once the job has released nodes.
_UNREACHABLE = re.compile(
    r"unable to contact slurm|connect failure|connection (?:failure|refused|timed out|reset)|socket timed out"
    r"|if munged is up|munge (?:en|de)code|auth_munge|protocol authentication|unexpected message received"
    r"|zero bytes were transmitted|controller is in standby|not available right now(?!, the db index)|unspecified error"
    r"|temporarily (?:unable|unavailable|disabled)|unable to (?:establish|process) configuration|cannot stat file"
    r"|sending (?:persistconninit|message)|database connection|dns srv",
    re.IGNORECASE,
)
#: Messages about a job that has ended, or that slurmctld does not know.
_JOB_OVER = re.compile(
    r"invalid job id|already (?:finished|completing|done)|already in a? ?final|(?:not|can not) be altered now"
    r"|job/step already|not? (?:pending|running)",
    re.IGNORECASE,
)


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


def parse_output(parse: Callable[..., _T], *arguments: object) -> _T:
    """Return a parser's result for Slurm's output.

    Raises:
        SlurmUnreachable: The parser fails, so the state of Slurm's jobs is unknown.
    """
    try:
        return parse(*arguments)
    except ValueError as error:
        raise SlurmUnreachable(f"Slurm's answer has an unknown form: {str(error)[:300]}") from error


def is_unreachable(message: str) -> bool:
    """Return whether a message reports that Slurm does not answer; the command's other output is invalid then."""
    return _UNREACHABLE.search(message) is not None


def is_job_over(message: str) -> bool:
    """Return whether a refusal means that the job has ended or is unknown."""
    return _JOB_OVER.search(message) is not None


def shorten_error(message: str) -> str:
    """Return an error's lines without prefixes and duplicates."""
    lines = dict.fromkeys(_PREFIX.sub("", line.strip()) for line in message.splitlines())
    return "; ".join(line for line in lines if line)[:500]


def parse_refusal(message: str) -> SlurmRefused | SlurmUnreachable:
    """Return the exception for the output of a failed command."""
    short = shorten_error(message) or "a Slurm command failed without a message"
    if is_unreachable(message):
        return SlurmUnreachable(f"Slurm does not answer: {short}")
    return SlurmRefused(f"Slurm says: {short}")


def parse_version(text: str) -> tuple[int, ...]:
    """Return the version in a text such as `slurm-wlm 22.05.8`.

    Raises:
        SetupError: The text has no version.
    """
    match = _VERSION.search(text)
    if match is None:
        raise SetupError(f"Slurm's version is not in {text[:100]!r}")
    return tuple(int(part) for part in match.groups() if part is not None)


def require_version(version: tuple[int, ...]) -> None:
    """Raise SetupError if Slurm's version is too old."""
    if version < MIN_VERSION:
        raise SetupError(f"Slurm {format_version(version)} is too old: 22.05 or newer is needed")


def format_version(version: tuple[int, ...]) -> str:
    """Return the version in Slurm's form, such as 22.05.8."""
    year, month, *further = version
    return ".".join([f"{year}", f"{month:02d}", *map(str, further)])
