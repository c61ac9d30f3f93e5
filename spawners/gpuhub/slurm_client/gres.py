"""Parsers for Slurm's notation of host lists, number lists and GPU resources (GRES)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

#: Texts of Slurm's commands for an empty value.
EMPTY_VALUES = frozenset({"", "(null)", "N/A", "None", "n/a"})
#: Commas outside of brackets.
_COMMA = re.compile(r",(?![^(\[]*[)\]])")
_BRACKET = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
# A type may consist of digits, but is followed by a count then.
_GPU = re.compile(r"(?:gres[:/])?gpu(?:[:=]([^:=(),]+?))??(?:[:=]([0-9]+))?(\(.*\))?")
_INDICES = re.compile(r"\(IDX:([0-9,-]*)\)")


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
        match = _GPU.fullmatch(part)
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
