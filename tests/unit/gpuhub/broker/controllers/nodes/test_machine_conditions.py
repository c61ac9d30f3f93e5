"""Problems of the machines: each begin and each end is reported once, also over a restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuhub.broker.controllers.nodes.machine_conditions import MachineConditions, list_conditions
from gpuhub.broker_api.schemas import NodeState, NotificationKind
from gpuhub.nodes.gpu_health import NodeCondition
from gpuhub.nodes.power_status import PowerState, PowerStatus
from gpuhub.nodes.status import GpuFault, GpuReading, NodeStatus

UP = NodeCondition(state=NodeState.UP)
DOWN = NodeCondition(state=NodeState.DOWN, message="no answer for 5 min")
CARD = GpuReading(uuid="GPU-1", index=0, model="RTX 5090", memory_mib=32607)
FAULT = GpuFault(
    gpu="GPU-1", node="rig1", kind="xid", code=79, occurred_at=1.0, noticed_at=2.0, boot_id="b", text="Xid 79"
)
MISMATCH = "Driver/library version mismatch"
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


@pytest.mark.parametrize(
    ("changes", "titles_then"),
    [
        (
            {"faults": {"GPU-1": (FAULT,)}},
            ["GPU 0 (RTX 5090) of rig1 failed", "GPU 0 (RTX 5090) of rig1 works again"],
        ),
        (
            {"gpus": (replace(CARD, is_throttled=True),)},
            ["GPU 0 (RTX 5090) of rig1 is slowed down", "GPU 0 (RTX 5090) of rig1 is not slowed down any more"],
        ),
        # The driver was upgraded: the agent reports that for each GPU, or cannot start at all.
        (
            {"gpu_error": MISMATCH, "gpus": (replace(CARD, error=MISMATCH),)},
            ["The GPUs of rig1 cannot be read", "The GPUs of rig1 can be read again"],
        ),
        ({"gpu_error": MISMATCH}, ["The GPUs of rig1 cannot be read", "The GPUs of rig1 can be read again"]),
    ],
)
def test_whatever_keeps_a_gpu_from_being_granted_is_reported(changes: dict[str, Any], titles_then: list[str]) -> None:
    """With the reason; an administrator's acceptance ends a fault."""
    machines = MachineConditions(())
    broken = WELL.evolve(**changes)
    begins = machines.update(list_conditions(broken, UP), 10.0)
    assert titles(machines, broken) == []
    accepted = broken.evolve(gpu_error=None, gpus=(CARD,), faults={"GPU-1": (replace(FAULT, accepted_by="root"),)})
    assert [*(row.title for row in begins), *titles(machines, accepted)] == titles_then
    assert all("not granted" in row.body and row.kind is NotificationKind.GPU_FAILED for row in begins)


def test_full_disk_of_the_head_node_is_reported_once() -> None:
    """Not of each node that takes no work because of it, and also while no node answers."""
    machines, error = MachineConditions(()), "disk full: less than 10 GiB are free on the disk of the head node"
    full = WELL.evolve(disk_error=error)

    def head_titles(*records: NodeStatus, error: str | None) -> list[str]:
        conditions = [condition for record in records for condition in list_conditions(record, UP, error)]
        return [row.title for row in machines.update(conditions, 10.0)]

    assert head_titles(AWAY, full, full.evolve(name="rig2"), error=error) == ["Disk full: head node"]
    assert head_titles(full.evolve(disk_error="disk full: of Docker"), error=error) == ["Disk full: node rig1"]
    assert head_titles(AWAY, error=None) == ["The head node has enough free disk space again"]


def test_a_node_that_is_put_to_sleep_has_no_problem() -> None:
    """Its agent ends before its daemon does."""
    stopping = WELL.evolve(gpu_error="no agent", power=PowerStatus(node="rig1", state=PowerState.STOPPING))
    assert titles(MachineConditions(()), stopping, NodeCondition(state=NodeState.ASLEEP)) == []


def test_a_restart_repeats_nothing_and_forgets_nothing() -> None:
    """What was open stays so, and its end is reported although this run never saw the problem."""
    assert titles(MachineConditions({"node:rig1"}), AWAY, DOWN) == []
    assert titles(MachineConditions({"node:rig1"}), WELL) == ["Node rig1 answers again"]


def test_cordoned_nodes_answer() -> None:
    """An administrator did that."""
    assert titles(MachineConditions(()), WELL, NodeCondition(state=NodeState.CORDONED)) == []
