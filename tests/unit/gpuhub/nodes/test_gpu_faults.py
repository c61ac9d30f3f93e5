"""Faults of GPUs that do not end by themselves: when they begin, and what ends them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuhub.nodes import gpu_faults
from gpuhub.nodes.agent import CRITICAL_XIDS
from gpuhub.nodes.gpu_faults import GpuRecord, RecordChanges
from gpuhub.nodes.status import GpuReading, NodeStatus, PcieLink, XidErrors

FULL, HALF, QUARTER = (PcieLink(generation=5, width=width) for width in (16, 8, 4))


def build_gpu(**changes: Any) -> GpuReading:
    known = {"uuid": "GPU-1", "index": 0, "model": "RTX 5090", "memory_mib": 32607}
    return GpuReading(**{**known, **changes})


def build_node(*gpus: GpuReading, boot: str | None = "b1", xids: dict[int, float] | None = None) -> NodeStatus:
    """Return a node whose agent has seen these Xid errors of GPU-1, with the time of the last one of each code."""
    errors = tuple(XidErrors(code=code, count=1, last_at=at) for code, at in (xids or {}).items())
    return NodeStatus(name="rig1", boot_id=boot, gpus=gpus or (build_gpu(),), xids={"GPU-1": errors})


@dataclass
class Records:
    """Records of GPUs, as the broker keeps them."""

    known: dict[str, GpuRecord] = field(default_factory=dict)

    def update(self, node: NodeStatus) -> RecordChanges:
        changes = gpu_faults.find_changes(node, self.known, 100.0)
        self.known |= {record.gpu: record for record in changes.records}
        return changes

    def accept(self, gpu: GpuReading | None = None) -> None:
        self.known["GPU-1"] = gpu_faults.accept(self.known["GPU-1"], gpu or build_gpu(), "root")

    @property
    def text(self) -> str | None:
        record = self.known.get("GPU-1")
        return None if record is None else gpu_faults.describe_faults(record.faults)


@pytest.mark.parametrize("code", CRITICAL_XIDS)
def test_critical_xid_blocks_until_the_machine_is_rebooted(code: int) -> None:
    """Neither later readings nor a new agent, which has seen nothing, prove that the GPU is sound again."""
    records = Records()
    began = records.update(build_node(xids={code: 5.0})).began
    assert [(fault.code, fault.boot_id) for fault in began] == [(code, "b1")]
    assert records.text is not None
    assert records.text.startswith(f"Xid {code}, ")
    assert records.text.endswith(": reset the GPU or restart the node")
    assert records.update(build_node(xids={code: 5.0})) == RecordChanges()
    assert records.update(build_node()) == RecordChanges()
    assert records.update(build_node(boot=None)) == RecordChanges()
    records.update(build_node(boot="b2"))
    assert records.text is None


def test_other_xids_block_nothing() -> None:
    """They are errors of programs, or were contained; the metrics count them."""
    assert Records().update(build_node(xids={13: 5.0, 31: 5.0, 43: 5.0, 63: 5.0, 94: 5.0})) == RecordChanges()


def test_reboot_is_no_proof_while_the_gpu_cannot_be_read() -> None:
    records = Records()
    records.update(build_node(xids={79: 5.0}))
    records.update(build_node(build_gpu(error="GPU is lost"), boot="b2"))
    assert records.text is not None
    records.update(build_node(build_gpu(), boot="b2"))
    assert records.text is None


def test_same_error_after_a_reboot_is_a_new_fault() -> None:
    """Also when the first reading after the reboot has it already."""
    records = Records()
    records.update(build_node(xids={79: 5.0}))
    [fault] = records.update(build_node(boot="b2", xids={79: 9.0})).began
    assert fault.boot_id == "b2"
    assert records.text is not None


def test_accepted_error_blocks_when_it_occurs_again() -> None:
    """The agent continues listing the one that was accepted; a set clock of the node changes nothing."""
    records = Records()
    records.update(build_node(xids={119: 5.0}))
    records.accept()
    assert records.text is None
    assert records.update(build_node(xids={119: 5.0})) == RecordChanges()
    [fault] = records.update(build_node(xids={119: 1.0})).began
    assert (fault.code, fault.accepted_by) == (119, None)
    assert records.text is not None


def test_mig_devices_share_the_fault_of_their_gpu() -> None:
    parts = [build_gpu(uuid=f"MIG-{part}", parent="GPU-1", is_mig=True) for part in range(2)]
    assert [fault.gpu for fault in Records().update(build_node(*parts, xids={48: 1.0})).began] == ["GPU-1"]


def test_link_that_became_slower_blocks_until_it_is_accepted() -> None:
    """A link that was never faster is how the machine was built; without load it says nothing."""
    records = Records()
    assert records.update(build_node(build_gpu(loaded_link=HALF))).began == ()
    assert records.update(build_node(build_gpu(loaded_link=FULL))).began == ()
    assert records.update(build_node(build_gpu())).began == ()
    assert len(records.update(build_node(build_gpu(loaded_link=HALF))).began) == 1
    assert records.text == (
        "its PCIe link under load is ×8 of generation 5, and was ×16 of generation 5: check its seat, riser and slot"
    )
    records.update(build_node(build_gpu(loaded_link=FULL)))
    assert records.text is not None
    records.accept(build_gpu(loaded_link=HALF))
    assert records.update(build_node(build_gpu(loaded_link=HALF))).began == ()
    assert len(records.update(build_node(build_gpu(loaded_link=QUARTER))).began) == 1


def test_reboot_tries_a_slow_link_again() -> None:
    records = Records()
    records.update(build_node(build_gpu(loaded_link=FULL)))
    records.update(build_node(build_gpu(loaded_link=HALF)))
    records.update(build_node(build_gpu(), boot="b2"))
    assert records.text is None
    assert len(records.update(build_node(build_gpu(loaded_link=HALF), boot="b2")).began) == 1


def test_card_in_another_machine_begins_anew() -> None:
    """That machine's slot may have fewer lanes, and the card was without power."""
    records = Records()
    records.update(build_node(build_gpu(loaded_link=FULL), xids={79: 5.0}))
    moved = build_node(build_gpu(loaded_link=HALF), boot="other").evolve(name="rig2")
    assert records.update(moved).began == ()
    assert (records.text, records.known["GPU-1"].node) == (None, "rig2")


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("error"), st.sampled_from([13, 48, 79])),
            st.sampled_from([("reboot",), ("agent restarts",), ("lost",), ("found",), ("accept",), ("unread",)]),
        ),
        max_size=30,
    )
)
def test_gpu_is_granted_only_without_errors_since_reboot_or_acceptance(events: list[tuple[Any, ...]]) -> None:
    """Whatever happens in whatever order, also while the broker reads nothing."""
    records, clock, boot = Records(), 0.0, 0
    agent_saw: dict[int, float] = {}
    # What is true: critical errors of this boot that nobody has accepted, and those that the broker has read.
    errors: set[int] = set()
    read: set[int] = set()
    is_lost = is_read = False
    for kind, *details in events:
        clock += 1.0
        is_read = kind != "unread"
        match kind:
            case "error":
                agent_saw[details[0]] = clock
                if details[0] in CRITICAL_XIDS:
                    errors.add(details[0])
                    read.discard(details[0])
            case "reboot":
                boot, agent_saw, errors = boot + 1, {}, set()
            case "agent restarts":
                # What no broker has read is forgotten with the agent.
                agent_saw, errors = {}, errors & read
            case "lost" | "found":
                is_lost = kind == "lost"
            case "accept" if "GPU-1" in records.known:
                records.accept()
                errors -= read
        if is_read:
            gpu = build_gpu(error="GPU is lost" if is_lost else None)
            records.update(build_node(gpu, boot=f"b{boot}", xids=agent_saw))
            read |= errors
            if errors:
                assert records.text is not None, (events, errors)
            elif not is_lost:
                assert records.text is None, events
