"""Parsers for Slurm's nodes, partitions, reservations and GPU time; see `parsers` for the forms of documents."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpuhub.slurm_client.models import GpuTime, SlurmNode, SlurmPartition
from gpuhub.slurm_client.parsers import (
    EMPTY_VALUES,
    expand_hosts,
    parse_gpus,
    read_list,
    read_number,
    read_text,
    read_words,
)

#: States in which a node without one of the flags below takes jobs; the others are DOWN, ERROR, FUTURE and UNKNOWN.
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
_NO_LIMIT = EMPTY_VALUES | {"UNLIMITED", "INFINITE", "NONE"}
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
#: `Key=value` in scontrol's lines; a value may contain blanks, but no further `Key=`.
_FIELD = re.compile(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)")
_GPUS_HELD = re.compile(r"gres/gpu(:[^=,]+)?=(\d+)")


def parse_nodes(document: Any) -> tuple[SlurmNode, ...]:
    """Parse the nodes in a document of `sinfo --json`, `scontrol --json show nodes` or slurmrestd's `/nodes`.

    Raises:
        ValueError: The document has an unknown form.
    """
    try:
        return tuple(_parse_node(node) for node in read_list(document, "nodes"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"a node has an unknown form: {error!r}") from error


def parse_partition_lines(lines: str) -> tuple[SlurmPartition, ...]:
    """Parse the output of `scontrol show partition --oneliner`.

    Raises:
        ValueError: The output has an unknown form.
    """
    return tuple(_parse_partition_line(fields) for fields in _parse_records(lines, "PartitionName"))


def parse_partitions(document: Any) -> tuple[SlurmPartition, ...]:
    """Parse the document of slurmrestd's `/partitions`.

    Raises:
        ValueError: The document has an unknown form.
    """
    try:
        return tuple(_parse_partition(each) for each in read_list(document, "partitions"))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a partition has an unknown form: {error!r}") from error


def parse_reservation_lines(lines: str) -> tuple[str, ...]:
    """Return the names in the output of `scontrol show reservation --oneliner`, which may list none."""
    return tuple(fields["ReservationName"] for fields in _parse_records(lines, "ReservationName"))


def parse_settings(lines: str) -> dict[str, str]:
    """Parse the output of `scontrol show config` into values by name."""
    pairs = (line.partition("=") for line in lines.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_gpu_time(lines: str, since: float, until: float) -> tuple[GpuTime, ...]:
    """Sum up GPU time within a window from sacct's lines `user|account|start|end|TRES` (times in seconds since 1970).

    Raises:
        ValueError: The lines have an unknown form.
    """
    jobs = []
    for line in lines.splitlines():
        user, account, start, end, tres = line.split("|")
        # A pending job has no start, and a running one no end.
        if start.isdecimal():
            jobs.append((user, account, float(start), float(end) if end.isdecimal() else until, _count_gpus(tres)))
    return _sum_gpu_time(jobs, since, until)


def parse_gpu_jobs(document: Any, since: float, until: float) -> tuple[GpuTime, ...]:
    """Sum up GPU time within a window from the document of slurmrestd's `/slurmdb/…/jobs`.

    Raises:
        ValueError: The document has an unknown form.
    """
    jobs = []
    try:
        for job in read_list(document, "jobs"):
            time, account, tres = job["time"], read_text(job["account"]), job["tres"].get("allocated") or ()
            start, end = read_number(time["start"]), read_number(time["end"])
            held = ",".join(f"{each['type']}/{each['name']}={read_number(each['count'])}" for each in tres)
            if start:
                jobs.append((read_text(job["user"]), account, float(start), float(end or until), _count_gpus(held)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a job's record has an unknown form: {error!r}") from error
    return _sum_gpu_time(jobs, since, until)


def _parse_node(node: Mapping[str, Any]) -> SlurmNode:
    states = dict.fromkeys((*read_words(node["state"]), *read_words(node.get("state_flags"))))
    base, *flags = states
    is_silent = "NOT_RESPONDING" in flags
    shown = "+".join([base, *(flag for flag in flags if flag != "NOT_RESPONDING")]).lower()
    return SlurmNode(
        name=str(node["name"]),
        state=f"{shown}*" if is_silent else shown,
        takes_work=base in _WORKING and _REFUSING.isdisjoint(flags),
        reason=read_text(node.get("reason")),
        gpus=_count_by_type(read_text(node.get("gres"))),
        used={kind: count for kind, count in _count_by_type(read_text(node.get("gres_used"))).items() if count},
        cpus=read_number(node.get("cpus")) or 0,
        memory_mib=read_number(node.get("real_memory")) or 0,
        partitions=tuple(str(name) for name in node.get("partitions") or ()),
    )


def _count_by_type(gres: str) -> dict[str, int]:
    by_type: dict[str, int] = defaultdict(int)
    for gpus in parse_gpus(gres):
        by_type[gpus.type] += gpus.count
    return dict(by_type)


def _parse_records(lines: str, first: str) -> Iterator[dict[str, str]]:
    for line in lines.splitlines():
        fields = dict(_FIELD.findall(line))
        if first in fields:
            yield fields


def _parse_partition_line(fields: Mapping[str, str]) -> SlurmPartition:
    return SlurmPartition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        is_up=fields.get("State", "UP") == "UP",
        max_time_s=_parse_seconds(fields.get("MaxTime", "")),
        default_time_s=_parse_seconds(fields.get("DefaultTime", "")),
        max_nodes=None if fields.get("MaxNodes", "") in _NO_LIMIT else int(fields["MaxNodes"]),
        nodes=expand_hosts(fields.get("Nodes", "")),
    )


def _parse_seconds(span: str) -> int | None:
    """Parse a span such as `1-00:00:00` or `01:00:00`; a single number means minutes, or hours after days."""
    if span in _NO_LIMIT:
        return None
    match = _TIME.fullmatch(span)
    if match is None:
        raise ValueError(f"{span!r} is not a time span")
    days, first, second, third = (int(part) if part else None for part in match.groups())
    if days is not None:
        return days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600 + (second or 0) * 60 + third
    return (first or 0) * 60 + (second or 0)


def _parse_partition(each: Mapping[str, Any]) -> SlurmPartition:
    maximums, defaults = each.get("maximums") or {}, each.get("defaults") or {}
    nodes, within = each.get("nodes"), each.get("partition") or {}
    flags = each.get("flags", within.get("flags"))
    longest = read_number(each.get("max_time_limit", maximums.get("time")))
    usual = read_number(each.get("default_time_limit", defaults.get("time")))
    return SlurmPartition(
        name=str(each["name"]),
        is_default=None if flags is None else "DEFAULT" in read_words(flags),
        is_up="UP" in read_words(each.get("state") or within.get("state") or "UP"),
        max_time_s=None if longest is None else longest * 60,
        default_time_s=None if usual is None else usual * 60,
        max_nodes=read_number(each.get("maximum_nodes_per_job", maximums.get("nodes"))),
        nodes=expand_hosts(read_text(nodes.get("configured") if isinstance(nodes, Mapping) else nodes)),
    )


def _count_gpus(tres: str) -> int:
    """Return the number of GPUs in a list of resources, which has each type and also the sum of all types."""
    counts = [(kind, int(count)) for kind, count in _GPUS_HELD.findall(tres)]
    totals = [count for kind, count in counts if not kind]
    return totals[0] if totals else sum(count for _, count in counts)


def _sum_gpu_time(
    jobs: Iterable[tuple[str, str, float, float, int]], since: float, until: float
) -> tuple[GpuTime, ...]:
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for user, account, start, end, gpus in jobs:
        seconds = min(end, until) - max(start, since)
        if gpus and seconds > 0:
            sums[user, account] += gpus * seconds
    return tuple(GpuTime(user=user, account=account, gpu_seconds=sums[user, account]) for user, account in sorted(sums))
