"""Sequences of events that are known to break such systems; each passes here, and fails with a planted bug.

The bugs are typical: a hub that takes silence for an end, a lease that is freed by time or without proof, an intent that was
not stored, one slow machine that delays all others, a lease holder that slept past its own end.
"""

from __future__ import annotations

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common import names
from tests.integration.gpuhub.broker.stateful.boxes import UUIDS, Link
from tests.integration.gpuhub.broker.stateful.people import Notebook, People
from tests.integration.gpuhub.broker.stateful.settling import pass_time, settle
from tests.integration.gpuhub.broker.stateful.truth import wrongs
from tests.integration.gpuhub.broker.stateful.world import World

SEATS = (("ada", ""), ("ada", "two"), ("ben", ""), ("ben", "two"), ("cleo", ""))


def well(world: World, people: People) -> None:
    """Check that no invariant is broken at this moment."""
    found = wrongs(world, people)
    assert not found, found


def come_right(world: World, people: People) -> None:
    """Check the invariants after every fault is healed, and that nothing is left after all users have finished."""
    found = settle(world, people, lambda: wrongs(world, people))
    assert not found, found


def watch(world: World, people: People, seconds: float) -> None:
    """Let time pass, and check the invariants repeatedly."""
    for _ in range(int(seconds / 2)):
        pass_time(world, people, 2)
        well(world, people)


def fill(world: World, people: People, first: str = "any") -> list[Notebook]:
    """Use every GPU and let one more user wait; the first notebook has the profile `first`."""
    made = [people.ask(*seat, first if number == 0 else "any") for number, seat in enumerate(SEATS)]
    world.advance(2)
    for notebook in made:
        assert people.run(notebook), "every user gets a GPU"
    people.ask("cleo", "two", "any")
    world.advance(2)
    well(world, people)
    return made


def a_time_limit_passes_while_the_node_is_cut_off(world: World, people: People) -> None:
    """A time limit is not a proof: a container that may still run keeps its GPU."""
    notebook = fill(world, people, "short")[0]
    world.boxes[notebook.node].link = Link.DOWN
    watch(world, people, 120)
    assert notebook.lease in people.open_leases(LeaseState.QUARANTINED, LeaseState.RELEASING, LeaseState.ACTIVE)
    come_right(world, people)


def a_notebook_is_stopped_while_its_node_is_cut_off(world: World, people: People) -> None:
    """The hub forgets the server; its container and its lease continue."""
    notebook = fill(world, people)[0]
    world.boxes[notebook.node].link = Link.DOWN
    people.stop(notebook)
    watch(world, people, 60)
    assert notebook.lease in people.open_leases(LeaseState.QUARANTINED)
    come_right(world, people)


def a_daemon_comes_back_with_empty_data(world: World, people: People) -> None:
    """It lists no containers, but they still run: only a restart of the machine frees the GPU."""
    notebook = fill(world, people)[0]
    world.boxes[notebook.node].wipe()
    watch(world, people, 10)
    people.stop(notebook)
    watch(world, people, 60)
    assert notebook.lease in people.open_leases(LeaseState.QUARANTINED)
    come_right(world, people)


def a_wiped_daemon_after_a_reboot(world: World, people: People) -> None:
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
    watch(world, people, 30)
    come_right(world, people)


def a_container_of_an_earlier_epoch_appears(world: World, people: People) -> None:
    """It is removed, and the container of the current epoch continues."""
    notebook = fill(world, people)[0]
    box = world.boxes[notebook.node]
    labels = {
        names.LABEL_KIND: names.KIND_NOTEBOOK,
        names.LABEL_LEASE: notebook.lease or "",
        names.LABEL_EPOCH: "0",
        names.LABEL_OWNER: notebook.owner,
        UUIDS: "",
    }
    stale = box.node.run_container(labels)
    watch(world, people, 10)
    assert stale not in box.node.containers
    assert notebook.container in box.node.containers
    come_right(world, people)


def the_broker_dies_while_it_starts_workers(world: World, people: People) -> None:
    """It dies at each step in turn; the next broker finds the containers and creates none twice."""
    for steps in range(0, 40, 3):
        world.die_after(steps)
        job = people.launch("ada", nnodes=3)
        world.advance(3)
        world.kill()
        well(world, people)
        world.start()
        watch(world, people, 12)
        if job is not None:
            people.stop_job(job)
        for stored in people.jobs:
            people.stop_job(stored)
        watch(world, people, 20)
    come_right(world, people)


def a_request_is_repeated_after_its_lease_ended(world: World, people: People) -> None:
    """The same key always returns the same lease."""
    notebook = people.ask("ada", "", "any")
    world.advance(2)
    assert people.run(notebook)
    people.ask_again(notebook)
    people.stop(notebook)
    world.advance(5)
    people.ask_again(notebook)
    world.kill()
    world.start()
    world.advance(10)
    people.ask_again(notebook)
    well(world, people)
    come_right(world, people)


def the_hub_is_restarted_while_a_node_is_cut_off(world: World, people: People) -> None:
    """Silence does not mean an end: the notebook continues, and is the same one when the node is back."""
    notebook = fill(world, people)[0]
    world.boxes[notebook.node].link = Link.DOWN
    people.hub_polls(is_restored=True)
    watch(world, people, 30)
    people.hub_polls(is_restored=True)
    world.boxes[notebook.node].heal_link()
    watch(world, people, 30)
    assert notebook.lease in people.open_leases(LeaseState.ACTIVE)
    come_right(world, people)


def the_broker_dies_after_every_answer(world: World, people: People) -> None:
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
        well(world, people)
    watch(world, people, 10)
    come_right(world, people)


def a_container_of_an_ended_lease_appears(world: World, people: People) -> None:
    """A spawner that slept creates it after the lease was released: it is removed."""
    notebook = people.ask("ada", "", "rtx5090")
    world.advance(2)
    lease = people.see(notebook)
    assert lease is not None
    people.stop(notebook)
    world.advance(5)
    people.create_for(notebook, lease)
    watch(world, people, 10)
    come_right(world, people)


def a_holder_wakes_after_its_lease_was_given_on(world: World, people: People) -> None:
    """It slept between grant and creation: it may create the container, but may not start it."""
    sleepers = [people.ask(owner, server, "any") for owner, server in SEATS]
    world.advance(2)
    leases = [people.see(sleeper) for sleeper in sleepers]
    world.advance(60)
    others = fill(world, people)
    for sleeper, lease in zip(sleepers, leases, strict=True):
        assert lease is not None
        sleeper.server = "late"
        people.create_for(sleeper, lease)
        people.activate(sleeper)
        people.begin(sleeper)
        well(world, people)
    assert all(other.container for other in others)
    come_right(world, people)


def an_elastic_job_shrinks(world: World, people: People) -> None:
    """Its released GPUs are granted to others only after the worker on them is gone."""
    job = people.launch("ada", nnodes=3, nproc_per_node=1, min_nnodes=1, exclusive=True)
    watch(world, people, 6)
    assert job is not None
    notebook = people.ask("ben", "", "any")
    for _ in range(300):
        world.advance(0.1)
        well(world, people)
    assert people.run(notebook)
    well(world, people)
    come_right(world, people)


def the_clock_is_set_back_while_no_broker_runs(world: World, people: People) -> None:
    """Ending leases are still proven gone, and their GPUs are free within seconds, not when the clock has caught up."""
    notebook = fill(world, people)[0]
    world.boxes[notebook.node].link = Link.DOWN
    people.stop(notebook)
    world.advance(5)
    world.kill()
    world.skew -= 3600
    world.start()
    world.boxes[notebook.node].heal_link()
    watch(world, people, 60)
    assert notebook.lease not in people.open_leases(LeaseState.RELEASING, LeaseState.QUARANTINED)
    come_right(world, people)


def a_daemon_is_wiped_while_no_broker_runs(world: World, people: People) -> None:
    """A created worker that no daemon lists may still run: no second one is started next to it."""
    for steps in range(18, 26):
        world.die_after(steps)
        people.launch("ada", nnodes=1, batch=True)
        world.advance(2)
        world.kill()
        for box in world.boxes.values():
            box.wipe()
        world.start()
        watch(world, people, 16)
        for job in people.jobs:
            people.stop_job(job)
    come_right(world, people)
