"""Parsers for jobs in documents of `squeue --json` and slurmrestd, in the forms of Slurm 22.05 and later versions.

Later versions write a number as {"set": true, "infinite": false, "number": 10} and a state as a list of words. Lists of
hosts, numbers and GPU resources (GRES) are texts in Slurm's own notation in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuhub.common.units import parse_size
from gpuhub.slurm_client.models import LIVE_STATES, SlurmJob, SlurmJobState

#: Slurm's numbers for "not set" and "infinite", with 32 and 64 bits.
_NO_NUMBERS = frozenset({0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF})
#: Slurm writes a year if a partition has no limit.
_ENDLESS_MINUTES = 365 * 24 * 60
#: Exit code of a program that a signal ended is this number plus the signal's.
_BY_SIGNAL = 128
#: UID of the user `nobody`.
_NOBODY = 65534
_BASES = frozenset(SlurmJobState) - {SlurmJobState.COMPLETING}
#: States that Slurm 22.05 reports in place of a base state.
_ALONE: Mapping[str, SlurmJobState] = {
    # It has nodes, but they are still starting.
    "CONFIGURING": SlurmJobState.PENDING,
    "REQUEUED": SlurmJobState.PENDING,
    "REQUEUE_HOLD": SlurmJobState.PENDING,
    "REQUEUE_FED": SlurmJobState.PENDING,
    "RESV_DEL_HOLD": SlurmJobState.PENDING,
    "SPECIAL_EXIT": SlurmJobState.PENDING,
    "RESIZING": SlurmJobState.RUNNING,
    "SIGNALING": SlurmJobState.RUNNING,
    "STOPPED": SlurmJobState.SUSPENDED,
    "STAGE_OUT": SlurmJobState.COMPLETING,
    "REVOKED": SlurmJobState.CANCELLED,
}
#: Flags of later versions next to RUNNING of a job that does not run.
_NOT_RUNNING = {
    "CONFIGURING": SlurmJobState.PENDING,
    "POWER_UP_NODE": SlurmJobState.PENDING,
    "STOPPED": SlurmJobState.SUSPENDED,
}
#: States by the reason of a job for which Slurm 22.05 reports only COMPLETING.
_ENDING = {
    "TimeLimit": SlurmJobState.TIMEOUT,
    "NodeDown": SlurmJobState.NODE_FAIL,
    "OutOfMemory": SlurmJobState.OUT_OF_MEMORY,
}
#: Texts of Slurm's commands for an empty value.
EMPTY_VALUES = frozenset({"", "(null)", "N/A", "None", "n/a"})
#: Commas outside of brackets.
_COMMA = re.compile(r",(?![^(\[]*[)\]])")
_BRACKET = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
# A type may consist of digits, but is followed by a count then.
_GPU = re.compile(r"(?:gres[:/])?gpu(?:[:=]([^:=(),]+?))??(?:[:=]([0-9]+))?(\(.*\))?")
_INDICES = re.compile(r"\(IDX:([0-9,-]*)\)")
#: Number of CPUs in a text such as `cpu=8,mem=1.50G,node=2,billing=8`.
_ALLOCATED_CPUS = re.compile(r"\bcpu=([0-9]+)\b")
_ALLOCATED_MEMORY = re.compile(r"\bmem=([0-9.]+[KMGT])\b")
_MIB = 1024**2


def read_number(value: Any) -> int | None:
    """Return a number in either form, or None if it is not set or infinite.

    Raises:
        ValueError: The value has another form.
    """
    if isinstance(value, Mapping):
        if not value.get("set", True) or value.get("infinite", False):
            return None
        value = value.get("number")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")  # noqa: TRY004 - a document is wrong, not a caller
    return int(value) if value >= 0 and value not in _NO_NUMBERS else None


def read_text(value: Any) -> str:
    """Return a text, which is empty for Slurm's empty values."""
    return "" if value is None or str(value) in EMPTY_VALUES else str(value)


def read_words(value: Any) -> tuple[str, ...]:
    """Return one word or a list of words, in capital letters."""
    return tuple(str(word).upper() for word in ([value] if isinstance(value, str) else value or ()))


def read_list(document: Any, key: str) -> list[dict[str, Any]]:
    """Return the objects in a list of a document.

    Raises:
        ValueError: The document has no such list.
    """
    objects = document.get(key) if isinstance(document, dict) else None
    if not isinstance(objects, list) or not all(isinstance(item, dict) for item in objects):
        raise ValueError(f"a list of {key} was expected")
    return objects


def read_errors(document: Any) -> tuple[str, ...]:
    """Return the errors in a document, whose lists may be empty because of them despite the exit status 0."""
    reported = document.get("errors") if isinstance(document, dict) else None
    return tuple(_format_error(error) for error in reported or ())


def parse_version(document: Any) -> tuple[int, ...]:
    """Return the version of Slurm that wrote a document, such as (22, 5, 8).

    Raises:
        ValueError: The document has no version.
    """
    try:
        meta = document["meta"]
        version = (meta.get("Slurm") or meta["slurm"])["version"]
        return tuple(int(version[part]) for part in ("major", "minor", "micro"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("no version was found") from error


def parse_jobs(document: Any) -> tuple[SlurmJob, ...]:
    """Parse all jobs in a document.

    Raises:
        ValueError: The document has an unknown form.
    """
    try:
        return tuple(_parse_job(job) for job in read_list(document, "jobs"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"a job has an unknown form: {error!r}") from error


def select_job(jobs: Iterable[SlurmJob], job_id: int, name: str | None) -> SlurmJob | None:
    """Return the job with the number and, if `name` is given, the name."""
    return next((job for job in jobs if job.id == job_id and name in {None, job.name}), None)


def _format_error(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    texts = dict.fromkeys(read_text(error.get(key)) for key in ("error", "description"))
    return ": ".join(part for part in texts if part) or "an error without a message"


def _parse_job(job: Mapping[str, Any]) -> SlurmJob:
    state, is_completing = _parse_state(job)
    reason = read_text(job.get("state_reason"))
    nodes = expand_hosts(read_text(job.get("nodes"))) if state is not SlurmJobState.PENDING else ()
    start, end = read_number(job.get("start_time")) or None, read_number(job.get("end_time")) or None
    minutes = read_number(job.get("time_limit"))
    limit_s = None if minutes is None or minutes >= _ENDLESS_MINUTES else minutes * 60
    is_waiting = state is SlurmJobState.PENDING
    has_end = not is_waiting and (state not in LIVE_STATES or limit_s is not None)
    cpus, memory_mib = _parse_allocation(read_text(job.get("tres_alloc_str"))) if nodes else (None, None)
    return SlurmJob(
        id=int(job["job_id"]),
        name=str(job.get("name") or ""),
        user_id=int(job["user_id"]),
        user_name=_parse_user_name(job),
        state=state,
        is_completing=is_completing,
        reason="Configuring" if is_waiting and "CONFIGURING" in read_words(job.get("job_state")) else reason,
        partition=read_text(job.get("partition")),
        account=read_text(job.get("account")),
        qos=read_text(job.get("qos")),
        reservation=read_text(job.get("resv_name")),
        priority=read_number(job.get("priority")) or 0,
        submitted_at=read_number(job.get("submit_time")) or None,
        expected_start=start if is_waiting else None,
        # For a job that was cancelled in the queue, Slurm reports the time of that as its start.
        started_at=start if nodes else None,
        ends_at=end if has_end else None,
        time_limit_s=limit_s,
        exit_code=None if state in LIVE_STATES else _parse_exit_code(job.get("exit_code")),
        nodes=nodes,
        gpus=_parse_gpu_indices(nodes, job.get("gres_detail") or ()),
        cpus=cpus,
        memory_mib=memory_mib,
        wants=_describe_request(job),
    )


def _parse_state(job: Mapping[str, Any]) -> tuple[SlurmJobState, bool]:
    states = read_words(job["job_state"])
    is_completing = SlurmJobState.COMPLETING in states
    bases = [SlurmJobState(word) for word in states if word in _BASES]
    # For an unknown state of a later version, assume that the job neither runs nor has ended.
    fallback = SlurmJobState.COMPLETING if is_completing else _ALONE.get(states[0], SlurmJobState.SUSPENDED)
    state = bases[0] if bases else fallback
    if state is SlurmJobState.RUNNING and not is_completing:
        state = next((_NOT_RUNNING[word] for word in states if word in _NOT_RUNNING), state)
    elif is_completing and state in {SlurmJobState.RUNNING, SlurmJobState.COMPLETING}:
        why = _ENDING.get(read_text(job.get("state_reason")), SlurmJobState.COMPLETING)
        state = SlurmJobState.PREEMPTED if read_number(job.get("preempt_time")) else why
    return state, is_completing


def _parse_exit_code(value: Any) -> int | None:
    """Parse the status of wait(2), or its form in later versions. As in a shell, 128 and more stands for a signal."""
    if isinstance(value, Mapping) and "return_code" in value:
        signal = value.get("signal") or {}
        killed = read_number(signal.get("id", signal.get("signal_id"))) if isinstance(signal, Mapping) else None
        return _BY_SIGNAL + killed if killed else read_number(value["return_code"])
    status = read_number(value)
    if status is None:
        return None
    return _BY_SIGNAL + (status & 0x7F) if status & 0x7F else status >> 8


def _parse_user_name(job: Mapping[str, Any]) -> str:
    """Return the user's name, or an empty text: Slurm writes `nobody` for users that it does not know."""
    name = read_text(job.get("user_name"))
    return "" if name == "nobody" and int(job["user_id"]) != _NOBODY else name


def _parse_gpu_indices(nodes: tuple[str, ...], detail: Any) -> dict[str, tuple[int, ...]]:
    """Return the GPUs' indices by node; nothing if the two lists differ in length and cannot be matched."""
    if len(detail) != len(nodes):
        return {}
    by_node = {}
    for node, gpus in zip(nodes, detail, strict=True):
        numbers = sorted({index for part in parse_gpus(read_text(gpus)) for index in part.indices})
        if numbers:
            by_node[node] = tuple(numbers)
    return by_node


def _parse_allocation(resources: str) -> tuple[int | None, int | None]:
    """Return the CPUs and the MiB of memory in a list of allocated resources; None for what it does not contain."""
    cpus, memory = _ALLOCATED_CPUS.search(resources), _ALLOCATED_MEMORY.search(resources)
    return None if cpus is None else int(cpus[1]), None if memory is None else parse_size(memory[1]) // _MIB


def _describe_request(job: Mapping[str, Any]) -> str:
    nodes = read_number(job.get("node_count")) or 1
    total = list(_format_gpus(job.get("tres_per_job")))
    if total:
        return f"{', '.join(total)} in all"
    per_node = list(_format_gpus(job.get("tres_per_node"))) or list(_format_gpus(job.get("tres_per_task")))
    if not per_node:
        return "" if nodes == 1 else f"{nodes} nodes"
    return ", ".join(per_node) if nodes == 1 else f"{nodes} nodes × {', '.join(per_node)}"


def _format_gpus(resources: Any) -> Iterator[str]:
    for gpus in parse_gpus(read_text(resources)):
        yield f"gpu:{gpus.type}:{gpus.count}" if gpus.type else f"gpu:{gpus.count}"


@dataclass(frozen=True, slots=True)
class GresGpus:
    """GPUs of one type that a node or a job has."""

    #: Empty if gres.conf names no type.
    type: str
    count: int
    #: Their indices on the node; empty if Slurm does not report them.
    indices: tuple[int, ...]


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand a host list such as `sx[1-3,07-09],login`, in its order.

    Raises:
        ValueError: It is not a host list.
    """
    if text in EMPTY_VALUES:
        return ()
    return tuple(host for part in _COMMA.split(text) for host in _expand_part(part))


def expand_numbers(text: str) -> tuple[int, ...]:
    """Expand a list of numbers such as `0,2-3`, which may be empty.

    Raises:
        ValueError: It is not a list of numbers.
    """
    return tuple(int(number) for number in _numbers(text)) if text else ()


def parse_gpus(text: str) -> tuple[GresGpus, ...]:
    """Parse the GPUs in a list such as `gpu:rtx5060:1(IDX:0),gpu:rtx5070:2(IDX:1-2)`; other resources are ignored.

    Raises:
        ValueError: A GPU in it has an unknown form.
    """
    result = []
    for part in () if text in EMPTY_VALUES else _COMMA.split(text):
        if not re.match(r"(gres[:/])?gpu\b", part):
            continue
        # slurmctld prints a missing type so for GPUs whose gres.conf names CPU cores.
        match = _GPU.fullmatch(part.replace(":(null)", ""))
        if match is None:
            raise ValueError(f"{part!r} is not a GPU resource")
        indices = _INDICES.search(match[3] or "")
        numbers = expand_numbers(indices[1]) if indices else ()
        count = int(match[2]) if match[2] else len(numbers) or 1
        result.append(GresGpus(match[1] or "", count, numbers))
    return tuple(result)


def _expand_part(part: str) -> Iterator[str]:
    match = _BRACKET.fullmatch(part)
    if match is None:
        if "[" in part or not part:
            raise ValueError(f"{part!r} is not a host list")
        yield part
        return
    for number in _numbers(match[2]):
        yield from (f"{match[1]}{number}{rest}" for rest in (_expand_part(match[3]) if match[3] else ("",)))


def _numbers(text: str) -> Iterator[str]:
    """Yield the numbers, each with the leading zeros of its range."""
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of numbers")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
