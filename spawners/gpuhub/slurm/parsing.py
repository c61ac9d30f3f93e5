"""What Slurm says of its jobs, from `squeue --json` and slurmrestd, in the shapes of 22.05 and of later ones; pure.

Later ones write a number as {"set": true, "infinite": false, "number": 10} and a state as a list of words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpuhub.slurm.gres import NOTHING, expand_hosts, parse_gpus
from gpuhub.slurm.values import LIVE, Job, State

#: Slurm's numbers for "nothing was said" and "without an end", of 32 and of 64 bits.
_NO_NUMBERS = frozenset({0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF})
#: Slurm writes a year where a partition knows no limit.
_ENDLESS_MINUTES = 365 * 24 * 60
#: Beyond exit codes of a program's own.
_BY_SIGNAL = 128
#: The number of the user who is really called so.
_NOBODY = 65534
_BASES = frozenset(State) - {State.COMPLETING}
#: What Slurm 22.05 says in place of a base state.
_ALONE: Mapping[str, State] = {
    # It has nodes, but they still start.
    "CONFIGURING": State.PENDING,
    "REQUEUED": State.PENDING,
    "REQUEUE_HOLD": State.PENDING,
    "REQUEUE_FED": State.PENDING,
    "RESV_DEL_HOLD": State.PENDING,
    "SPECIAL_EXIT": State.PENDING,
    "RESIZING": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "STOPPED": State.SUSPENDED,
    "STAGE_OUT": State.COMPLETING,
    "REVOKED": State.CANCELLED,
}
#: What later ones say besides RUNNING of a job that does not run.
_NOT_RUNNING = {
    "CONFIGURING": State.PENDING,
    "POWER_UP_NODE": State.PENDING,
    "STOPPED": State.SUSPENDED,
}
#: Why a job ends of which Slurm 22.05 says no more than COMPLETING, by its reason.
_ENDING = {"TimeLimit": State.TIMEOUT, "NodeDown": State.NODE_FAIL, "OutOfMemory": State.OUT_OF_MEMORY}


def number(value: Any) -> int | None:
    """A number in either shape; None for one that is not set or has no end.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, Mapping):
        if not value.get("set", True) or value.get("infinite", False):
            return None
        value = value.get("number")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")  # noqa: TRY004 - a document is wrong, not a caller
    return int(value) if value >= 0 and value not in _NO_NUMBERS else None


def text(value: Any) -> str:
    """A text; empty for Slurm's ways to say nothing."""
    return "" if value is None or str(value) in NOTHING else str(value)


def words(value: Any) -> tuple[str, ...]:
    """A word or a list of them, in capital letters."""
    return tuple(str(word).upper() for word in ([value] if isinstance(value, str) else value or ()))


def listed(document: Any, key: str) -> list[dict[str, Any]]:
    """The things that a document lists.

    Raises:
        ValueError: it has no such list.
    """
    things = document.get(key) if isinstance(document, dict) else None
    if not isinstance(things, list) or not all(isinstance(thing, dict) for thing in things):
        raise ValueError(f"a list of {key} was expected")
    return things


def errors(document: Any) -> tuple[str, ...]:
    """What a document complains of: its lists may be empty because nobody answered, with the exit status 0."""
    found = document.get("errors") if isinstance(document, dict) else None
    return tuple(_complaint(error) for error in found or ())


def parse_version(document: Any) -> tuple[int, ...]:
    """The version of Slurm that wrote a document, such as (22, 5, 8).

    Raises:
        ValueError: it has none.
    """
    try:
        meta = document["meta"]
        version = (meta.get("Slurm") or meta["slurm"])["version"]
        return tuple(int(version[part]) for part in ("major", "minor", "micro"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("no version was found") from error


def parse_jobs(document: Any) -> tuple[Job, ...]:
    """All jobs in a document.

    Raises:
        ValueError: it is none of Slurm's.
    """
    try:
        return tuple(_job(job) for job in listed(document, "jobs"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"a job is not as Slurm writes one: {error!r}") from error


def pick_job(jobs: Iterable[Job], job_id: int, name: str | None) -> Job | None:
    """The one with that number, and, where `name` is given, that name."""
    return next((job for job in jobs if job.id == job_id and name in {None, job.name}), None)


def _complaint(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    said = dict.fromkeys(text(error.get(key)) for key in ("error", "description"))
    return ": ".join(part for part in said if part) or "an error without a word"


def _job(job: Mapping[str, Any]) -> Job:
    state, is_completing = _state(job)
    reason = text(job.get("state_reason"))
    nodes = expand_hosts(text(job.get("nodes"))) if state is not State.PENDING else ()
    start, end = number(job.get("start_time")) or None, number(job.get("end_time")) or None
    minutes = number(job.get("time_limit"))
    limit_s = None if minutes is None or minutes >= _ENDLESS_MINUTES else minutes * 60
    is_waiting = state is State.PENDING
    has_end = not is_waiting and (state not in LIVE or limit_s is not None)
    return Job(
        id=int(job["job_id"]),
        name=str(job.get("name") or ""),
        user_id=int(job["user_id"]),
        user_name=_user_name(job),
        state=state,
        is_completing=is_completing,
        reason="Configuring" if is_waiting and "CONFIGURING" in words(job.get("job_state")) else reason,
        partition=text(job.get("partition")),
        account=text(job.get("account")),
        qos=text(job.get("qos")),
        reservation=text(job.get("resv_name")),
        priority=number(job.get("priority")) or 0,
        submitted_at=number(job.get("submit_time")) or None,
        expected_start=start if is_waiting else None,
        # One that was cancelled in the queue has the moment of that as its start.
        started_at=start if nodes else None,
        ends_at=end if has_end else None,
        time_limit_s=limit_s,
        exit_code=None if state in LIVE else _exit_code(job.get("exit_code")),
        nodes=nodes,
        gpus=_gpus(nodes, job.get("gres_detail") or ()),
        wants=_wants(job),
    )


def _state(job: Mapping[str, Any]) -> tuple[State, bool]:
    said = words(job["job_state"])
    is_completing = State.COMPLETING in said
    bases = [State(word) for word in said if word in _BASES]
    # A word of a version to come: it has not ended, nor is it known to run.
    alone = State.COMPLETING if is_completing else _ALONE.get(said[0], State.SUSPENDED)
    state = bases[0] if bases else alone
    if state is State.RUNNING and not is_completing:
        state = next((_NOT_RUNNING[word] for word in said if word in _NOT_RUNNING), state)
    elif is_completing and state in {State.RUNNING, State.COMPLETING}:
        why = _ENDING.get(text(job.get("state_reason")), State.COMPLETING)
        state = State.PREEMPTED if number(job.get("preempt_time")) else why
    return state, is_completing


def _exit_code(value: Any) -> int | None:
    """From the status that wait(2) gives, or what later ones make of it. As in a shell, 128 and more is a signal."""
    if isinstance(value, Mapping) and "return_code" in value:
        signal = value.get("signal") or {}
        killed = number(signal.get("id", signal.get("signal_id"))) if isinstance(signal, Mapping) else None
        return _BY_SIGNAL + killed if killed else number(value["return_code"])
    status = number(value)
    if status is None:
        return None
    return _BY_SIGNAL + (status & 0x7F) if status & 0x7F else status >> 8


def _user_name(job: Mapping[str, Any]) -> str:
    """Who asks calls everybody `nobody` whom it does not know."""
    name = text(job.get("user_name"))
    return "" if name == "nobody" and int(job["user_id"]) != _NOBODY else name


def _gpus(nodes: tuple[str, ...], detail: Any) -> dict[str, tuple[int, ...]]:
    """By node; nothing where the two lists don't go together: whose GPUs they are can't be told then."""
    if len(detail) != len(nodes):
        return {}
    by_node = {}
    for node, gpus in zip(nodes, detail, strict=True):
        numbers = sorted({index for part in parse_gpus(text(gpus)) for index in part.indices})
        if numbers:
            by_node[node] = tuple(numbers)
    return by_node


def _wants(job: Mapping[str, Any]) -> str:
    nodes = number(job.get("node_count")) or 1
    in_all = list(_written(job.get("tres_per_job")))
    if in_all:
        return f"{', '.join(in_all)} in all"
    each = list(_written(job.get("tres_per_node"))) or list(_written(job.get("tres_per_task")))
    if not each:
        return "" if nodes == 1 else f"{nodes} nodes"
    return ", ".join(each) if nodes == 1 else f"{nodes} nodes × {', '.join(each)}"


def _written(resources: Any) -> Iterator[str]:
    for gpus in parse_gpus(text(resources)):
        yield f"gpu:{gpus.type}:{gpus.count}" if gpus.type else f"gpu:{gpus.count}"
