"""Invariants that must hold at every moment: the physical state of machines against the broker's tables."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common import names
from gpuhub.domain.models import LeaseRow
from gpuhub.scheduler.interface import OwnerUsage
from tests.integration.gpuhub.broker.stateful.boxes import UUIDS, Running
from tests.integration.gpuhub.broker.stateful.people import People
from tests.integration.gpuhub.broker.stateful.slurm_system import SlurmSystem
from tests.integration.gpuhub.broker.stateful.world import WATTS, World

_HOLDING = frozenset({LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.RELEASING, LeaseState.QUARANTINED})


def find_violations(world: World, people: People) -> list[str]:
    """Return all violations at this moment."""
    stored = read_leases(world)
    found = [*people.wrong, *world.faults, *_find_double_use(world, stored, people.forced)]
    found += _find_containers_of_released_leases(world, stored, people.forced)
    found += _find_duplicate_workers(world)
    found += _compare_held_gpus(world, stored)
    found += _find_detached_jobs_ended_by_clients(world)
    if world.slurm is not None:
        found += _find_gpus_outside_slurm_jobs(world, world.slurm)
    else:
        found += _find_overloaded_circuits(world, people.forced)
    if world.is_alive:
        found += _compare_snapshot_with_store(world, stored)
        found += _compare_scheduler_after_commits(world)
        found += _find_wrong_holds(world)
    return found


def _find_detached_jobs_ended_by_clients(world: World) -> list[str]:
    """Return detached jobs that ended with a notebook or because a client stopped reporting."""
    if not (world.folder / "broker.sqlite").exists():
        return []
    with closing(sqlite3.connect(world.folder / "broker.sqlite")) as raw:
        rows = raw.execute("SELECT id, reason FROM jobs WHERE detached AND reason LIKE 'the notebook%'").fetchall()
    return [f"detached job {job} ended: {reason}" for job, reason in rows]


def running_containers(world: World) -> Iterator[Running]:
    """Yield every running container that has a lease."""
    for box in world.boxes.values():
        yield from box.running()


def read_leases(world: World) -> dict[str, tuple[str, dict[str, tuple[int, int]]]]:
    """Return from the file: lease → state, and share and part of each GPU that it holds."""
    if not (world.folder / "broker.sqlite").exists():
        return {}
    with closing(sqlite3.connect(world.folder / "broker.sqlite")) as raw:
        held: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        query = "SELECT lease_id, gpu_uuid, share, part FROM lease_gpus WHERE released_at IS NULL"
        for lease, uuid, share, part in raw.execute(query):
            held[lease][uuid] = (share, part)
        return {lease: (state, held[lease]) for lease, state in raw.execute("SELECT id, state FROM leases")}


def _find_double_use(
    world: World, stored: Mapping[str, tuple[str, dict[str, tuple[int, int]]]], forced: set[str]
) -> list[str]:
    """Return GPUs that two leases use, or that are granted while an earlier holder still runs."""
    found = []
    users: defaultdict[str, set[str]] = defaultdict(set)
    for container in running_containers(world):
        if container.lease not in forced:
            for uuid in container.uuids:
                users[uuid].add(container.lease)
    holders: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    for lease, (_, gpus) in stored.items():
        for uuid, part in gpus.items():
            holders[uuid][lease] = part
    for uuid, leases in users.items():
        shares = {holders[uuid].get(lease, (1, 0)) for lease in leases}
        if len(leases) > 1 and len(shares) < len(leases):
            found.append(f"{uuid} is used by containers of {sorted(leases)}")
        strangers = {lease for lease in holders[uuid] if lease not in leases}
        if stored and not leases <= holders[uuid].keys() and strangers:
            found.append(f"{uuid} was granted to {sorted(strangers)} while containers of {sorted(leases)} run")
    for uuid, by_lease in holders.items():
        parts = list(by_lease.values())
        if len({share for share, _ in parts}) > 1 or len(set(parts)) < len(parts):
            found.append(f"{uuid} has two holders: {by_lease}")
    return found


def _find_overloaded_circuits(world: World, forced: set[str]) -> list[str]:
    """Return circuits on which containers use more GPUs than they supply."""
    found = []
    for circuit in world.cluster.enforced_circuits:
        uuids = {
            uuid
            for name in circuit.nodes
            for container in world.boxes[name].running()
            if container.lease not in forced
            for uuid in container.uuids
        }
        supplied = circuit.find_gpu_watts(world.cluster.base_watts[name] for name in circuit.nodes)
        if WATTS * len(uuids) > supplied:
            found.append(f"{sorted(uuids)} need {WATTS * len(uuids)} W of circuit {circuit.name} with {supplied} W")
    return found


def _find_gpus_outside_slurm_jobs(world: World, slurm: SlurmSystem) -> list[str]:
    """Return containers that use GPUs which the Slurm job in their label does not have."""
    found = []
    for box in world.boxes.values():
        for container in box.node.containers.values():
            labels = container["Labels"]
            job = int(labels.get(names.LABEL_SLURM_JOB, 0))
            uuids = {uuid for uuid in labels.get(UUIDS, "").split(",") if uuid}
            if job and container["State"] in {"running", "paused"} and not uuids <= slurm.find_gpus(job):
                found.append(
                    f"container {container['Id'][-6:]} uses {sorted(uuids)}, which Slurm job {job} does not have"
                )
    return found


def _find_containers_of_released_leases(
    world: World, stored: Mapping[str, tuple[str, dict[str, tuple[int, int]]]], forced: set[str]
) -> list[str]:
    """Return leases that have ended while one of their containers runs."""
    return [
        f"lease {one.lease} is released, but its container {one.id[-6:]} runs"
        for one in running_containers(world)
        if one.lease in stored and stored[one.lease][0] == LeaseState.RELEASED.value and one.lease not in forced
    ]


def _find_duplicate_workers(world: World) -> list[str]:
    """Return workers with two running containers."""
    seen: set[tuple[str, str]] = set()
    found = []
    for one in running_containers(world):
        if one.kind == names.KIND_WORKER:
            if (one.lease, one.worker) in seen:
                found.append(f"worker {one.worker} of lease {one.lease} runs twice")
            seen.add((one.lease, one.worker))
    return found


def _compare_held_gpus(world: World, stored: Mapping[str, tuple[str, dict[str, tuple[int, int]]]]) -> list[str]:
    """Compare the table that prevents a second holder with the leases."""
    if not stored:
        return []
    with closing(sqlite3.connect(world.folder / "broker.sqlite")) as raw:
        rows = set(raw.execute("SELECT lease_id, gpu_uuid, share, part FROM held_gpus"))
    expected = {(lease, uuid, *part) for lease, (_, gpus) in stored.items() for uuid, part in gpus.items()}
    open_only = {(lease, *rest) for lease, *rest in expected if stored[lease][0] != LeaseState.RELEASED.value}
    found = [] if expected == open_only else [f"released leases hold GPUs: {sorted(expected - open_only)}"]
    return found if rows == expected else [*found, f"held_gpus: {sorted(rows ^ expected)} differ from the leases"]


def _compare_snapshot_with_store(
    world: World, stored: Mapping[str, tuple[str, dict[str, tuple[int, int]]]]
) -> list[str]:
    """Compare the broker's snapshot with the file; they may differ while a commit is in progress."""
    for _ in range(50):
        shown = {row.id: (row.state.value, _held_shares(row)) for row in world.core.ledger.snapshot.leases.values()}
        kept = {lease: row for lease, row in stored.items() if row[0] != LeaseState.RELEASED.value}
        if shown == kept:
            return []
        world.advance(0.01)
        if not world.is_alive:
            return []
        stored = read_leases(world)
    return [f"the broker shows {shown}, the file has {kept}"]


def _compare_scheduler_after_commits(world: World) -> list[str]:
    """Compare the scheduler with the ledger; they may differ during a commit, because the scheduler is informed before
    it.
    """
    found = _compare_scheduler(world)
    for _ in range(50):
        if not found or not world.is_alive:
            return []
        world.advance(0.01)
        found = _compare_scheduler(world) if world.is_alive else []
    return found


def _find_wrong_holds(world: World) -> list[str]:
    """Return held requests that wait for nothing, jobs in the queue before their turn, and arrays above their limit."""
    snapshot = world.core.ledger.snapshot
    found = []
    running: defaultdict[tuple[str, str], int] = defaultdict(int)
    runs = {(job.owner, run) for job in snapshot.jobs.values() for run in (job.run_id, job.array) if run is not None}
    for job in snapshot.jobs.values():
        if job.array is not None and not snapshot.leases[job.lease_id].is_held:
            running[job.owner, job.array] += 1
    for job in snapshot.jobs.values():
        lease, array = snapshot.leases[job.lease_id], (job.owner, job.array or "")
        if job.after is not None and not lease.is_held:
            found.append(f"{job.run_id} is in the queue before the end of {job.after}")
        if job.after is not None and (job.owner, job.after) not in runs:
            found.append(f"{job.run_id} waits for {job.after}, which has ended")
        if lease.is_held and lease.state is not LeaseState.REQUESTED:
            found.append(f"{job.run_id} is held and {lease.state}")
        if lease.is_held and job.after is None and running[array] < (job.array_limit or 0):
            found.append(f"{job.run_id} is held, and {running[array]} tasks of its array run")
        if job.array_limit is not None and running[array] > job.array_limit:
            found.append(f"{running[array]} tasks of {job.array} run, and its limit is {job.array_limit}")
        if job.retries > job.max_retries:
            found.append(f"{job.run_id} was tried again {job.retries} times")
    return found


def _compare_scheduler(world: World) -> list[str]:
    """Check that the scheduler counts the ledger's GPUs, and that its queue has the waiting requests."""
    core = world.core
    leases = core.ledger.snapshot.leases.values()
    now = core.clock.now()
    waiting = {row.id for row in leases if row.waits}
    found = []
    # Other users' jobs have positions in Slurm's queue.
    if {one for one in core.scheduler.order_requests(now) if not one.startswith("slurm-")} != waiting:
        found.append(f"the scheduler's queue {core.scheduler.order_requests(now)} is not {sorted(waiting)}")
    counted: defaultdict[str, int] = defaultdict(int)
    for row in leases:
        if row.state in _HOLDING and row.state is not LeaseState.QUARANTINED:
            counted[row.owner] += len(row.held)
    usage: Mapping[str, OwnerUsage] = core.scheduler.report_usage(now)
    told = {owner: each.gpus for owner, each in usage.items() if each.gpus}
    if told != {owner: gpus for owner, gpus in counted.items() if gpus}:
        found.append(f"the scheduler counts {told}, the ledger {dict(counted)}")
    return found


def _held_shares(row: LeaseRow) -> dict[str, tuple[int, int]]:
    return {gpu.uuid: (gpu.share, gpu.part) for gpu in row.held}
