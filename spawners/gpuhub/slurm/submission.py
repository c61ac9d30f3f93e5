"""A job to submit, as sbatch's arguments and as slurmrestd's document. Pure; no text of a user's is in either."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpuhub.slurm.api import SlurmRefused
from gpuhub.slurm.values import Submission

#: Ends what `HOLDER` runs, and any script that does nothing about it; no shell knows it by a number on all machines.
END_SIGNAL = "USR1"
#: Holds a job's GPUs until it is told to end. SIGTERM (scancel, time limit, preemption) leaves it alone until SIGKILL
#: comes: what uses the GPUs is stopped meanwhile. `sleep` ignores SIGTERM too, and would keep the job from ending.
HOLDER = f"""#!/bin/sh
trap '' HUP INT TERM
trap 'kill -9 "$!"; exit 0' {END_SIGNAL}
sleep 2147483647 &
wait "$!"
"""
#: A job's comment once its start is known: an update makes slurmctld store its state.
KEPT = "gpuhub"
#: The oldest of slurmrestd's versions that is known, v0.0.38 of Slurm 22.05.
OLDEST_REST = 38
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,127}")
_NOWHERE = "/dev/null"
#: All that the script's environment has: slurmrestd wants one.
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


def format_sbatch(submission: Submission) -> list[str]:
    """sbatch's whole command line; the script goes to its standard input.

    Raises:
        SlurmRefused: a name or a number in it is not one that Slurm can have.
    """
    _check(submission)
    command = [
        "sbatch",
        "--parsable",
        # All that sbatch is given here is PATH and the like; with NONE, and with a list of names, each start of a job
        # would run a login shell of the user's for the rest.
        "--export=ALL",
        "--no-requeue",
        "--chdir=/",
        f"--output={_NOWHERE}",
        f"--error={_NOWHERE}",
        f"--input={_NOWHERE}",
        f"--job-name={submission.name}",
    ]
    if submission.spread is None:
        least, most = submission.least_nodes, submission.nodes
        command.append(f"--nodes={least}-{most}")
    # Of one task a node, as Slurm has it by itself: where that is said, a range of nodes gets its least number only.
    command.append(f"--cpus-per-task={submission.cpus}")
    if submission.memory_mib:
        command.append(f"--mem={submission.memory_mib}M")
    if submission.spread is not None:
        command.append(f"--gpus={_typed(submission, submission.spread)}")
    elif submission.gpus_per_node:
        command.append(f"--gres=gpu:{_typed(submission, submission.gpus_per_node)}")
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


def format_rest(submission: Submission, version: int = OLDEST_REST) -> dict[str, Any]:
    """The body of slurmrestd's `/slurm/v0.0.VERSION/job/submit`.

    Raises:
        SlurmRefused: a name or a number in it is not one that Slurm can have, or this version can't say it.
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
        return {"script": submission.script, "job": job | _later(submission)}
    return {"script": submission.script, "job": job | _oldest(submission)}


def format_rest_nodes(nodes: Sequence[str], version: int = OLDEST_REST) -> dict[str, Any]:
    """The body of slurmrestd's `/slurm/v0.0.VERSION/job/ID` that has a running job keep these nodes only."""
    if version > OLDEST_REST:
        return {"required_nodes": list(nodes)}
    return {"nodelist": ",".join(nodes)}


def _oldest(submission: Submission) -> dict[str, Any]:
    job: dict[str, Any] = {"environment": _ENVIRONMENT}
    if submission.exclude:
        # It has excluded_nodes disabled, and takes this, which its documentation does not have.
        job["exclude_nodes"] = ",".join(submission.exclude)
    if submission.spread is not None:
        if submission.gpu_type is None:
            # It takes "gpus": "TYPE:N", and fails to read any number without a type.
            raise SlurmRefused("slurmrestd of Slurm 22.05 can't ask for GPUs of any type on any nodes: choose a type")
        job["gpus"] = _typed(submission, submission.spread)
    else:
        # Its documentation wants a list here, of which it takes no notice.
        job["nodes"] = f"{submission.least_nodes}-{submission.nodes}"
        if submission.gpus_per_node:
            job["gres"] = f"gpu:{_typed(submission, submission.gpus_per_node)}"
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


def _later(submission: Submission) -> dict[str, Any]:
    job: dict[str, Any] = {"environment": [f"{name}={value}" for name, value in _ENVIRONMENT.items()]}
    if submission.exclude:
        job["excluded_nodes"] = list(submission.exclude)
    if submission.spread is not None:
        job["tres_per_job"] = f"gres/gpu:{_typed(submission, submission.spread)}"
    else:
        job["minimum_nodes"], job["maximum_nodes"] = submission.least_nodes, submission.nodes
        if submission.gpus_per_node:
            job["tres_per_node"] = f"gres/gpu:{_typed(submission, submission.gpus_per_node)}"
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


def _typed(submission: Submission, count: int) -> str:
    return f"{count}" if submission.gpu_type is None else f"{submission.gpu_type}:{count}"


def _minutes(submission: Submission) -> int | None:
    """Slurm's limits are whole minutes; a part of one is one more."""
    return None if submission.time_limit_s is None else -(-submission.time_limit_s // 60)


def _check(submission: Submission) -> None:
    """Each of these becomes an argument of its own, so nothing can escape; but commas and blanks mean more to Slurm."""
    options = (submission.partition, submission.account, submission.qos, submission.reservation, submission.gpu_type)
    for name in (submission.name, *submission.exclude, *(option for option in options if option is not None)):
        if not _NAME.fullmatch(name):
            raise SlurmRefused(f"{name!r} is no name for Slurm: letters, digits and _ . @ + - are")
    counts = {
        "nodes": submission.nodes,
        "least_nodes": submission.least_nodes,
        "cpus": submission.cpus,
        "spread": 1 if submission.spread is None else submission.spread,
        "time_limit_s": 1 if submission.time_limit_s is None else submission.time_limit_s,
    }
    wrong = [name for name, value in counts.items() if value < 1]
    if wrong or min(submission.gpus_per_node, submission.memory_mib) < 0:
        raise SlurmRefused(f"a Slurm job needs at least one of each: {', '.join(wrong) or 'no number below zero'}")
    if submission.least_nodes > submission.nodes:
        raise SlurmRefused(f"at least {submission.least_nodes} nodes are more than at most {submission.nodes}")
    if not submission.script.startswith("#!") or "\0" in submission.script:
        raise SlurmRefused("a Slurm job's script begins with #! and its interpreter")
