"""When every fault is healed and time passes, the state must become correct: nothing leaked, no request forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuhub.broker_api.schemas import GpuState, LeaseState
from gpuhub.common import names
from gpuhub.domain.models import LeaseRow
from tests.integration.gpuhub.broker.stateful.people import Notebook, People
from tests.integration.gpuhub.broker.stateful.slurm_system import PREFIX
from tests.integration.gpuhub.broker.stateful.truth import running_containers
from tests.integration.gpuhub.broker.stateful.world import ADMIN, World

#: Longer than any wait of the broker with the limits in `conftest`, seconds.
SETTLE_S = 150.0
#: Time until a GPU that has become free is granted, or a request that has become the first one, seconds.
SERVED_S = 40.0
#: The number of rounds in which holders of grants work and end; each round serves some requests.
TURNS = 60
_ENDING = (LeaseState.RELEASING, LeaseState.QUARANTINED)


def heal(world: World, people: People) -> None:
    """Repair every machine; one whose daemon was wiped is rebooted, as an administrator would do."""
    for box in world.boxes.values():
        box.heal_link()
        box.restore_gpus()
        if box.is_wiped:
            people.excuse(box.name, "its node was rebooted")
            box.reboot()
            world.advance(6)
            box.heal_link()
    if world.slurm is not None:
        world.slurm.heal()
    if not world.is_alive:
        world.start()
    world.life.steps_left = None
    for reservation in world.cluster_operations.reservations():
        world.try_call(world.admin.cancel_reservation(ADMIN, reservation.id))
    for name in world.boxes:
        world.try_call(world.admin.undrain(ADMIN, name))


def settle(world: World, people: People, check: Callable[[], list[str]]) -> list[str]:
    """Heal, wait, and return what did not become correct; then let all users finish, and return what is left."""
    heal(world, people)
    advance_with_hub(world, people, SETTLE_S)
    found = [
        *check(),
        *_find_leaked_containers(world),
        *_find_lost_notebooks(people, world),
        *_find_stuck_leases(world),
        *_find_starving_request_twice(world, people),
        *_find_unmatched_slurm_jobs(world),
    ]
    return found or [*finish_all_work(world, people), *check()]


def advance_with_hub(world: World, people: People, seconds: float) -> None:
    """Let time pass with a hub that polls and does what it is asked to."""
    end = world.loop.time() + seconds
    while world.loop.time() < end:
        world.advance(min(10.0, end - world.loop.time()))
        people.hub_stops()
        people.hub_polls(is_restored=False)


def finish_all_work(world: World, people: People) -> list[str]:
    """Serve all waiting users in turn until they have worked and ended; then nothing may be left."""
    # Also leases whose client never got a response.
    for job in list(world.core.ledger.snapshot.jobs):
        world.try_call(world.broker.stop_job(ADMIN, job))
    for _ in range(TURNS):
        waiting = people.open_leases(LeaseState.REQUESTED)
        for notebook in people.notebooks:
            if notebook.lease not in waiting:
                people.stop(notebook)
        world.advance(10.0)
        if not world.core.ledger.snapshot.leases:
            break
    world.advance(10.0)
    left = [f"{row.id} of {row.owner} is {row.state}" for row in world.core.ledger.snapshot.leases.values()]
    left += [f"job {row.id} is {row.state}" for row in world.core.ledger.snapshot.jobs.values()]
    left += [f"container {one.id[-6:]} of {one.lease} still runs" for one in running_containers(world)]
    if world.slurm is not None:
        left += [f"job {job.id} of {job.name} is left" for job in world.slurm.own_jobs()]
    states = {gpu.uuid: (gpu.state, gpu.message) for node in world.cluster_operations.nodes(ADMIN) for gpu in node.gpus}
    return left + [f"{uuid} is {state}: {why}" for uuid, (state, why) in states.items() if state is not GpuState.FREE]


def _find_leaked_containers(world: World) -> list[str]:
    """Return containers on nodes that belong to no open lease there."""
    leases = world.core.ledger.snapshot.leases
    return [
        f"container {found['Id'][-6:]} of lease {lease} is still on {box.name}"
        for box in world.boxes.values()
        for found in box.node.containers.values()
        if found["Labels"].get(names.LABEL_KIND) != names.KIND_AGENT
        and not _belongs_to_lease(
            found["Labels"], leases.get(lease := found["Labels"].get(names.LABEL_LEASE, "")), box.name
        )
    ]


def _belongs_to_lease(labels: Mapping[str, str], lease: LeaseRow | None, node: str) -> bool:
    return lease is not None and node in lease.nodes and labels.get(names.LABEL_EPOCH) == str(lease.epoch)


def _find_lost_notebooks(people: People, world: World) -> list[str]:
    """Return notebooks that ended without a cause."""
    alive = {one.id for one in running_containers(world)}
    return [
        f"the notebook {one.owner}/{one.server} of lease {one.lease} does not run, although nothing ended it"
        for one in people.notebooks
        if one.is_started and not one.excuses and not _is_past_time_limit(one) and one.container not in alive
    ]


def _is_past_time_limit(notebook: Notebook) -> bool:
    """Return whether the notebook's time limit has passed."""
    return notebook.profile == "short"


def _find_stuck_leases(world: World) -> list[str]:
    """Return leases that are still ending although every node could prove their end."""
    leases = world.core.ledger.snapshot.leases.values()
    return [f"lease {row.id} is still {row.state}: {row.reason}" for row in leases if row.state in _ENDING]


def _find_unmatched_slurm_jobs(world: World) -> list[str]:
    """Return leases without their Slurm job, and Slurm jobs without their lease."""
    if world.slurm is None:
        return []
    jobs = [(job.name.removeprefix(PREFIX), job.id) for job in world.slurm.own_jobs()]
    # Slurm does not know of a request that waits for other jobs.
    rows = [row for row in world.core.ledger.snapshot.leases.values() if not row.is_held]
    leases = [(row.id, row.slurm_job) for row in rows]
    return [] if sorted(jobs) == sorted(leases) else [f"the jobs {sorted(jobs)} are not those of {sorted(leases)}"]


def _find_starving_request_twice(world: World, people: People) -> list[str]:
    """Return the first waiting request if a suitable GPU has been free for a while: one may have ended just now."""
    found = _find_starving_request(world)
    if found:
        advance_with_hub(world, people, SERVED_S)
    return [line for line in found if line in _find_starving_request(world)]


def _find_starving_request(world: World) -> list[str]:
    """Return the first waiting request if a suitable GPU is free."""
    core = world.core
    order = [one for one in core.scheduler.order_requests(core.clock.now()) if one in core.ledger.snapshot.leases]
    if not order:
        return []
    first = core.ledger.snapshot.leases[order[0]]
    rows = core.ledger.snapshot.leases.values()
    closed = {gpu.node for row in rows if row.resources.exclusive for gpu in row.held}
    nodes = [node for node in world.cluster_operations.nodes(ADMIN) if node.name not in closed]
    free = [gpu for node in nodes for gpu in node.gpus if gpu.state is GpuState.FREE]
    ask = first.resources
    if first.suspension is not None:
        free = [gpu for gpu in free if gpu.uuid == first.gpus[0].uuid]
    fitting = [
        gpu.uuid
        for gpu in free
        if (not ask.models or gpu.model in ask.models) and gpu.memory_mib >= ask.least_memory_mib
    ]
    if ask.size == 1 and not ask.exclusive and fitting and not ask.exclude:
        return [f"lease {first.id} of {first.owner} is first in the queue, but {fitting} are free"]
    return []
