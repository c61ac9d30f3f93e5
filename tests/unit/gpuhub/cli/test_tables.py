"""What administrators read at a terminal."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpuhub.broker_api.schemas import (
    AccountHours,
    CircuitView,
    ConstraintView,
    EventView,
    GpuState,
    GpuView,
    NodeState,
    NodeView,
    OutsideProcess,
    PendingReasonView,
    Purpose,
    QueueEntry,
    ReservationView,
    UsageSource,
    UsageView,
)
from gpuhub.cli import tables
from tests.support.broker.factories import held

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
WIDE = 80


def minutes_later(minutes: float) -> datetime:
    return NOW + timedelta(minutes=minutes)


def gpu(index: int, state: GpuState = GpuState.FREE, message: str | None = None) -> GpuView:
    return GpuView(
        uuid=f"GPU-{index}",
        node="rig1",
        index=index,
        model="RTX 5090",
        memory_mib=32607,
        state=state,
        holder=None,
        message=message,
        outside=(OutsideProcess(pid=4242, memory_mib=5222),) if state is GpuState.OUTSIDE else (),
        utilisation_percent=None,
        memory_used_mib=None,
    )


def node(name: str = "rig1", state: NodeState = NodeState.UP, message: str | None = None, *gpus: GpuView) -> NodeView:
    return NodeView(name=name, state=state, message=message, gpus=gpus, driver="570.86.15", leases=2)


def build_queue_entry(**changes: object) -> QueueEntry:
    made = QueueEntry(
        lease="l9876543210",
        position=1,
        owner="ben",
        purpose=Purpose.JOB,
        wants="3 nodes × 1 GPU",
        since=minutes_later(-5),
    )
    return made.model_copy(update=changes)


def test_columns_fit_the_terminal() -> None:
    """The widest are cut, no line is longer than the terminal, and elsewhere nothing is cut."""
    rows = [("a" * 60, "b" * 60, "short"), ("x", "y", "z")]
    cut = tables.format_table(("FIRST", "SECOND", "THIRD"), rows, WIDE).splitlines()
    assert max(map(len, cut)) <= WIDE
    assert cut[1].endswith("…  short")
    assert "a" * 60 in tables.format_table(("FIRST", "SECOND", "THIRD"), rows, None)


def test_problems_are_listed_below_their_node() -> None:
    """The node's own problem, else those of its GPUs, each on a line below."""
    outside = gpu(1, GpuState.OUTSIDE, "in use outside gpuhub: 1 process, 5.1 GiB")
    text = tables.format_nodes(
        [node("rig1", NodeState.UP, None, gpu(0), outside), node("rig2", NodeState.DRAINING, "draining by root: fans")],
        WIDE,
    )
    assert text.splitlines() == [
        "NODE  STATE     FREE  GPUS          LEASES  DRIVER",
        "rig1  up        1/2   2 × RTX 5090  2       570.86.15",
        "    GPU 1: in use outside gpuhub: 1 process, 5.1 GiB",
        "rig2  draining  0/0   none          2       570.86.15",
        "    draining by root: fans",
    ]


def test_enforced_circuits_follow_the_nodes() -> None:
    """Each once, with what is taken."""
    circuit = CircuitView(name="left", taken_watts=575, gpu_watts=1140)
    nodes = [node(name, NodeState.UP, None).model_copy(update={"circuit": circuit}) for name in ("rig1", "rig2")]
    assert tables.format_nodes([*nodes, node("rig3", NodeState.UP, None)], WIDE).splitlines()[4:] == [
        "circuit left: 575 W of 1,140 W for GPUs taken"
    ]


def test_long_problems_are_wrapped() -> None:
    """Between words, within the terminal."""
    text = tables.format_nodes([node("rig1", NodeState.CORDONED, "the supplier comes on Tuesday " * 9)], WIDE)
    assert max(map(len, text.splitlines())) <= WIDE
    assert len(text.splitlines()) > 4


def test_leases_and_the_queue_below() -> None:
    """Leases with their end, then waiting requests; ids are shortened."""
    text = tables.format_leases(
        [held(expires_at=minutes_later(100))], [build_queue_entry(expected_start=minutes_later(100))], NOW, WIDE
    )
    assert text.splitlines() == [
        "LEASE     OWNER  WHAT      STATE   GPUS      ON    UNTIL",
        "l0123456  ada    notebook  active  RTX 5090  rig1  13:40",
        "",
        "#  LEASE     OWNER  WANTS            SINCE  STARTS",
        "1  l9876543  ben    3 nodes × 1 GPU  11:55  13:40",
    ]
    assert tables.format_leases([], [], NOW, WIDE) == "No leases."
    assert "not known" in tables.format_leases([], [build_queue_entry()], NOW, WIDE)


def test_a_gpu_share_is_not_shown_as_a_whole_gpu() -> None:
    part = held().gpus[0].model_copy(update={"share": 4})
    assert "1/4 of RTX 5090" in tables.format_leases([held(gpus=(part,))], [], NOW, WIDE)


def test_leases_on_a_node() -> None:
    """Only leases with containers on the node, with their GPUs there."""
    elsewhere = held(nodes=("rig2",), owner="ben")
    text = tables.format_node_leases([held(), elsewhere, held(gpus=(), owner="cid")], "rig1", NOW, WIDE)
    assert text.splitlines()[1:] == [
        "l0123456  ada    notebook  RTX 5090    active  no limit",
        "l0123456  cid    notebook  no GPU      active  no limit",
    ]


def test_purpose_of_a_lease() -> None:
    """A named server by its name, a job by its id."""
    assert tables.describe_purpose(held(subject="work")) == "notebook work"
    assert tables.describe_purpose(held(subject="")) == "notebook"
    assert tables.describe_purpose(held(purpose=Purpose.JOB, subject="j0123456789")) == "job j0123456"


def test_pending_reason_lists_demands_with_their_delays() -> None:
    """The most expensive first, in the broker's order."""
    obstacles = (
        ConstraintView(demand="3 nodes", would_start_at=minutes_later(35)),
        ConstraintView(demand="batch", would_start_at=None),
    )
    why = PendingReasonView(
        lease="l", position=2, waits_for="held by ben", expected_start=minutes_later(90), obstacles=obstacles
    )
    assert tables.format_why(why, NOW).splitlines() == [
        "Position 2 of the queue; expected start: 13:30 (in 1 h 30 min).",
        "Waits for: held by ben",
        "",
        "ITS OWN DEMAND  WITHOUT IT, IT WOULD START",
        "3 nodes         12:35 (in 35 min)",
        "batch           not known",
    ]


def test_reservations() -> None:
    """Nodes, GPUs, users, and groups with a mark."""
    kept = ReservationView(
        id="r0123456789",
        name="course",
        nodes=("rig1",),
        users=("ada",),
        groups=("ml",),
        starts_at=minutes_later(0),
        ends_at=minutes_later(3000),
        created_by="root",
    )
    assert tables.format_reservations([kept], NOW, WIDE).splitlines()[1] == (
        "r0123456  course  rig1  ada,@ml  12:00  23 Nov 14:00  root"
    )
    assert tables.format_reservations([], NOW, WIDE) == "No reservations."


def test_usage_with_limits() -> None:
    """A limit follows a slash, which is missing without a limit."""
    usage = UsageView(
        owner="ada",
        gpus=2,
        waiting=1,
        gpu_hours_week=13.25,
        decayed_gpu_hours=4.04,
        penalty_s=720,
        max_gpus=4,
        max_gpu_hours_week=None,
        max_waiting=16,
    )
    assert tables.format_usage([usage], WIDE).splitlines() == [
        "OWNER  GPUS   WAITING  GPU-HOURS 7 D  DECAYED  PENALTY",
        "ada    2 / 4  1 / 16   13.2           4.0      12 min",
    ]


def test_usage_under_slurm() -> None:
    """Hours by Slurm's accounts where it counts them, without gpuhub's columns of fair share."""
    accounts = (
        AccountHours(account="course", gpu_hours_week=0.75),
        AccountHours(account="lab", gpu_hours_week=12.0),
    )
    counted = {"counted_by": UsageSource.SLURM, "gpus": 0, "waiting": 0, "decayed_gpu_hours": 4.0, "penalty_s": 0}
    limits = {"max_gpus": None, "max_gpu_hours_week": None, "max_waiting": None}
    ada = UsageView(owner="ada", gpu_hours_week=12.75, accounts=accounts, **counted, **limits)
    ben = UsageView(owner="ben", gpu_hours_week=0, **counted, **limits)
    assert tables.format_usage([ada, ben], WIDE).splitlines() == [
        "OWNER  GPUS  WAITING  GPU-HOURS 7 D  BY ACCOUNT",
        "ada    0     0        12.8           course 0.8, lab 12.0",
        "ben    0     0        0              –",
    ]
    own = ada.model_copy(update={"counted_by": UsageSource.BROKER, "accounts": ()})
    assert tables.format_usage([own], WIDE).splitlines() == [
        "OWNER  GPUS  WAITING  GPU-HOURS 7 D",
        "ada    0     0        12.8",
    ]


@pytest.mark.parametrize(("width", "lines"), [(None, 1), (WIDE, 2), (20, 1)])
def test_long_events_are_wrapped_below_their_text(width: int | None, lines: int) -> None:
    """If the terminal is wide enough for that."""
    event = EventView(
        seq=1, at=minutes_later(-1500), kind="lease.granted", text="notebook lease of ada: GPU 0 of rig1, " * 2
    )
    text = tables.format_event(event, NOW, width).splitlines()
    assert len(text) == lines
    assert text[0].startswith("20 Nov 11:00:00  lease.granted")
    assert all(len(line) <= (width or 999) or width == 20 for line in text)


def test_times_of_other_days_and_years() -> None:
    """As short as possible, but unique."""
    assert tables.format_clock(minutes_later(60), NOW) == "13:00"
    assert tables.format_clock(minutes_later(1440), NOW) == "22 Nov 12:00"
    assert tables.format_clock(NOW.replace(year=2027, month=1, day=1), NOW) == "1 Jan 2027 12:00"
    assert tables.format_when(minutes_later(-5), NOW, none="?") == "11:55"
    assert tables.format_when(None, NOW, none="?") == "?"
