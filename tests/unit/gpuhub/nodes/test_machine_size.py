"""CPU and memory that a machine's containers may have, and the shares of its GPUs."""

from __future__ import annotations

import pytest

from gpuhub.broker.controllers.nodes.node_probe import parse_machine_size
from gpuhub.nodes.machine_size import NotebookRoom, add_machine_size, find_notebook_room
from gpuhub.nodes.status import MachineSize
from gpuhub.scheduler.interface import NodeCapacity
from tests.support.clusters import build_cluster

DESKTOP = MachineSize(cpu_milli=16000, memory_mib=65536)
ROOM = NotebookRoom(cpu_milli=2000, memory_mib=4096)


def divide(machine: MachineSize | None, room: NotebookRoom | None, gpus: int, **limits: int) -> tuple[int | None, ...]:
    sized = add_machine_size(NodeCapacity(name="rig1", **limits), machine, room, gpus)
    return sized.cpu_milli, sized.memory_mib, sized.cpu_per_gpu, sized.memory_per_gpu


@pytest.mark.parametrize(
    ("machine", "room", "gpus", "sizes"),
    [
        # All but one core and 5 % of the memory goes with the one card.
        (DESKTOP, None, 1, (15000, 62260, 15000, 62260)),
        (DESKTOP, ROOM, 1, (15000, 62260, 13000, 58164)),
        (DESKTOP, ROOM, 4, (15000, 62260, 3250, 14541)),
        # Of a small machine, an eighth is kept, and a notebook without GPU never takes more than a quarter.
        (MachineSize(cpu_milli=2000, memory_mib=4096), ROOM, 1, (1750, 3584, 1313, 2688)),
        (MachineSize(cpu_milli=8000, memory_mib=16384), None, 1, (7000, 14336, 7000, 14336)),
        (DESKTOP, ROOM, 0, (15000, 62260, 0, 0)),
        (None, ROOM, 1, (None, None, 0, 0)),
    ],
)
def test_gpus_divide_what_the_machine_does_not_keep(
    machine: MachineSize | None, room: NotebookRoom | None, gpus: int, sizes: tuple[int | None, ...]
) -> None:
    """The rest is divided by the number of GPUs."""
    assert divide(machine, room, gpus) == sizes


def test_settings_come_before_the_machine() -> None:
    """`cpus` and `memory` of a node are the limits themselves, also above what the machine reports."""
    assert divide(DESKTOP, None, 2, cpu_milli=32000, memory_mib=8192) == (32000, 8192, 16000, 4096)
    assert divide(None, None, 1, cpu_milli=4000, memory_mib=8192) == (4000, 8192, 4000, 8192)


def test_room_is_for_the_largest_profile_without_gpu() -> None:
    """A profile without numbers has the default, whatever the others say."""
    small = {"name": "cpu", "title": "CPU", "gpu_count": 0, "cpus": 2, "memory": "4G"}
    large = {**small, "name": "more", "cpus": 3, "memory": "3G"}
    plain = {"name": "plain", "title": "CPU", "gpu_count": 0}
    assert find_notebook_room(build_cluster(profiles=[small, large])) == NotebookRoom(cpu_milli=3000, memory_mib=4096)
    assert find_notebook_room(build_cluster(profiles=[small, plain])) == NotebookRoom(cpu_milli=None, memory_mib=None)
    assert find_notebook_room(build_cluster(profiles=[{"name": "gpu", "title": "GPU"}])) is None


@pytest.mark.parametrize(
    ("info", "size"),
    [
        ({"NCPU": 16, "MemTotal": 67328897024}, MachineSize(cpu_milli=16000, memory_mib=64209)),
        ({}, None),
        ({"NCPU": 0, "MemTotal": 67328897024}, None),
        ({"NCPU": 10**9, "MemTotal": 67328897024}, None),
        ({"NCPU": 16, "MemTotal": 2**60}, None),
        ({"NCPU": "16", "MemTotal": None}, None),
    ],
)
def test_only_possible_machines_are_believed(info: dict[str, object], size: MachineSize | None) -> None:
    """A guest's administrator can have any number reported."""
    assert parse_machine_size(info) == size
