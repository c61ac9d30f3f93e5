"""A node's simulated cards: folders that the containers holding a card see read-only and live.

A card's folder `<index>` holds two files of `key value` lines: `card` says what it is, `live` how loaded it is and
what is wrong with it. The simulated library reads both at every call.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from gpuhub.closet.places import node_places
from gpuhub.closet.plan import Card, ClosetNode, Plan, gpu_uuid, mig_uuid
from gpuhub.errors import NotFound, SettingsError
from gpuhub.paths import Paths


class Fault(StrEnum):
    """What can be wrong with a card."""

    NONE = "none"
    #: NVML answers "GPU is lost" for the card, and no new container gets it.
    LOST = "lost"
    #: NVML answers "Unknown Error" for the card, and no new container gets it.
    FALLEN_OFF_BUS = "fallen_off_bus"
    #: NVML does not start for anyone who sees the card: the driver was upgraded without a restart.
    DRIVER_MISMATCH = "driver_mismatch"
    #: NVML counts an uncorrectable memory error.
    ECC = "ecc"
    #: NVML tells that a failing memory row could not be replaced.
    REMAP_FAILED = "remap_failed"
    #: NVML's calls about the card do not return while it is so.
    HANG = "hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLive:
    """What changes on a MIG device."""

    memory_used_mib: int = 0
    processes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What changes while a card runs."""

    utilisation_percent: int = 0
    memory_used_mib: int = 0
    fault: Fault = Fault.NONE
    #: Process id and memory in MiB of each program on the card.
    processes: tuple[tuple[int, int], ...] = ()
    #: By position, what is on the MIG devices of a card in MIG mode.
    parts: tuple[PartLive, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.utilisation_percent <= 100:
            raise SettingsError(f"utilisation {self.utilisation_percent} %: 0 to 100 is possible")
        if self.memory_used_mib < 0:
            raise SettingsError(f"memory used {self.memory_used_mib} MiB: it cannot be negative")


def format_card(card: Card, *, index: int, uuid: str) -> str:
    """The text of the file `card`."""
    major, minor = card.capability
    text = (
        f"index {index}\nname {card.name}\nuuid {uuid}\nminor {index}\nbus {index + 1}\n"
        f"power_limit_w {card.power_limit_w}\nmemory_mib {card.memory_mib}\ncapability {major}.{minor}\n"
    )
    parts = (
        f"mig_device {slot} {mig_uuid(uuid, slot)} {part.memory_mib} {part.profile}\n"
        for slot, part in enumerate(card.mig)
    )
    return text + ("mig_mode 1\n" if card.mig else "") + "".join(parts)


def format_live(live: Live) -> str:
    """The text of the file `live`."""
    head = f"utilization {live.utilisation_percent}\nmemory_used_mib {live.memory_used_mib}\nfault {live.fault}\n"
    lines = [f"process {pid} {used}\n" for pid, used in live.processes]
    for slot, part in enumerate(live.parts):
        lines.append(f"mig_memory_used_mib {slot} {part.memory_used_mib}\n")
        lines += [f"mig_process {slot} {pid} {used}\n" for pid, used in part.processes]
    return head + "".join(lines)


def parse_live(text: str) -> Live:
    """Read what `format_live` wrote."""
    single = dict(re.findall(r"^(utilization|memory_used_mib|fault) (\S+)$", text, re.MULTILINE))
    processes = re.findall(r"^process (\d+) (\d+)$", text, re.MULTILINE)
    return Live(
        utilisation_percent=int(single.get("utilization", 0)),
        memory_used_mib=int(single.get("memory_used_mib", 0)),
        fault=Fault(single.get("fault", "none")),
        processes=tuple((int(pid), int(used)) for pid, used in processes),
        parts=_parse_parts(text),
    )


def _parse_parts(text: str) -> tuple[PartLive, ...]:
    used = re.findall(r"^mig_memory_used_mib (\d+) (\d+)$", text, re.MULTILINE)
    processes = re.findall(r"^mig_process (\d+) (\d+) (\d+)$", text, re.MULTILINE)
    return tuple(
        PartLive(
            memory_used_mib=int(mib),
            processes=tuple((int(pid), int(held)) for of, pid, held in processes if of == slot),
        )
        for slot, mib in used
    )


def ensure_cards(plan: Plan, node: ClosetNode, paths: Paths) -> None:
    """Write the node's cards; load and faults set before are kept."""
    for index, card in enumerate(node.cards):
        folder = node_places(paths, node).cards / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        uuid = gpu_uuid(plan.instance, node.name, index)
        _write(folder / "card", format_card(card, index=index, uuid=uuid))
        if not (folder / "live").exists():
            _write(folder / "live", format_live(Live()))


def read_live(paths: Paths, node: ClosetNode | str, index: int) -> Live:
    """What the card does now; NotFound when the node has no such card or is not up."""
    return parse_live(_live_file(paths, node, index).read_text())


def set_live(paths: Paths, node: ClosetNode | str, index: int, live: Live) -> None:
    """Set all of it at once."""
    _write(_live_file(paths, node, index), format_live(live))


def set_load(
    paths: Paths,
    node: ClosetNode | str,
    index: int,
    utilisation_percent: int,
    memory_used_mib: int,
    *,
    processes: tuple[tuple[int, int], ...] = (),
) -> None:
    """Set a card's load; containers that hold the card see it at their next reading."""
    live = replace(
        read_live(paths, node, index),
        utilisation_percent=utilisation_percent,
        memory_used_mib=memory_used_mib,
        processes=processes,
    )
    set_live(paths, node, index, live)


def set_fault(paths: Paths, node: ClosetNode | str, index: int, fault: Fault | str) -> None:
    """Break a card (`lost`, `fallen_off_bus`, `driver_mismatch`, `ecc`, `remap_failed`, `hang`) or mend it (`none`)."""
    known = [str(one) for one in Fault]
    if fault not in known:
        raise SettingsError(f"fault {fault!r} is not known; there are: {', '.join(known)}")
    set_live(paths, node, index, replace(read_live(paths, node, index), fault=Fault(fault)))


def set_outsiders(paths: Paths, node: ClosetNode | str, index: int, processes: tuple[tuple[int, int], ...]) -> None:
    """Let programs that gpuhub did not start use a card: process id and memory in MiB of each; none: they are gone."""
    live = read_live(paths, node, index)
    others = sum(used for _, used in live.processes)
    used = live.memory_used_mib - others + sum(used for _, used in processes)
    set_live(paths, node, index, replace(live, memory_used_mib=max(0, used), processes=processes))


def _live_file(paths: Paths, node: ClosetNode | str, index: int) -> Path:
    file = node_places(paths, node).cards / str(index) / "live"
    if not file.exists():
        raise NotFound(f"card {index} of closet node {node_places(paths, node).run.name} is not there: is it up?")
    return file


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole: a reader sees the old or the new, never half of one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.chmod(0o644)
    fresh.replace(path)
