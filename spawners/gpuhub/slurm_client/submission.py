"""Formats a submission as sbatch's arguments and as slurmrestd's document; neither contains a user's free text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpuhub.slurm_client.interface import SlurmRefused
from gpuhub.slurm_client.models import SlurmSubmission

#: Signal that ends `HOLDER_SCRIPT`, and any script without a handler; by name, because its number differs by machine.
END_SIGNAL = "USR1"
#: Holds a job's GPUs until `END_SIGNAL`. It ignores SIGTERM (scancel, time limit, preemption), so that programs can be
#: stopped before SIGKILL. `sleep` ignores SIGTERM as well, and would keep the job from ending.
HOLDER_SCRIPT = f"""#!/bin/sh
trap '' HUP INT TERM
trap 'kill -9 "$!"; exit 0' {END_SIGNAL}
sleep 2147483647 &
wait "$!"
"""
#: Comment of a started job; setting it makes slurmctld store the job's state.
PERSISTED_COMMENT = "gpuhub"
#: Oldest supported version of slurmrestd's API, v0.0.38 of Slurm 22.05.
OLDEST_REST = 38
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,127}")
_NOWHERE = "/dev/null"
#: Environment of the script, which slurmrestd requires.
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


def format_sbatch(submission: SlurmSubmission) -> list[str]:
    """Return sbatch's command line; the script goes to its standard input.

    Raises:
        SlurmRefused: A name or number is not valid in Slurm.
    """
    _check(submission)
    command = [
        "sbatch",
        "--parsable",
        # sbatch gets only PATH and similar variables here. With NONE or a list of names, each start of a job would run
        # a login shell of the user for the others.
        "--export=ALL",
        "--no-requeue",
        "--chdir=/",
        f"--output={_NOWHERE}",
        f"--error={_NOWHERE}",
        f"--input={_NOWHERE}",
        f"--job-name={submission.name}",
    ]
    if submission.spread is None:
        least, most = submission.min_nodes, submission.nodes
        command.append(f"--nodes={least}-{most}")
    # One task per node is Slurm's default; stated explicitly, a range of nodes would get its smallest number only.
    command.append(f"--cpus-per-task={submission.cpus}")
    if submission.memory_mib:
        command.append(f"--mem={submission.memory_mib}M")
    if submission.spread is not None:
        command.append(f"--gpus={_format_gpus(submission, submission.spread)}")
    elif submission.gpus_per_node:
        command.append(f"--gres=gpu:{_format_gpus(submission, submission.gpus_per_node)}")
    minutes = _minutes(submission)
    if minutes is not None:
        command.append(f"--time={minutes}")
    for option in ("partition", "account", "qos", "reservation"):
        value = getattr(submission, option)
        if value is not None:
            command.append(f"--{option}={value}")
    if submission.exclude:
        command.append(f"--exclude={','.join(submission.exclude)}")
    if submission.survives_nodes:
        command.append("--no-kill")
    if submission.exclusive:
        command.append("--exclusive")
    if submission.nice:
        command.append(f"--nice={submission.nice}")
    return command


def format_rest(submission: SlurmSubmission, version: int = OLDEST_REST) -> dict[str, Any]:
    """Return the body of slurmrestd's `/slurm/v0.0.VERSION/job/submit`.

    Raises:
        SlurmRefused: A name or number is not valid in Slurm, or this version cannot express the request.
    """
    _check(submission)
    job: dict[str, Any] = {
        "name": submission.name,
        "current_working_directory": "/",
        "standard_input": _NOWHERE,
        "standard_output": _NOWHERE,
        "standard_error": _NOWHERE,
        "requeue": False,
        "cpus_per_task": submission.cpus,
    }
    for option in ("partition", "account", "qos", "reservation"):
        value = getattr(submission, option)
        if value is not None:
            job[option] = value
    if submission.nice:
        job["nice"] = submission.nice
    if version > OLDEST_REST:
        return {"script": submission.script, "job": job | _build_later_request(submission)}
    return {"script": submission.script, "job": job | _build_oldest_request(submission)}


def format_rest_nodes(nodes: Sequence[str], version: int = OLDEST_REST) -> dict[str, Any]:
    """Return the body of slurmrestd's `/slurm/v0.0.VERSION/job/ID` that shrinks a running job to these nodes."""
    if version > OLDEST_REST:
        return {"required_nodes": list(nodes)}
    return {"nodelist": ",".join(nodes)}


def _build_oldest_request(submission: SlurmSubmission) -> dict[str, Any]:
    job: dict[str, Any] = {"environment": _ENVIRONMENT}
    if submission.exclude:
        # In this version excluded_nodes is disabled, and this undocumented name works.
        job["exclude_nodes"] = ",".join(submission.exclude)
    if submission.spread is not None:
        if submission.gpu_type is None:
            # It accepts "gpus": "TYPE:N", and cannot read a number without a type.
            raise SlurmRefused("slurmrestd of Slurm 22.05 cannot request GPUs of any type on any nodes: choose a type")
        job["gpus"] = _format_gpus(submission, submission.spread)
    else:
        # The documented form is a list, which it ignores.
        job["nodes"] = f"{submission.min_nodes}-{submission.nodes}"
        if submission.gpus_per_node:
            job["gres"] = f"gpu:{_format_gpus(submission, submission.gpus_per_node)}"
    if submission.memory_mib:
        job["memory_per_node"] = submission.memory_mib
    minutes = _minutes(submission)
    if minutes is not None:
        job["time_limit"] = minutes
    if submission.survives_nodes:
        job["no_kill"] = "set"
    if submission.exclusive:
        job["exclusive"] = "exclusive"
    return job


def _build_later_request(submission: SlurmSubmission) -> dict[str, Any]:
    job: dict[str, Any] = {"environment": [f"{name}={value}" for name, value in _ENVIRONMENT.items()]}
    if submission.exclude:
        job["excluded_nodes"] = list(submission.exclude)
    if submission.spread is not None:
        job["tres_per_job"] = f"gres/gpu:{_format_gpus(submission, submission.spread)}"
    else:
        job["minimum_nodes"], job["maximum_nodes"] = submission.min_nodes, submission.nodes
        if submission.gpus_per_node:
            job["tres_per_node"] = f"gres/gpu:{_format_gpus(submission, submission.gpus_per_node)}"
    if submission.memory_mib:
        job["memory_per_node"] = {"set": True, "infinite": False, "number": submission.memory_mib}
    minutes = _minutes(submission)
    if minutes is not None:
        job["time_limit"] = {"set": True, "infinite": False, "number": minutes}
    if submission.survives_nodes:
        job["kill_on_node_fail"] = False
    if submission.exclusive:
        job["shared"] = ["none"]
    return job


def _format_gpus(submission: SlurmSubmission, count: int) -> str:
    return f"{count}" if submission.gpu_type is None else f"{submission.gpu_type}:{count}"


def _minutes(submission: SlurmSubmission) -> int | None:
    """Return the time limit in minutes, rounded up."""
    return None if submission.time_limit_s is None else -(-submission.time_limit_s // 60)


def _check(submission: SlurmSubmission) -> None:
    """Refuse invalid names and numbers: commas and blanks have a meaning in Slurm's arguments."""
    options = (submission.partition, submission.account, submission.qos, submission.reservation, submission.gpu_type)
    for name in (submission.name, *submission.exclude, *(option for option in options if option is not None)):
        if not _NAME.fullmatch(name):
            raise SlurmRefused(f"{name!r} is not a name for Slurm: only letters, digits and _ . @ + - are allowed")
    counts = {
        "nodes": submission.nodes,
        "min_nodes": submission.min_nodes,
        "cpus": submission.cpus,
        "spread": 1 if submission.spread is None else submission.spread,
        "time_limit_s": 1 if submission.time_limit_s is None else submission.time_limit_s,
    }
    wrong = [name for name, value in counts.items() if value < 1]
    if wrong or min(submission.gpus_per_node, submission.memory_mib) < 0:
        raise SlurmRefused(f"a Slurm job needs at least one of each: {', '.join(wrong) or 'no number below zero'}")
    if submission.min_nodes > submission.nodes:
        raise SlurmRefused(f"at least {submission.min_nodes} nodes are more than at most {submission.nodes}")
    if not submission.script.startswith("#!") or "\0" in submission.script:
        raise SlurmRefused("a Slurm job's script begins with #! and its interpreter")
