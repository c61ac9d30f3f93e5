"""What Slurm says of its nodes, partitions, reservations and GPU-time, in the shapes that `parsing` knows. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpuhub.slurm.gres import NOTHING, expand_hosts, parse_gpus
from gpuhub.slurm.parsing import listed, number, text, words
from gpuhub.slurm.values import GpuTime, Node, Partition

#: In these states, without one of the flags below, a node takes jobs; the others are DOWN, ERROR, FUTURE and UNKNOWN.
_WORKING = frozenset({"IDLE", "MIXED", "ALLOCATED"})
_REFUSING = frozenset(
    {
        "BLOCKED",
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "FAIL",
        "FAILING",
        "INVALID_REG",
        "MAINTENANCE",
        "NOT_RESPONDING",
        "POWERING_DOWN",
        "POWER_DOWN",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
    }
)
_NO_LIMIT = NOTHING | {"UNLIMITED", "INFINITE", "NONE"}
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
#: `Key=value` in scontrol's lines; a value may have blanks, but no further `Key=`.
_FIELD = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)")
_GPUS_HELD = re.compile(r"gres/gpu(:[^=,]+)?=(\d+)")


def parse_nodes(document: Any) -> tuple[Node, ...]:
    """All nodes in a document of `sinfo --json` or slurmrestd's `/nodes`.

    Raises:
        ValueError: it is none.
    """
    try:
        return tuple(_node(node) for node in listed(document, "nodes"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"a node is not as Slurm writes one: {error!r}") from error


def parse_partition_lines(lines: str) -> tuple[Partition, ...]:
    """The partitions in what `scontrol show partition --oneliner` prints.

    Raises:
        ValueError: it is something else.
    """
    return tuple(_partition_line(fields) for fields in _records(lines, "PartitionName"))


def parse_partitions(document: Any) -> tuple[Partition, ...]:
    """The partitions in slurmrestd's `/partitions`.

    Raises:
        ValueError: it is something else.
    """
    try:
        return tuple(_partition(each) for each in listed(document, "partitions"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a partition is not as Slurm writes one: {error!r}") from error


def parse_reservation_lines(lines: str) -> tuple[str, ...]:
    """The names in what `scontrol show reservation --oneliner` prints, which may be that there are none."""
    return tuple(fields["ReservationName"] for fields in _records(lines, "ReservationName"))


def parse_settings(lines: str) -> dict[str, str]:
    """What `scontrol show config` prints, by name."""
    pairs = (line.partition("=") for line in lines.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_gpu_time(lines: str, since: float, until: float) -> tuple[GpuTime, ...]:
    """GPU-time within a window, from sacct's lines `user|account|start|end|TRES` with times in seconds since 1970.

    Raises:
        ValueError: they are something else.
    """
    jobs = []
    for line in lines.splitlines():
        user, account, start, end, tres = line.split("|")
        # One that still waits has no start, one that goes on has no end.
        if start.isdecimal():
            jobs.append((user, account, float(start), float(end) if end.isdecimal() else until, _held(tres)))
    return _summed(jobs, since, until)


def parse_gpu_jobs(document: Any, since: float, until: float) -> tuple[GpuTime, ...]:
    """The same from slurmrestd's `/slurmdb/…/jobs`.

    Raises:
        ValueError: it is something else.
    """
    jobs = []
    try:
        for job in listed(document, "jobs"):
            time, account, tres = job["time"], text(job["account"]), job["tres"].get("allocated") or ()
            start, end = number(time["start"]), number(time["end"])
            held = ",".join(f"{each['type']}/{each['name']}={number(each['count'])}" for each in tres)
            if start:
                jobs.append((text(job["user"]), account, float(start), float(end or until), _held(held)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a job's record is not as Slurm writes one: {error!r}") from error
    return _summed(jobs, since, until)


def _node(node: Mapping[str, Any]) -> Node:
    said = dict.fromkeys((*words(node["state"]), *words(node.get("state_flags"))))
    base, *flags = said
    is_silent = "NOT_RESPONDING" in flags
    shown = "+".join([base, *(flag for flag in flags if flag != "NOT_RESPONDING")]).lower()
    return Node(
        name=str(node["name"]),
        state=f"{shown}*" if is_silent else shown,
        takes_work=base in _WORKING and _REFUSING.isdisjoint(flags),
        reason=text(node.get("reason")),
        gpus=_by_type(text(node.get("gres"))),
        used={kind: count for kind, count in _by_type(text(node.get("gres_used"))).items() if count},
        cpus=number(node.get("cpus")) or 0,
        memory_mib=number(node.get("real_memory")) or 0,
        partitions=tuple(str(name) for name in node.get("partitions") or ()),
    )


def _by_type(gres: str) -> dict[str, int]:
    by_type: dict[str, int] = defaultdict(int)
    for gpus in parse_gpus(gres):
        by_type[gpus.type] += gpus.count
    return dict(by_type)


def _records(lines: str, first: str) -> Iterator[dict[str, str]]:
    for line in lines.splitlines():
        fields = dict(_FIELD.findall(line))
        if first in fields:
            yield fields


def _partition_line(fields: Mapping[str, str]) -> Partition:
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        is_up=fields.get("State", "UP") == "UP",
        longest_s=_seconds(fields.get("MaxTime", "")),
        usual_s=_seconds(fields.get("DefaultTime", "")),
        most_nodes=None if fields.get("MaxNodes", "") in _NO_LIMIT else int(fields["MaxNodes"]),
        nodes=expand_hosts(fields.get("Nodes", "")),
    )


def _seconds(span: str) -> int | None:
    """A span such as `1-00:00:00` or `01:00:00`; a bare number is of minutes, or of hours after days."""
    if span in _NO_LIMIT:
        return None
    match = _TIME.fullmatch(span)
    if match is None:
        raise ValueError(f"{span!r} is no span of time")
    days, first, second, third = (int(part) if part else None for part in match.groups())
    if days is not None:
        return days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600 + (second or 0) * 60 + third
    return (first or 0) * 60 + (second or 0)


def _partition(each: Mapping[str, Any]) -> Partition:
    maximums, defaults = each.get("maximums") or {}, each.get("defaults") or {}
    nodes, within = each.get("nodes"), each.get("partition") or {}
    flags = {word.lower() for word in words(each.get("flags") or within.get("flags"))}
    longest = number(each.get("max_time_limit", maximums.get("time")))
    usual = number(each.get("default_time_limit", defaults.get("time")))
    return Partition(
        name=str(each["name"]),
        is_default="default" in flags,
        is_up="UP" in words(each.get("state") or within.get("state") or "UP"),
        longest_s=None if longest is None else longest * 60,
        usual_s=None if usual is None else usual * 60,
        most_nodes=number(each.get("maximum_nodes_per_job", maximums.get("nodes"))),
        nodes=expand_hosts(text(nodes.get("configured") if isinstance(nodes, Mapping) else nodes)),
    )


def _held(tres: str) -> int:
    """How many GPUs such a list of resources has: each is listed by its type, and once more in the sum of all types."""
    counts = [(kind, int(count)) for kind, count in _GPUS_HELD.findall(tres)]
    in_all = [count for kind, count in counts if not kind]
    return in_all[0] if in_all else sum(count for _, count in counts)


def _summed(jobs: Iterable[tuple[str, str, float, float, int]], since: float, until: float) -> tuple[GpuTime, ...]:
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for user, account, start, end, gpus in jobs:
        seconds = min(end, until) - max(start, since)
        if gpus and seconds > 0:
            sums[user, account] += gpus * seconds
    return tuple(GpuTime(user=user, account=account, gpu_seconds=sums[user, account]) for user, account in sorted(sums))
