"""Problems of the machines: each begin and each end is reported once, also over a restart."""

from __future__ import annotations

from dataclasses import replace

from gpuhub.broker.controllers.nodes.machine_conditions import MachineConditions, list_conditions
from gpuhub.broker_api.schemas import NodeState
from gpuhub.nodes.gpu_health import NodeCondition
from gpuhub.nodes.status import GpuReading, NodeStatus

UP = NodeCondition(state=NodeState.UP)
DOWN = NodeCondition(state=NodeState.DOWN, message="no answer for 5 min")
CARD = GpuReading(uuid="GPU-1", index=0, model="RTX 5090", memory_mib=32607)
WELL = NodeStatus(name="rig1", is_up=True, gpus=(CARD,))
AWAY = NodeStatus(name="rig1", is_up=False)


def titles(machines: MachineConditions, record: NodeStatus, condition: NodeCondition = UP) -> list[str]:
    return [row.title for row in machines.update(list_conditions(record, condition), 10.0)]


def test_each_change_is_reported_once() -> None:
    """A healthy start, and a node that is only late, are none."""
    machines = MachineConditions(())
    assert titles(machines, WELL) == []
    assert titles(machines, AWAY, NodeCondition(state=NodeState.UNREACHABLE)) == []
    assert titles(machines, AWAY, DOWN) == ["Node rig1 is down"]
    assert titles(machines, AWAY, DOWN) == []
    assert titles(machines, WELL) == ["Node rig1 answers again"]
    full = WELL.evolve(disk_error="disk full: less than 10 GiB are free on the disk of Docker there")
    assert titles(machines, full) == ["Disk full: node rig1"]
    broken = WELL.evolve(gpus=(replace(CARD, ecc_uncorrected=2),))
    assert titles(machines, broken) == [
        "Node rig1 has enough free disk space again",
        "GPU 0 (RTX 5090) of rig1 failed",
    ]
    assert titles(machines, WELL) == ["GPU 0 (RTX 5090) of rig1 works again"]


def test_a_restart_repeats_nothing_and_forgets_nothing() -> None:
    """What was open stays so, and its end is reported although this run never saw the problem."""
    assert titles(MachineConditions({"node:rig1"}), AWAY, DOWN) == []
    assert titles(MachineConditions({"node:rig1"}), WELL) == ["Node rig1 answers again"]


def test_cordoned_nodes_answer() -> None:
    """An administrator did that."""
    assert titles(MachineConditions(()), WELL, NodeCondition(state=NodeState.CORDONED)) == []
