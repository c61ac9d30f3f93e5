"""Sequences of events that are known to break such systems; each passes here, and fails with a planted bug.

The bugs are typical: a hub that takes silence for an end, a lease that is freed by time or without proof, an intent that was
not stored, one slow machine that delays all others, a lease holder that slept past its own end.
"""

from __future__ import annotations

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common import names
from tests.integration.gpuhub.broker.stateful.boxes import UUIDS, Link
from tests.integration.gpuhub.broker.stateful.people import Notebook, People
from tests.integration.gpuhub.broker.stateful.settling import advance_with_hub, settle
from tests.integration.gpuhub.broker.stateful.truth import find_violations
from tests.integration.gpuhub.broker.stateful.world import World

SEATS = (("ada", ""), ("ada", "two"), ("ben", ""), ("ben", "two"), ("cleo", ""))


def check_invariants(world: World, people: People) -> None:
    """Check that no invariant is broken at this moment."""
    found = find_violations(world, people)
    assert not found, found


def check_recovery(world: World, people: People) -> None:
    """Check the invariants after every fault is healed, and that nothing is left after all users have finished."""
    found = settle(world, people, lambda: find_violations(world, people))
    assert not found, found


def advance_and_check(world: World, people: People, seconds: float) -> None:
    """Let time pass, and check the invariants repeatedly."""
    for _ in range(int(seconds / 2)):
        advance_with_hub(world, people, 2)
        check_invariants(world, people)


def use_every_gpu(world: World, people: People, first: str = "any") -> list[Notebook]:
    """Use every GPU and let one more user wait; the first notebook has the profile `first`."""
    made = [people.ask(*seat, first if number == 0 else "any") for number, seat in enumerate(SEATS)]
    world.advance(2)
    for notebook in made:
        assert people.run(notebook), "every user gets a GPU"
    people.ask("cleo", "two", "any")
    world.advance(2)
    check_invariants(world, people)
    return made


def time_limit_expires_during_partition(world: World, people: People) -> None:
    """A time limit is not a proof: a container that may still run keeps its GPU."""
    notebook = use_every_gpu(world, people, "short")[0]
    world.boxes[notebook.node].link = Link.DOWN
    advance_and_check(world, people, 120)
    assert notebook.lease in people.open_leases(LeaseState.QUARANTINED, LeaseState.RELEASING, LeaseState.ACTIVE)
    check_recovery(world, people)


def notebook_is_stopped_during_partition(world: World, people: People) -> None:
    """The hub forgets the server; its container and its lease continue."""
    notebook = use_every_gpu(world, people)[0]
    world.boxes[notebook.node].link = Link.DOWN
    people.stop(notebook)
    advance_and_check(world, people, 60)
    assert notebook.lease in people.open_leases(LeaseState.QUARANTINED)
    check_recovery(world, people)


def daemon_returns_with_empty_data(world: World, people: People) -> None:
    """It lists no containers, but they still run: only a restart of the machine frees the GPU."""
    notebook = use_every_gpu(world, people)[0]
    world.boxes[notebook.node].wipe()
    advance_and_check(world, people, 10)
    people.stop(notebook)
    advance_and_check(world, people, 60)
    assert notebook.lease in people.open_leases(LeaseState.QUARANTINED)
    check_recovery(world, people)


def daemon_is_wiped_after_a_reboot(world: World, people: People) -> None:
    """A reboot before the container was created does not prove that it will not run later."""
    notebook = people.ask("ada", "", "rtx5090")
    world.advance(2)
    lease = people.see(notebook)
    assert lease is not None
    box = world.boxes[lease.nodes[0]]
    box.reboot()
    world.advance(8)
    box.heal_link()
    world.advance(15)
    assert people.run(notebook)
    box.wipe()
    advance_and_check(world, people, 30)
    check_recovery(world, people)


def container_of_an_earlier_epoch_appears(world: World, people: People) -> None:
    """It is removed, and the container of the current epoch continues."""
    notebook = use_every_gpu(world, people)[0]
    box = world.boxes[notebook.node]
    labels = {
        names.LABEL_KIND: names.KIND_NOTEBOOK,
        names.LABEL_LEASE: notebook.lease or "",
        names.LABEL_EPOCH: "0",
        names.LABEL_OWNER: notebook.owner,
        UUIDS: "",
    }
    stale = box.node.run_container(labels)
    advance_and_check(world, people, 10)
    assert stale not in box.node.containers
    assert notebook.container in box.node.containers
    check_recovery(world, people)


def broker_dies_while_starting_workers(world: World, people: People) -> None:
    """It dies at each step in turn; the next broker finds the containers and creates none twice."""
    for steps in range(0, 40, 3):
        world.die_after(steps)
        job = people.launch("ada", nnodes=3)
        world.advance(3)
        world.kill()
        check_invariants(world, people)
        world.start()
        advance_and_check(world, people, 12)
        if job is not None:
            people.stop_job(job)
        for stored in people.jobs:
            people.stop_job(stored)
        advance_and_check(world, people, 20)
    check_recovery(world, people)


def request_is_repeated_after_its_lease_ended(world: World, people: People) -> None:
    """The same key always returns the same lease."""
    notebook = people.ask("ada", "", "any")
    world.advance(2)
    assert people.run(notebook)
    assert people.ask_again(notebook)
    people.stop(notebook)
    world.advance(5)
    # With a bug the store refuses the second lease, and the spawner gets no answer.
    assert people.ask_again(notebook)
    world.kill()
    world.start()
    world.advance(10)
    assert people.ask_again(notebook)
    check_invariants(world, people)
    check_recovery(world, people)


def hub_restarts_during_partition(world: World, people: People) -> None:
    """Silence does not mean an end: the notebook continues, and is the same one when the node is back."""
    notebook = use_every_gpu(world, people)[0]
    world.boxes[notebook.node].link = Link.DOWN
    people.hub_polls(is_restored=True)
    advance_and_check(world, people, 30)
    people.hub_polls(is_restored=True)
    world.boxes[notebook.node].heal_link()
    advance_and_check(world, people, 30)
    assert notebook.lease in people.open_leases(LeaseState.ACTIVE)
    check_recovery(world, people)


def broker_dies_after_every_response(world: World, people: People) -> None:
    """The next broker knows everything that was in a response."""
    for owner, server in SEATS:
        notebook = people.ask(owner, server, "any")
        world.kill()
        world.start()
        world.advance(6)
        assert people.see(notebook) is not None, "a lease in a response was lost"
        assert people.run(notebook)
        world.kill()
        world.start()
        check_invariants(world, people)
    advance_and_check(world, people, 10)
    check_recovery(world, people)


def container_of_an_ended_lease_appears(world: World, people: People) -> None:
    """A spawner that slept creates it after the lease was released: it is removed."""
    notebook = people.ask("ada", "", "rtx5090")
    world.advance(2)
    lease = people.see(notebook)
    assert lease is not None
    people.stop(notebook)
    world.advance(5)
    people.create_for(notebook, lease)
    advance_and_check(world, people, 10)
    check_recovery(world, people)


def holder_resumes_after_its_lease_was_reassigned(world: World, people: People) -> None:
    """It slept between grant and creation: it may create the container, but may not start it."""
    sleepers = [people.ask(owner, server, "any") for owner, server in SEATS]
    world.advance(2)
    leases = [people.see(sleeper) for sleeper in sleepers]
    world.advance(60)
    others = use_every_gpu(world, people)
    for sleeper, lease in zip(sleepers, leases, strict=True):
        assert lease is not None
        sleeper.server = "late"
        people.create_for(sleeper, lease)
        people.activate(sleeper)
        people.begin(sleeper)
        check_invariants(world, people)
    assert all(other.container for other in others)
    check_recovery(world, people)


def elastic_job_shrinks(world: World, people: People) -> None:
    """Its released GPUs are granted to others only after the worker on them is gone."""
    job = people.launch("ada", nnodes=3, nproc_per_node=1, min_nnodes=1, exclusive=True)
    advance_and_check(world, people, 6)
    assert job is not None
    notebook = people.ask("ben", "", "any")
    for _ in range(300):
        world.advance(0.1)
        check_invariants(world, people)
    assert people.run(notebook)
    check_invariants(world, people)
    check_recovery(world, people)


def broker_dies_while_a_job_makes_way(world: World, people: People) -> None:
    """It dies at each step in turn; the job is suspended for others, and continues with its GPU after them."""
    suspended = 0
    for steps in range(0, 48, 6):
        jobs = [people.launch("ada", nnodes=1, detached=True, scavenge=True) for _ in SEATS]
        advance_and_check(world, people, 8)
        world.die_after(steps)
        people.ask("ben", "", "any")
        world.advance(6)
        world.kill()
        check_invariants(world, people)
        world.start()
        world.advance(6)
        notebook = people.ask("ben", "", "any")
        advance_and_check(world, people, 6)
        suspended += sum(len(box.node.moved) for box in world.boxes.values())
        assert people.run(notebook)
        advance_and_check(world, people, 6)
        people.stop(notebook)
        advance_and_check(world, people, 16)
        assert not any(box.node.moved for box in world.boxes.values()), "every job has its GPU again"
        for job in jobs:
            if job is not None:
                people.stop_job(job)
        advance_and_check(world, people, 20)
    assert suspended
    check_recovery(world, people)


def clock_is_set_back_while_the_broker_is_down(world: World, people: People) -> None:
    """Ending leases are still proven gone, and their GPUs are free within seconds, not when the clock has caught up."""
    notebook = use_every_gpu(world, people)[0]
    world.boxes[notebook.node].link = Link.DOWN
    people.stop(notebook)
    world.advance(5)
    world.kill()
    world.skew -= 3600
    world.start()
    world.boxes[notebook.node].heal_link()
    advance_and_check(world, people, 60)
    assert notebook.lease not in people.open_leases(LeaseState.RELEASING, LeaseState.QUARANTINED)
    check_recovery(world, people)


def daemon_is_wiped_while_the_broker_is_down(world: World, people: People) -> None:
    """A created worker that no daemon lists may still run: no second one is started next to it."""
    for steps in range(18, 26):
        world.die_after(steps)
        people.launch("ada", nnodes=1, batch=True)
        world.advance(2)
        world.kill()
        for box in world.boxes.values():
            box.wipe()
        world.start()
        advance_and_check(world, people, 16)
        for job in people.jobs:
            people.stop_job(job)
    check_recovery(world, people)
