"""Slurm's way to write many nodes, many numbers and many GPUs in one word; pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

#: What Slurm's commands write for nothing.
NOTHING = frozenset({"", "(null)", "N/A", "None", "n/a"})
#: At commas that stand in no brackets.
_COMMA = re.compile(r",(?![^(\[]*[)\]])")
_BRACKET = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
# A type may be of digits only, but stands before a count then.
_GPU = re.compile(r"(?:gres[:/])?gpu(?:[:=]([^:=(),]+?))??(?:[:=]([0-9]+))?(\(.*\))?")
_INDICES = re.compile(r"\(IDX:([0-9,-]*)\)")


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of one type, as a node or a job has them."""

    #: Empty where gres.conf names none.
    type: str
    count: int
    #: Their numbers on the node; empty where Slurm does not say.
    indices: tuple[int, ...]


def expand_hosts(text: str) -> tuple[str, ...]:
    """The nodes that a host list such as `sx[1-3,07-09],login` means, in its order.

    Raises:
        ValueError: it is none.
    """
    if text in NOTHING:
        return ()
    return tuple(host for part in _COMMA.split(text) for host in _expand(part))


def expand_numbers(text: str) -> tuple[int, ...]:
    """The numbers that `0,2-3` means; none for an empty text.

    Raises:
        ValueError: it is no such list.
    """
    return tuple(int(number) for number in _numbers(text)) if text else ()


def parse_gpus(text: str) -> tuple[Gpus, ...]:
    """The GPUs in a list such as `gpu:rtx5060:1(IDX:0),gpu:rtx5070:2(IDX:1-2)`; other resources are left out.

    Raises:
        ValueError: a GPU in it is written as Slurm never does.
    """
    found = []
    for part in () if text in NOTHING else _COMMA.split(text):
        if not re.match(r"(gres[:/])?gpu\b", part):
            continue
        match = _GPU.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} are no GPUs")
        indices = _INDICES.search(match[3] or "")
        numbers = expand_numbers(indices[1]) if indices else ()
        count = int(match[2]) if match[2] else len(numbers) or 1
        found.append(Gpus(match[1] or "", count, numbers))
    return tuple(found)


def _expand(part: str) -> Iterator[str]:
    match = _BRACKET.fullmatch(part)
    if match is None:
        if "[" in part or not part:
            raise ValueError(f"{part!r} are no hosts")
        yield part
        return
    for number in _numbers(match[2]):
        yield from (f"{match[1]}{number}{rest}" for rest in (_expand(match[3]) if match[3] else ("",)))


def _numbers(text: str) -> Iterator[str]:
    """Each with the leading zeros that its range has."""
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} are no numbers")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
