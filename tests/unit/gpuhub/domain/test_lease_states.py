"""A lease's life: every step allowed and every step refused."""

from __future__ import annotations

import pytest

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common.errors import Conflict
from gpuhub.common.gpu import GpuSpec
from gpuhub.domain import lease_states
from gpuhub.scheduler.interface import GpuSlot, NodeAllocation
from tests.support.broker.factories import lease_row

CARD = GpuSpec(model="RTX 5090", memory_mib=32607)


def shares(*nodes: str) -> list[NodeAllocation]:
    return [NodeAllocation(node=n, slots=(GpuSlot(uuid=f"GPU-{n}", node=n, index=0, card=CARD),)) for n in nodes]


def test_lease_lifecycle_from_request_to_proof() -> None:
    """Granted, active, releasing and released each carry what belongs to them."""
    granted = lease_states.grant(lease_row(time_limit_s=3600), shares("rig1"), 110.0)
    assert (granted.state, granted.epoch, granted.nodes) == (LeaseState.GRANTED, 1, ("rig1",))
    assert (granted.granted_at, granted.expires_at) == (110.0, 3710.0)
    active = lease_states.activate(granted, "c" * 64, 120.0)
    assert (active.state, active.container_id, active.since) == (LeaseState.ACTIVE, "c" * 64, 120.0)
    releasing = lease_states.release(active, "stopped", 130.0)
    assert [gpu.uuid for gpu in releasing.held] == ["GPU-rig1"]
    released = lease_states.prove_released(releasing, "rig1", 140.0)
    assert (released.state, released.held, released.released_at) == (LeaseState.RELEASED, (), 140.0)
    assert released.reason == "stopped"


def test_gang_is_released_one_node_at_a_time() -> None:
    """Each node's own proof frees its own GPUs; the last one ends the lease."""
    releasing = lease_states.release(lease_states.grant(lease_row(), shares("rig1", "rig2"), 1.0), "stopped", 2.0)
    assert lease_states.list_unproven_nodes(releasing) == ("rig1", "rig2")
    half = lease_states.prove_released(releasing, "rig2", 3.0)
    assert (half.state, [gpu.uuid for gpu in half.held]) == (LeaseState.RELEASING, ["GPU-rig1"])
    assert lease_states.list_unproven_nodes(half) == ("rig1",)
    assert lease_states.prove_released(half, "rig1", 4.0).state is LeaseState.RELEASED


def test_a_lease_without_gpus_needs_proof_as_well() -> None:
    """A CPU-only notebook's lease ends when its node shows no container of it."""
    releasing = lease_states.release(
        lease_states.grant(lease_row(), [NodeAllocation(node="rig1", slots=())], 1.0), "stopped", 2.0
    )
    assert lease_states.list_unproven_nodes(releasing) == ("rig1",)
    assert lease_states.prove_released(releasing, "rig1", 3.0).state is LeaseState.RELEASED


def test_a_waiting_request_ends_at_once() -> None:
    """Nothing was given, so nothing is to be proved."""
    ended = lease_states.release(lease_row(), "left the queue", 101.0)
    assert (ended.state, ended.reason, ended.released_at) == (LeaseState.RELEASED, "left the queue", 101.0)


def test_overdue_lease_ends_with_the_time_limit_as_reason() -> None:
    """When the hub stops a notebook because its time is over, the reason is the time limit."""
    active = lease_states.activate(lease_states.grant(lease_row(time_limit_s=3600), shares("rig1"), 0.0), "c" * 64, 1.0)
    assert lease_states.release(active, "stopped", 3600.0).reason == "its time limit of 1 h was reached"
    assert lease_states.release(active, "stopped", 3599.0).reason == "stopped"


def test_a_new_container_replaces_one_that_ended() -> None:
    """Activation may be repeated, with the same container or with a new one."""
    active = lease_states.activate(lease_states.grant(lease_row(), shares("rig1"), 0.0), "c" * 64, 1.0)
    assert lease_states.activate(active, "c" * 64, 2.0) is active
    assert lease_states.activate(active, "d" * 64, 2.0).since == 2.0


@pytest.mark.parametrize("state", [s for s in LeaseState if s not in {LeaseState.GRANTED, LeaseState.ACTIVE}])
def test_only_a_granted_lease_is_activated(state: LeaseState) -> None:
    """A container made for a lease that is not granted (any more) may not be started."""
    with pytest.raises(Conflict, match=f"is {state}"):
        lease_states.activate(lease_row(state=state), "c" * 64, 1.0)


@pytest.mark.parametrize("state", [s for s in LeaseState if s is not LeaseState.REQUESTED])
def test_only_a_waiting_request_is_granted(state: LeaseState) -> None:
    """Nothing is granted twice."""
    with pytest.raises(Conflict):
        lease_states.grant(lease_row(state=state), shares("rig1"), 1.0)


@pytest.mark.parametrize("state", [s for s in LeaseState if s not in lease_states.ENDING])
def test_only_releasing_leases_release_gpus_by_proof(state: LeaseState) -> None:
    """A listing without containers frees nothing of a lease that nobody ended."""
    with pytest.raises(Conflict, match="not releasing"):
        lease_states.prove_released(lease_row(state=state), "rig1", 1.0)


@pytest.mark.parametrize("state", [*lease_states.ENDING, LeaseState.RELEASED])
def test_repeated_release_changes_nothing(state: LeaseState) -> None:
    """The first reason stays."""
    row = lease_row(state=state, reason="first")
    assert lease_states.release(row, "second", 5.0) is row


def test_unproven_lease_is_quarantined_until_proof() -> None:
    """It keeps its GPUs, says why, and still ends by proof; what it holds from then on is not charged."""
    releasing = lease_states.release(lease_states.grant(lease_row(), shares("rig1"), 1.0), "stopped", 2.0)
    stuck = lease_states.quarantine(releasing, "node rig1 does not answer", 40.0)
    assert (stuck.state, stuck.quarantined_at, stuck.since) == (LeaseState.QUARANTINED, 40.0, 40.0)
    assert (stuck.reason, stuck.note) == ("stopped", "quarantined: node rig1 does not answer")
    assert [gpu.uuid for gpu in stuck.held] == ["GPU-rig1"]
    assert lease_states.list_unproven_nodes(stuck) == ("rig1",)
    assert lease_states.quarantine(stuck, "again", 50.0) is stuck
    assert lease_states.prove_released(stuck, "rig1", 60.0).state is LeaseState.RELEASED


@pytest.mark.parametrize("state", [s for s in LeaseState if s not in lease_states.ENDING])
def test_only_a_releasing_lease_is_quarantined(state: LeaseState) -> None:
    """Whoever was not asked to end needs no proof."""
    with pytest.raises(Conflict, match="cannot become quarantined"):
        lease_states.quarantine(lease_row(state=state), "why", 1.0)


@pytest.mark.parametrize("state", sorted(lease_states.ENDING))
def test_administrator_can_force_a_releasing_lease(state: LeaseState) -> None:
    """Without proof, and with the name of who answers for it; said again, nothing changes."""
    held = lease_states.grant(lease_row(), shares("rig1", "rig2"), 1.0).evolve(state=state, reason="stopped")
    freed = lease_states.force_release(held, "root", 9.0)
    assert (freed.state, freed.held, freed.released_at) == (LeaseState.RELEASED, (), 9.0)
    assert freed.note == "freed without proof by root"
    assert lease_states.force_release(freed, "eve", 10.0) is freed


@pytest.mark.parametrize("state", [LeaseState.REQUESTED, LeaseState.GRANTED, LeaseState.ACTIVE])
def test_open_leases_cannot_be_forced(state: LeaseState) -> None:
    """It is to be ended first."""
    with pytest.raises(Conflict, match="end it first"):
        lease_states.force_release(lease_row(state=state), "root", 1.0)


def test_elastic_lease_shrinks_by_one_node() -> None:
    """The GPUs are held until there is proof, which frees these alone; the other nodes' proof frees nothing."""
    active = lease_states.activate(lease_states.grant(lease_row(), shares("rig1", "rig2"), 1.0), None, 1.0)
    less = lease_states.shrink(active, {"rig2"}, 2.0)
    assert (less.state, lease_states.list_live_nodes(less), lease_states.list_unproven_nodes(less)) == (
        LeaseState.ACTIVE,
        ("rig1",),
        ("rig2",),
    )
    assert [gpu.uuid for gpu in less.held] == ["GPU-rig1", "GPU-rig2"]
    with pytest.raises(Conflict, match="not releasing"):
        lease_states.prove_released(less, "rig1", 3.0)
    proven = lease_states.prove_released(less, "rig2", 3.0)
    assert (proven.state, [gpu.uuid for gpu in proven.held]) == (LeaseState.ACTIVE, ["GPU-rig1"])
    assert lease_states.list_unproven_nodes(proven) == ()
    with pytest.raises(Conflict, match="no node left"):
        lease_states.shrink(proven, {"rig1"}, 4.0)
    ended = lease_states.prove_released(lease_states.release(proven, "stopped", 5.0), "rig1", 6.0)
    assert [gpu.released_at for gpu in ended.gpus] == [6.0, 3.0]


@pytest.mark.parametrize("state", [s for s in LeaseState if s not in lease_states.LIVE])
def test_only_running_leases_are_shrunk_or_extended(state: LeaseState) -> None:
    """A request has no nodes, and an ending lease releases all of them."""
    with pytest.raises(Conflict, match="cannot release only some"):
        lease_states.shrink(lease_row(state=state), {"rig1"}, 1.0)
    with pytest.raises(Conflict, match="a time to change"):
        lease_states.extend(lease_row(state=state), 60, 1.0)


def test_extension_of_the_time_limit() -> None:
    """It counts from now; an overdue lease gets none."""
    granted = lease_states.grant(lease_row(time_limit_s=100), shares("rig1"), 0.0)
    more = lease_states.extend(granted, 100, 50.0)
    assert (more.expires_at, more.time_limit_s) == (150.0, 150)
    with pytest.raises(Conflict, match="is over"):
        lease_states.extend(granted, 100, 100.0)


def test_drain_shortens_the_time_limit_and_uncordon_restores_it() -> None:
    """The lease says why it will end; it is not extended, and ends with that reason, or gets its own limit back."""
    granted = lease_states.grant(lease_row(time_limit_s=100), shares("rig1"), 0.0)
    short = lease_states.shorten(granted, 60.0, "node rig1 is draining by root")
    assert (short.expires_at, short.reason) == (60.0, "node rig1 is draining by root")
    assert lease_states.shorten(granted, 200.0, "later") is granted
    with pytest.raises(Conflict, match="node rig1 is draining by root"):
        lease_states.extend(short, 100, 10.0)
    assert lease_states.release(short, "stopped", 60.0).reason == "node rig1 is draining by root"
    assert lease_states.release(short, "stopped", 59.0).reason == "stopped"
    assert lease_states.restore_time(short) == granted
    unlimited = lease_states.grant(lease_row(), shares("rig1"), 0.0)
    assert lease_states.restore_time(lease_states.shorten(unlimited, 60.0, "drained")) == unlimited


def test_clock_jump_shifts_all_timestamps() -> None:
    """The time left is what it was."""
    granted = lease_states.grant(lease_row(time_limit_s=100), shares("rig1"), 110.0)
    moved = lease_states.shift_times(granted, 3600.0)
    assert (moved.created_at, moved.since, moved.granted_at, moved.expires_at) == (3700.0, 3710.0, 3710.0, 3810.0)
    assert lease_states.shift_times(moved, -3600.0) == granted
