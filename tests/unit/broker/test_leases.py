"""A lease's life: every step allowed and every step refused."""

from __future__ import annotations

import pytest

from gpuhub.broker import leases
from gpuhub.broker.rows import Ask, LeaseRow
from gpuhub.broker.schemas import LeaseState, Purpose
from gpuhub.engines.base import Share, Slot
from gpuhub.errors import Conflict
from gpuhub.gpus import Card

CARD = Card(model="RTX 5090", memory_mib=32607)


def waiting(**changes: object) -> LeaseRow:
    row = LeaseRow(
        id="l1",
        seq=1,
        key="k",
        owner="ada",
        purpose=Purpose.NOTEBOOK,
        subject="",
        profile="rtx5090",
        ask=Ask(),
        created_at=100.0,
        since=100.0,
    )
    return row.evolve(**changes)


def shares(*nodes: str) -> list[Share]:
    return [Share(node=n, slots=(Slot(uuid=f"GPU-{n}", node=n, index=0, card=CARD),)) for n in nodes]


def test_a_life_from_request_to_proof() -> None:
    """Granted, active, releasing and released each carry what belongs to them."""
    granted = leases.grant(waiting(time_limit_s=3600), shares("rig1"), 110.0)
    assert (granted.state, granted.epoch, granted.nodes) == (LeaseState.GRANTED, 1, ("rig1",))
    assert (granted.granted_at, granted.expires_at) == (110.0, 3710.0)
    active = leases.activate(granted, "c" * 64, 120.0)
    assert (active.state, active.container_id, active.since) == (LeaseState.ACTIVE, "c" * 64, 120.0)
    releasing = leases.release(active, "stopped", 130.0)
    assert [gpu.uuid for gpu in releasing.held] == ["GPU-rig1"]
    released = leases.prove_gone(releasing, "rig1", 140.0)
    assert (released.state, released.held, released.released_at) == (LeaseState.RELEASED, (), 140.0)
    assert released.reason == "stopped"


def test_a_gang_is_released_node_by_node() -> None:
    """Each node's own proof frees its own GPUs; the last one ends the lease."""
    releasing = leases.release(leases.grant(waiting(), shares("rig1", "rig2"), 1.0), "stopped", 2.0)
    assert leases.unproven_nodes(releasing) == ("rig1", "rig2")
    half = leases.prove_gone(releasing, "rig2", 3.0)
    assert (half.state, [gpu.uuid for gpu in half.held]) == (LeaseState.RELEASING, ["GPU-rig1"])
    assert leases.unproven_nodes(half) == ("rig1",)
    assert leases.prove_gone(half, "rig1", 4.0).state is LeaseState.RELEASED


def test_a_lease_without_gpus_needs_proof_as_well() -> None:
    """A CPU-only notebook's lease ends when its node shows no container of it."""
    releasing = leases.release(leases.grant(waiting(), [Share(node="rig1", slots=())], 1.0), "stopped", 2.0)
    assert leases.unproven_nodes(releasing) == ("rig1",)
    assert leases.prove_gone(releasing, "rig1", 3.0).state is LeaseState.RELEASED


def test_a_waiting_request_ends_at_once() -> None:
    """Nothing was given, so nothing is to be proved."""
    ended = leases.release(waiting(), "left the queue", 101.0)
    assert (ended.state, ended.reason, ended.released_at) == (LeaseState.RELEASED, "left the queue", 101.0)


def test_an_overdue_lease_says_so_whoever_ends_it() -> None:
    """When the hub stops a notebook because its time is over, the reason is the time limit."""
    active = leases.activate(leases.grant(waiting(time_limit_s=3600), shares("rig1"), 0.0), "c" * 64, 1.0)
    assert leases.release(active, "stopped", 3600.0).reason == "its time limit of 1 h was reached"
    assert leases.release(active, "stopped", 3599.0).reason == "stopped"


def test_a_new_container_replaces_one_that_ended() -> None:
    """Activation may be repeated, with the same container or with a new one."""
    active = leases.activate(leases.grant(waiting(), shares("rig1"), 0.0), "c" * 64, 1.0)
    assert leases.activate(active, "c" * 64, 2.0) is active
    assert leases.activate(active, "d" * 64, 2.0).since == 2.0


@pytest.mark.parametrize("state", [s for s in LeaseState if s not in {LeaseState.GRANTED, LeaseState.ACTIVE}])
def test_only_a_granted_lease_is_activated(state: LeaseState) -> None:
    """A container made for a lease that is not granted (any more) may not be started."""
    with pytest.raises(Conflict, match=f"is {state}"):
        leases.activate(waiting(state=state), "c" * 64, 1.0)


@pytest.mark.parametrize("state", [s for s in LeaseState if s is not LeaseState.WAITING])
def test_only_a_waiting_request_is_granted(state: LeaseState) -> None:
    """Nothing is granted twice."""
    with pytest.raises(Conflict):
        leases.grant(waiting(state=state), shares("rig1"), 1.0)


@pytest.mark.parametrize("state", [s for s in LeaseState if s is not LeaseState.RELEASING])
def test_gpus_are_given_back_from_releasing_alone(state: LeaseState) -> None:
    """A listing without containers frees nothing of a lease that nobody ended."""
    with pytest.raises(Conflict, match="not releasing"):
        leases.prove_gone(waiting(state=state), "rig1", 1.0)


@pytest.mark.parametrize("state", [LeaseState.RELEASING, LeaseState.RELEASED])
def test_ending_twice_changes_nothing(state: LeaseState) -> None:
    """The first reason stays."""
    row = waiting(state=state, reason="first")
    assert leases.release(row, "second", 5.0) is row
