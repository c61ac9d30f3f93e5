"""Stacks of all ranks, grouped by where the ranks are: `7 ranks in all_reduce at train.py:88; rank 3 in …`."""

from __future__ import annotations

import itertools
import json
import linecache
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from gpu_launch.output.text import format_ranks

#: faulthandler's lines; Python 3.14 adds the thread's name.
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[.*\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
_OURS = re.compile(r"/gpu_launch/(?:worker|sessions|detached)/")
#: Functions of libraries that only call others, and whose names say nothing.
_GENERIC = frozenset(
    {"wrapper", "inner", "wrapped", "_fn", "_call_impl", "_wrapped_call_impl", "decorate_context", "<lambda>"}
)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One call of a Python function."""

    file: str
    #: 0 if unknown.
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        return _LIBRARY.search(self.file) is not None or _OURS.search(self.file) is not None


@dataclass(frozen=True, kw_only=True)
class RankStacks:
    """The stacks of one rank."""

    rank: int
    node: str
    #: The main thread's frames, the innermost first; empty if there are none.
    frames: tuple[Frame, ...] = ()
    #: faulthandler's text with all threads.
    text: str = ""
    #: The reason why there are no stacks; empty if there are.
    problem: str = ""
    #: Process group with its backend → number and name of the last collective that the rank has called.
    collectives: Mapping[str, tuple[int, str]] | None = None


@dataclass(frozen=True, kw_only=True)
class StackGroup:
    """Ranks whose main threads are at the same place."""

    ranks: tuple[int, ...]
    #: `in all_reduce at train.py:88`, or why there are no stacks.
    place: str
    #: The line of source at that place; empty if unknown.
    source: str = ""
    #: Stack of the first of these ranks.
    frames: tuple[Frame, ...] = ()


def parse_answer(answer: Mapping[str, Any], node: str) -> RankStacks:
    """Return the stacks in an agent's answer, see `worker.rank_stacks.collect`."""
    return RankStacks(
        rank=answer["rank"],
        node=node,
        frames=parse_main_thread(answer["text"], answer["main"]),
        text=answer["text"],
        problem=answer["problem"],
        collectives=parse_trace(answer["trace"]) if answer["trace"] else None,
    )


def parse_main_thread(text: str, main: int) -> tuple[Frame, ...]:
    """Return the frames of the thread `main` in faulthandler's text; of the last thread, which is the oldest, if it is
    not there.
    """
    threads: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            frames = threads.setdefault(int(match[1], 16), [])
        elif match := _FRAME.match(line):
            number = int(match[2]) if match[2].isdecimal() else 0
            frames.append(Frame(file=match[1], line=number, function=match[3]))
    if main in threads:
        return tuple(threads[main])
    return tuple(list(threads.values())[-1]) if threads else ()


def parse_trace(text: str) -> dict[str, tuple[int, str]]:
    """Return the last collective of each process group in torch's flight recorders (JSON, version 2).

    A group with two backends is two: each backend counts its own collectives.
    """
    last: dict[str, tuple[int, str]] = {}
    for entry in json.loads(text)["entries"]:
        backend, _, name = str(entry["profiling_name"]).rpartition(":")
        group, number = f"{entry['process_group'][-1]} ({backend})", int(entry["collective_seq_id"])
        if not entry.get("is_p2p") and number >= last.get(group, (0, ""))[0]:
            last[group] = (number, name)
    return last


def find_user_frame(frames: Sequence[Frame]) -> int | None:
    """Return the index of the innermost frame that belongs to no library; None if there is none."""
    return next((index for index, frame in enumerate(frames) if not frame.is_library), None)


def describe_place(frames: Sequence[Frame]) -> str:
    """Return `in all_reduce at train.py:88 in step`: a library's function and the user's line that called it."""
    if not frames:
        return "in no Python function"
    index = find_user_frame(frames)
    if index is None:
        return f"in {frames[0].function} ({_shorten(frames[0].file)}:{frames[0].line})"
    user = frames[index]
    called = next((frame for frame in reversed(frames[:index]) if frame.function not in _GENERIC), None)
    function = "" if user.function == "<module>" else f" in {user.function}"
    at = f"at {_shorten(user.file)}:{user.line}{function}"
    return at if called is None else f"in {_name(called)} {at}"


def _name(frame: Frame) -> str:
    """Return a function's name, with its file where the name alone says little, as for `__next__`."""
    if frame.function.startswith("_"):
        return f"{frame.function} ({_shorten(frame.file)})"
    return frame.function


def _shorten(file: str) -> str:
    """Return a library's path below its packages, and the name of any other file."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in file:
            return file.partition(folder)[2]
    return PurePath(file).name if file.startswith("/") else file


def group_ranks(
    stacks: Iterable[RankStacks], *, source: Callable[[str, int], str] = linecache.getline
) -> list[StackGroup]:
    """Return the groups, the largest first; ranks without stacks come last.

    Args:
        stacks: The stacks of all ranks.
        source: Returns a line of a file; empty if unknown.
    """
    groups: dict[tuple[bool, str], list[RankStacks]] = {}
    for stack in sorted(stacks, key=lambda stack: stack.rank):
        place = f"{stack.problem} ({stack.node})" if stack.problem else describe_place(stack.frames)
        groups.setdefault((bool(stack.problem), place), []).append(stack)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]), item[1][0].rank))
    return [_build_group(place, members, source) for (_, place), members in ordered]


def _build_group(place: str, members: Sequence[RankStacks], source: Callable[[str, int], str]) -> StackGroup:
    first = members[0]
    index = find_user_frame(first.frames)
    line = "" if index is None else source(first.frames[index].file, first.frames[index].line).strip()
    return StackGroup(ranks=tuple(stack.rank for stack in members), place=place, source=line, frames=first.frames)


def describe_collectives(stacks: Iterable[RankStacks]) -> list[str]:
    """Return a line for each process group whose ranks have not called the same number of collectives."""
    by_group: dict[str, dict[tuple[int, str], list[int]]] = {}
    for stack in stacks:
        for group, last in (stack.collectives or {}).items():
            by_group.setdefault(group, {}).setdefault(last, []).append(stack.rank)
    return [
        f"collectives of {group}: {'; '.join(_describe_last(*item) for item in sorted(last.items(), reverse=True))}"
        for group, last in sorted(by_group.items())
        if len(last) > 1
    ]


def _describe_last(last: tuple[int, str], ranks: Collection[int]) -> str:
    return f"{format_ranks(ranks)} called number {last[0]} ({last[1]})"


def format_stacks(stacks: Collection[RankStacks], *, full: bool = False) -> str:
    """Format the groups for a person, with `full` also all threads of every rank."""
    lines = [f"where {'the rank is' if len(stacks) == 1 else f'the {len(stacks)} ranks are'}:"]
    for group in group_ranks(stacks):
        number = f"{len(group.ranks)} ranks ({format_ranks(group.ranks).removeprefix('ranks ')})"
        lines.append(f"  {number if len(group.ranks) > 1 else format_ranks(group.ranks)}: {group.place}")
        lines += [f"      {group.source}"] if group.source else []
    lines += [f"  {line}" for line in describe_collectives(stacks)]
    if full:
        lines += list(itertools.chain.from_iterable(_format_full(stack) for stack in stacks if stack.text))
    return "\n".join(lines) + "\n"


def _format_full(stack: RankStacks) -> list[str]:
    return ["", f"rank {stack.rank} on {stack.node}", *stack.text.rstrip().splitlines()]


def build_json(stacks: Collection[RankStacks]) -> list[dict[str, Any]]:
    """Return the groups and the stacks for programs."""
    by_rank = {stack.rank: stack for stack in stacks}
    return [
        {
            "ranks": list(group.ranks),
            "nodes": {str(rank): by_rank[rank].node for rank in group.ranks},
            "place": group.place,
            "source": group.source,
            "frames": [[frame.file, frame.line, frame.function] for frame in group.frames],
            "threads": {str(rank): by_rank[rank].text for rank in group.ranks},
        }
        for group in group_ranks(stacks)
    ]
