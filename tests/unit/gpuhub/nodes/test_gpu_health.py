"""Whether nodes and GPUs can be granted: decisions from readings, leases and time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhub.broker.controllers.deadlines import find_overdue_proofs
from gpuhub.broker.controllers.nodes.node_probe import ConditionReporter
from gpuhub.broker.state.capacity import GpuLeaseFlags
from gpuhub.broker_api.schemas import GpuState, LeaseState, NodeState
from gpuhub.config.settings import NodeSettings, SchedulingSettings
from gpuhub.domain.models import LeasedGpu, LeaseRow, LedgerSnapshot
from gpuhub.nodes import agent_container, gpu_health, node_capacity, status
from gpuhub.nodes.inventory import Inventory, build_inventory
from gpuhub.nodes.status import AgentReading, Cordon, GpuFault, GpuLeaseStatus, GpuProcess, GpuReading, NodeStatus
from gpuhub.scheduler.interface import NodeCapacity
from tests.support.broker.factories import lease_row
from tests.support.docker.simulated_nodes import build_cluster

SCHEDULING = SchedulingSettings()
NOW = 1000.0
BUSY = (GpuProcess(pid=7, memory_mib=5222),)


def gpu(uuid: str = "GPU-1", index: int = 0, **changes: Any) -> GpuReading:
    known = {"uuid": uuid, "index": index, "model": "RTX 5090", "memory_mib": 32607, "memory_used_mib": 4}
    return GpuReading(**{**known, **changes})


def build_up_node(*gpus: GpuReading, name: str = "rig1", **changes: Any) -> NodeStatus:
    node = NodeStatus(name=name, daemon_id="d1", is_reconciled=True, polled_at=NOW - 2)
    reading = AgentReading(line_number=1, error=None, gpus=gpus, boot_id="b1", driver="580.95.05")
    return agent_container.record_agent_reading(status.record_answer(node, NOW), reading, NOW).evolve(**changes)


def build_inventory_of(*records: NodeStatus) -> Inventory:
    inventory = build_inventory(build_cluster(), {})
    for record in records:
        inventory = inventory.with_node(record)
    return inventory


def supply(
    node: NodeStatus, *, at: float = NOW, lease_status: GpuLeaseStatus | None = None, cordon: Cordon | None = None
) -> Any:
    statuses = {reading.uuid: lease_status for reading in node.gpus} if lease_status is not None else {}
    return node_capacity.build_node_capacity(
        build_inventory_of(node), node.name, cordon=cordon, lease_statuses=statuses, monotonic=at, scheduling=SCHEDULING
    )


def assess_gpu(node: NodeStatus, *, at: float = NOW, **about: Any) -> gpu_health.GpuCondition:
    return gpu_health.assess_gpu(
        build_inventory_of(node), node.name, node.gpus[0], monotonic=at, scheduling=SCHEDULING, **about
    )


def build_capacities(inventory: Inventory) -> list[NodeCapacity]:
    return [
        node_capacity.build_node_capacity(
            inventory, name, cordon=None, lease_statuses={}, monotonic=NOW, scheduling=SCHEDULING
        )
        for name in inventory.nodes
    ]


def assess_node(node: NodeStatus, *, at: float = NOW, cordon: Cordon | None = None) -> gpu_health.NodeCondition:
    return gpu_health.assess_node(
        build_inventory_of(node), node.name, cordon=cordon, monotonic=at, scheduling=SCHEDULING
    )


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_two_failures_make_a_node_unreachable_and_two_successes_up() -> None:
    """One lost packet does not make a node unreachable, and one answer does not bring it back."""
    node = status.record_failure(build_up_node(gpu()), "no answer", NOW)
    assert gpu_health.explain_node_unavailable(node, None) is None
    node = status.record_failure(node, "no answer", NOW + 1)
    assert (node.is_up, node.down_since) == (False, NOW + 1)
    assert gpu_health.explain_node_unavailable(node, None) == "no answer"
    assert (node.daemon_id, node.boot_id) == (None, None)
    assert assess_node(node, at=NOW + 2) == gpu_health.NodeCondition(state=NodeState.UNREACHABLE, message="no answer")
    node = status.record_answer(node, NOW + 3)
    assert not node.is_up
    assert "1 more successful polls" in (assess_node(node).message or "")
    assert status.record_answer(node, NOW + 5).is_up


def test_node_that_never_failed_is_up_after_one_probe() -> None:
    """The start of the broker does not count as a recovery."""
    assert status.record_answer(NodeStatus(name="rig1"), NOW).is_up


def test_node_that_misses_probes_for_long_is_down() -> None:
    """The node is up without further polls."""
    node = status.record_failure(status.record_failure(build_up_node(gpu()), "no answer", NOW), "no answer", NOW)
    assert assess_node(node, at=NOW + 599).state is NodeState.UNREACHABLE
    assert assess_node(node, at=NOW + 600).state is NodeState.DOWN


def go_down_and_up(node: NodeStatus, at: float) -> NodeStatus:
    """Down and up again, as fast as can be."""
    for _ in range(status.FAILURES_UNTIL_DOWN):
        node = status.record_failure(node, "no answer", at)
    while not node.is_up:
        node = status.record_answer(node, at)
    return node


def test_flapping_node_needs_more_successful_probes() -> None:
    """After the third time within ten minutes; when that is long ago, no more."""
    node = go_down_and_up(go_down_and_up(build_up_node(gpu()), NOW), NOW + 60)
    for _ in range(2):
        node = status.record_failure(node, "no answer", NOW + 120)
    assert status.required_polls(node, NOW + 121) == 5
    node = status.record_answer(node, NOW + 121)
    assert "since it was unreachable 3 times within 10 minutes" in (node.unreachable_reason or "")
    assert status.required_polls(node, NOW + 720) == 2


@given(st.lists(st.booleans(), max_size=60))
def test_a_node_never_flaps(looks: list[bool]) -> None:
    """For any sequence of polls, down means two failures in a row, and up means enough successes in a row."""
    node, run = build_up_node(gpu()), 0
    for step, is_good in enumerate(looks):
        before, at = node, NOW + step
        needed = status.required_polls(node, at)
        node = status.record_answer(node, at) if is_good else status.record_failure(node, "no answer", at)
        run = run + 1 if step and looks[step - 1] is is_good else 1
        if before.is_up and not node.is_up:
            assert not is_good
            assert run >= status.FAILURES_UNTIL_DOWN
        if node.is_up and not before.is_up:
            assert is_good
            assert run >= needed >= status.POLLS_UNTIL_UP
        assert node.is_up or gpu_health.explain_node_unavailable(node, None) is not None
        assert len(node.flaps) <= step + 1


def test_cordoned_node_is_shown_and_takes_no_new_work() -> None:
    """Leases there are still shown; a missing answer comes before the cordon."""
    cordon = Cordon(node="rig1", by="root", reason="new fans", at=1.0)
    node = build_up_node(gpu())
    found = supply(node, cordon=cordon)
    assert (found.takes_work, found.unavailable_reason) == (False, "cordoned by root: new fans")
    assert not found.slots[0].available
    assert assess_node(node, cordon=cordon).state is NodeState.CORDONED
    draining = Cordon(node="rig1", state="draining", by="root", at=1.0, grace_s=60)
    assert assess_node(node, cordon=draining) == gpu_health.NodeCondition(
        state=NodeState.DRAINING, message="draining by root"
    )
    assert assess_gpu(node, cordon=cordon).state is GpuState.UNAVAILABLE
    assert assess_gpu(node, cordon=cordon, is_held=True).state is GpuState.HELD
    gone = status.record_failure(status.record_failure(node, "no answer", NOW), "no answer", NOW)
    assert assess_node(gone, cordon=cordon).message == "no answer; cordoned by root: new fans"


def test_node_capacity_combines_settings_and_readings() -> None:
    """Labels and limits from the settings; driver, GPUs and health from the node."""
    cluster = build_cluster()
    rig1 = NodeSettings(
        name="rig1", address="127.0.1.1", docker="unix:///x", switch="s1", rack="r1", cpus=8, memory="32G"
    )
    cluster = cluster.model_copy(update={"nodes": (rig1, *cluster.nodes[1:])})
    inventory = build_inventory(cluster, {}).with_node(build_up_node(gpu()))
    every = build_capacities(inventory)
    assert [node.name for node in every] == ["rig1", "rig2", "rig3"]
    first = every[0]
    assert (first.switch, first.rack, first.cpu_milli, first.memory_mib) == ("s1", "r1", 8000, 32768)
    assert (first.driver, first.takes_work, first.slots[0].available) == ("580.95.05", True, True)
    assert (every[1].takes_work, every[1].unavailable_reason) == (False, "has not been read yet")


def test_node_without_a_daemon_id_takes_no_work() -> None:
    """The daemon's id is stored with a new lease, so it must be known."""
    assert (
        supply(build_up_node(gpu(), daemon_id=None)).unavailable_reason
        == "its Docker daemon has not been identified yet"
    )


# -- GPUs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"error": "GPU is lost"}, "GPU is lost"),
        ({"error": "Unknown Error"}, "Unknown Error"),
        ({"error": agent_container.VANISHED, "is_listed": False}, "the driver no longer reports it"),
        (
            {"ecc_uncorrected": 1},
            "1 uncorrectable memory error (ECC) since the driver was loaded: reset the GPU or restart the node",
        ),
        ({"remap_failed": True}, "a failing memory row could not be replaced: the card needs service"),
        (
            {"remap_pending": True},
            "failing memory rows wait to be replaced: reset the GPU or restart the node",
        ),
        (
            {"error": "NVML: Driver/library version mismatch"},
            "NVML: Driver/library version mismatch: the driver was upgraded while it was in use, reboot needed",
        ),
    ],
)
def test_broken_gpu_is_failed_with_the_reason(changes: dict[str, Any], why: str) -> None:
    """The failure is shown whether the GPU is held or not; the GPU is available after the next reading without it."""
    node = build_up_node(gpu())
    broken = node.evolve(gpus=(gpu(**changes),))
    assert assess_gpu(broken) == gpu_health.GpuCondition(state=GpuState.FAILED, message=why)
    assert assess_gpu(broken, is_held=True).state is GpuState.FAILED
    assert (supply(broken).slots[0].available, supply(broken).slots[0].unavailable_reason) == (False, why)
    assert assess_node(broken).message == f"GPU 0: {why}"
    mended = agent_container.record_agent_reading(
        broken, AgentReading(line_number=2, error=None, gpus=(gpu(),)), NOW + 2
    )
    assert assess_gpu(mended, at=NOW + 2).state is GpuState.FREE


def test_faults_that_no_reading_shows_keep_a_gpu_failed() -> None:
    fault = GpuFault(
        gpu="GPU-1", node="rig1", kind="xid", code=79, occurred_at=1.0, noticed_at=2.0, boot_id="b1", text="Xid 79"
    )
    node = build_up_node(gpu(), faults={"GPU-1": (fault,)})
    for is_held in (False, True):
        assert assess_gpu(node, is_held=is_held) == gpu_health.GpuCondition(state=GpuState.FAILED, message="Xid 79")
    assert supply(node).slots[0].unavailable_reason == "Xid 79"
    assert assess_node(node).message == "GPU 0: Xid 79"
    part = gpu("MIG-1", parent="GPU-1", is_mig=True)
    assert supply(node.evolve(gpus=(part,))).slots[0].unavailable_reason == "Xid 79"


@pytest.mark.parametrize(
    ("reasons", "causes"),
    [(0x08 | 0x40, " (it is too hot)"), (0x80, " (its power supply slows it down)"), (1, ""), (None, "")],
)
def test_slowed_down_gpu_is_not_granted_and_its_holder_keeps_it(reasons: int | None, causes: str) -> None:
    why = f"its clocks have been lowered by the hardware for minutes{causes}: check its cooling and power supply"
    node = build_up_node(gpu(is_throttled=True, clocks_event_reasons=reasons))
    assert assess_gpu(node) == gpu_health.GpuCondition(state=GpuState.UNAVAILABLE, message=why)
    assert assess_gpu(node, is_held=True) == gpu_health.GpuCondition(state=GpuState.HELD, message=why)
    assert supply(node).slots[0].unavailable_reason == why
    problems = gpu_health.list_lease_problems({"rig1": node}, {"GPU-1": "rig1", "GPU-2": "rig1", "GPU-3": "rig9"})
    assert problems == (f"GPU 0 (RTX 5090) of rig1: {why}",)


def test_problem_is_new_once() -> None:
    """Not at the first reading of a run, since the run before has reported it; a fault is new when it is noticed."""
    sound, bad = build_up_node(gpu()), build_up_node(gpu(ecc_uncorrected=1))
    problems = gpu_health.find_new_problems(sound, bad, [])
    assert list(problems) == ["GPU-1"]
    assert gpu_health.find_new_problems(bad, bad, []) == {}
    assert gpu_health.find_new_problems(bad, sound, []) == {}
    assert gpu_health.find_new_problems(sound.evolve(read_at=None), bad, []) == {}
    fault = GpuFault(
        gpu="GPU-1", node="rig1", kind="xid", code=79, occurred_at=1.0, noticed_at=2.0, boot_id="b1", text="Xid 79"
    )
    faulty = sound.evolve(faults={"GPU-1": (fault,)})
    assert gpu_health.find_new_problems(sound.evolve(read_at=None), faulty, [fault]) == {"GPU-1": "Xid 79"}


def test_zero_error_counters_are_not_a_fault() -> None:
    """Counters at zero, and sensors that there are not."""
    assert assess_gpu(build_up_node(gpu(ecc_uncorrected=0, remap_failed=False))).state is GpuState.FREE


def test_gpus_of_a_silent_agent_are_failed() -> None:
    """Fifteen seconds without a new line: nothing is given there."""
    node = build_up_node(gpu())
    assert supply(node, at=NOW + 15).slots[0].available
    silent = supply(node, at=NOW + 15.1).slots[0]
    assert (silent.available, silent.unavailable_reason) == (False, "its GPU agent is silent")
    assert assess_gpu(node, at=NOW + 15.1) == gpu_health.GpuCondition(
        state=GpuState.FAILED, message="its GPU agent is silent"
    )
    assert assess_node(node, at=NOW + 15.1).message == "its GPU agent is silent"


def test_gpu_reported_by_two_nodes_is_unavailable_on_both() -> None:
    """The GPU is listed once, and both nodes' pages report the conflict."""
    inventory = build_inventory_of(build_up_node(gpu("a")), build_up_node(gpu("a"), gpu("b", 1), name="rig2"))
    every = build_capacities(inventory)
    assert [(slot.uuid, slot.node, slot.available) for node in every for slot in node.slots] == [
        ("a", "rig1", False),
        ("b", "rig2", True),
    ]
    found = gpu_health.assess_node(inventory, "rig2", monotonic=NOW, scheduling=SCHEDULING)
    assert found.message == "GPU 0: rig1 and rig2 report the same GPU a: are they one machine?"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"processes": BUSY, "memory_used_mib": 5222}, "in use outside gpuhub: 1 process, 5.1 GiB"),
        ({"processes": (*BUSY, *BUSY), "memory_used_mib": None}, "in use outside gpuhub: 2 processes"),
        ({"processes": (), "memory_used_mib": 1025}, "in use outside gpuhub: 1.0 GiB"),
        ({"processes": None, "memory_used_mib": 1024}, None),
    ],
)
def test_outside_use_of_a_gpu_is_detected(changes: dict[str, Any], why: str | None) -> None:
    """Processes count, and memory above that of an idle GPU; the text has NVML's data."""
    node = build_up_node(gpu(**changes))
    slot = supply(node).slots[0]
    assert (slot.available, slot.unavailable_reason) == (why is None, why)
    found = assess_gpu(node)
    assert found.state is (GpuState.FREE if why is None else GpuState.OUTSIDE)
    assert found.outside_processes == ((changes["processes"] or ()) if why is not None else ())
    assert assess_gpu(node, is_held=True, lease_status=GpuLeaseStatus(leased=True)).state is GpuState.HELD
    assert supply(node, lease_status=GpuLeaseStatus(leased=True)).slots[0].available


@given(
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.floats(NOW - 10, NOW + 10)),
    st.one_of(st.none(), st.floats(NOW - 10, NOW + 10)),
)
def test_used_gpu_is_available_only_after_a_clean_reading(
    in_use: bool, leased: bool, freed_at: float | None, printed_after: float | None
) -> None:
    """A clean reading gives it at once; one in use never does, and is held against outsiders only if it is new enough."""
    node = build_up_node(gpu(processes=BUSY if in_use else ()), printed_after=printed_after)
    lease_status = GpuLeaseStatus(leased=leased, freed_at=freed_at)
    slot = supply(node, lease_status=lease_status).slots[0]
    is_later = freed_at is None or (printed_after is not None and printed_after >= freed_at)
    if leased or not in_use:
        assert slot.available
        assert slot.unavailable_reason is None
    else:
        assert not slot.available
        assert ("outside" in (slot.unavailable_reason or "")) is is_later
        assert (assess_gpu(node, lease_status=lease_status).state is GpuState.OUTSIDE) is is_later
        awaits = gpu_health.is_awaiting_reading(node, lease_statuses={"GPU-1": lease_status}, scheduling=SCHEDULING)
        assert awaits is not is_later


def test_ended_lease_is_not_reported_as_outside_use() -> None:
    """After a lease a GPU is unavailable until a reading shows it empty or used by others."""
    guards = GpuLeaseFlags()
    guards.mark_held("GPU-1", "l1")
    node = build_up_node(gpu(processes=BUSY))
    guards.mark_freed("GPU-1", "l1", NOW + 1)
    kept = supply(node, at=NOW + 1, lease_status=guards.get_status("GPU-1")).slots[0]
    assert kept.unavailable_reason == "its last lease ended a moment ago; a reading must show first that it is empty"

    def read_again(n: int, at: float, *processes: GpuProcess) -> NodeStatus:
        return agent_container.record_agent_reading(
            node, AgentReading(line_number=n, error=None, gpus=(gpu(processes=processes),)), at
        )

    # The first new line may have been printed before the proof; the one after it was not.
    node = read_again(2, NOW + 2, *BUSY)
    assert not supply(node, at=NOW + 2, lease_status=guards.get_status("GPU-1")).slots[0].available
    assert assess_gpu(node, at=NOW + 2, lease_status=guards.get_status("GPU-1")).state is GpuState.UNAVAILABLE
    assert supply(read_again(3, NOW + 4), at=NOW + 4, lease_status=guards.get_status("GPU-1")).slots[0].available
    assert (
        assess_gpu(read_again(3, NOW + 4, *BUSY), at=NOW + 4, lease_status=guards.get_status("GPU-1")).state
        is GpuState.OUTSIDE
    )


def test_shared_gpu_is_free_after_its_last_lease() -> None:
    """Repeated reports change nothing, nor does the end of a lease that never began."""
    guards = GpuLeaseFlags()
    guards.mark_freed("GPU-1", "l0", 5.0)
    assert guards.get_status("GPU-1") == GpuLeaseStatus()
    for lease in ("l1", "l2", "l2"):
        guards.mark_held("GPU-1", lease)
    guards.mark_freed("GPU-1", "l1", 6.0)
    guards.mark_freed("GPU-1", "l1", 7.0)
    assert guards.get_status("GPU-1") == GpuLeaseStatus(leased=True, freed_at=6.0)
    guards.mark_freed("GPU-1", "l2", 8.0)
    assert guards.by_uuid == {"GPU-1": GpuLeaseStatus(leased=False, freed_at=8.0)}


def test_gpu_problems_are_shown_by_precedence() -> None:
    """An unreachable node hides all but a quarantine; a fault comes before the holder."""
    node = build_up_node(gpu())
    gone = status.record_failure(status.record_failure(node, "no answer", NOW), "no answer", NOW)
    assert assess_gpu(gone, is_held=True) == gpu_health.GpuCondition(state=GpuState.UNAVAILABLE, message="no answer")
    assert assess_gpu(gone, is_held=True, is_quarantined=True).state is GpuState.QUARANTINED
    assert assess_gpu(node, is_held=True, is_quarantined=True).state is GpuState.QUARANTINED
    unread = NodeStatus(name="rig1", is_up=True, is_reconciled=True, daemon_id="d1", gpus=(gpu(),))
    assert assess_gpu(unread).message == "its GPUs have not been read yet"
    unsettled = build_up_node(gpu(), is_reconciled=False)
    assert assess_gpu(unsettled).message == "containers that belong to no lease are being removed"
    assert assess_node(build_up_node(gpu(), is_suspect=True)).message == (
        "another Docker daemon answers than when leases there began"
    )


# -- reports of changes -------------------------------------------------------------------------------------------


def report_changes(conditions: ConditionReporter, node: NodeStatus, at: float = NOW) -> list[tuple[str, str]]:
    return conditions.report_changes(
        build_inventory_of(node), node.name, lease_statuses={}, monotonic=at, scheduling=SCHEDULING
    )


def test_each_condition_change_is_reported_once() -> None:
    """Changes of nodes and GPUs are reported once; a healthy start and a waiting node are not."""
    conditions, node = ConditionReporter(), build_up_node(gpu())
    assert report_changes(conditions, node) == []
    broken = node.evolve(gpus=(gpu(error="GPU is lost"),))
    assert report_changes(conditions, broken) == [("gpu.failed", "GPU 0 (RTX 5090) of rig1: GPU is lost")]
    assert report_changes(conditions, broken) == []
    gone = status.record_failure(status.record_failure(broken, "no answer", NOW), "no answer", NOW)
    assert report_changes(conditions, gone) == [("node.unreachable", "node rig1 is unreachable: no answer")]
    assert report_changes(conditions, gone, NOW + 600) == [("node.down", "node rig1 is down: no answer")]
    assert report_changes(conditions, node) == [
        ("node.up", "node rig1 answers again"),
        ("gpu.healthy", "GPU 0 (RTX 5090) of rig1: can be used again"),
    ]
    assert report_changes(conditions, node.evolve(gpus=(gpu(processes=BUSY),))) == [
        ("gpu.outside", "GPU 0 (RTX 5090) of rig1: in use outside gpuhub: 1 process, 4 MiB")
    ]


def releasing(*nodes: str) -> LeaseRow:
    return lease_row(
        state=LeaseState.RELEASING,
        nodes=nodes,
        gpus=tuple(
            LeasedGpu(uuid=f"GPU-{node}", node=node, index=0, model="RTX 5090", memory_mib=1, worker=0)
            for node in nodes
        ),
    )


def test_leases_long_without_proof_are_found_with_reasons() -> None:
    """A silent node, a doubtful one and a slow one are each named."""
    gone = status.record_failure(
        status.record_failure(build_up_node(gpu(), name="rig2"), "no answer", NOW), "no answer", NOW
    )
    inventory = build_inventory_of(build_up_node(gpu()), gone, build_up_node(gpu(), name="rig3"))
    snapshot = LedgerSnapshot(leases={"l1": releasing("rig1", "rig2", "rig3")})
    doubts = {("l1", "rig3"): "another daemon"}
    assert find_overdue_proofs(snapshot, inventory, doubts, now=129.9, limit_s=30) == {}
    assert find_overdue_proofs(snapshot, inventory, doubts, now=130.0, limit_s=30) == {
        "l1": "its containers on rig1 are not gone yet; "
        "node rig2 does not answer, so what ran there may still run; another daemon"
    }


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("was_full", "node_free", "head_free", "disk"),
    [
        (False, 100, 100, None),
        (False, 99, 100, "of Docker there"),
        (False, 100, 99, "with gpuhub's data on the head node"),
        (False, None, None, None),
        (True, 109, 100, "of Docker there"),
        (True, 110, 100, None),
        (True, 110, 99, "with gpuhub's data on the head node"),
    ],
)
def test_a_full_disk_keeps_a_node_from_taking_work(
    was_full: bool, node_free: int | None, head_free: int | None, disk: str | None
) -> None:
    """The head node's disk counts for every node, and a disk on the border does not come and go."""
    node = build_up_node(gpu(), disk_free=0)
    before = status.record_disks(node, head_error=None, floor=100) if was_full else node
    head_error = status.find_disk_error(head_free, "with gpuhub's data on the head node", floor=100, before=None)
    after = status.record_disks(before.evolve(disk_free=node_free), head_error=head_error, floor=100)
    reason = None if disk is None else f"disk full: less than 100 B are free on the disk {disk}"
    assert gpu_health.explain_node_unavailable(after, None) == reason
    assert assess_node(after) == gpu_health.NodeCondition(state=NodeState.UP, message=reason)
    assert supply(after).takes_work == (reason is None)


XORG, SHELL, GAME = (
    GpuProcess(pid=900, memory_mib=420),
    GpuProcess(pid=1200, memory_mib=800),
    GpuProcess(pid=4711, memory_mib=6100),
)


@pytest.mark.parametrize(
    ("desktop_mib", "reading", "text"),
    [
        # 1.2 GiB of a desktop: more than `outside_memory`.
        (None, {"graphics": (XORG, SHELL), "memory_used_mib": 1240}, "in use outside gpuhub: 1.2 GiB"),
        (1024, {"graphics": (XORG, SHELL), "memory_used_mib": 1240}, None),
        (
            1024,
            {"graphics": (XORG, GAME), "memory_used_mib": 6540},
            "in use outside gpuhub: 6.4 GiB; a large program on the desktop (pid 4711)",
        ),
        (1024, {"graphics": (XORG,), "processes": BUSY, "memory_used_mib": 5660}, "in use outside gpuhub: 1 process,"),
        # Memory of nobody that NVML lists, and of a program whose memory it does not know.
        (1024, {"graphics": (XORG,), "memory_used_mib": 3000}, "in use outside gpuhub: 2.9 GiB"),
        (1024, {"graphics": (GpuProcess(pid=5, memory_mib=None),), "memory_used_mib": 3000}, "in use outside gpuhub:"),
        (1024, {"graphics": None, "memory_used_mib": 1240}, "in use outside gpuhub: 1.2 GiB"),
    ],
)
def test_a_desktop_is_no_use_and_a_game_is(desktop_mib: int | None, reading: dict[str, Any], text: str | None) -> None:
    """Where the settings say that somebody works at the machine's screen."""
    node = build_up_node(gpu(**reading), desktop_mib=desktop_mib)
    slot = supply(node).slots[0]
    assert slot.available is (text is None)
    condition = assess_gpu(node)
    assert condition.state is (GpuState.FREE if text is None else GpuState.OUTSIDE)
    assert (condition.message or "").startswith(text or "")


def test_game_is_named_among_the_processes() -> None:
    """With its pid and memory, for administrators; what else draws is not."""
    condition = assess_gpu(build_up_node(gpu(graphics=(XORG, GAME), memory_used_mib=6540), desktop_mib=1024))
    assert condition.outside_processes == (GAME,)


def test_desktops_come_from_the_settings() -> None:
    """By node, with the most memory of one of its programs."""
    cluster = build_cluster()
    first = cluster.nodes[0].model_copy(update={"desktop": True, "desktop_memory": 2 * 1024**3})
    inventory = build_inventory(cluster.model_copy(update={"nodes": (first, *cluster.nodes[1:])}), {})
    assert [node.desktop_mib for node in inventory.nodes.values()] == [2048, None, None]
