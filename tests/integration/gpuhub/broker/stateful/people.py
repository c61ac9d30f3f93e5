"""Actions of users, their spawners and an administrator, in steps that can come late, twice, or never."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gpuhub.broker.operations.idle import IdleOperations
from gpuhub.broker_api.schemas import (
    ActivationRequest,
    ActivityReport,
    ArrayRequest,
    JobRequest,
    JobView,
    LeaseRequest,
    LeaseState,
    LeaseView,
)
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError
from gpuhub.docker.containers import container_lifecycle
from gpuhub.domain.models import Identity
from gpuhub.spawners.docker.spawner import GpuDockerSpawner
from tests.integration.gpuhub.broker.stateful.boxes import UUIDS, Link
from tests.integration.gpuhub.broker.stateful.life import ContainerSpecStub
from tests.integration.gpuhub.broker.stateful.world import ADMIN, SPAWNER, NoResponse, World


@dataclass(slots=True)
class Notebook:
    """One start of a user's server, as its spawner knows it."""

    owner: str
    server: str
    profile: str
    key: str
    lease: str | None = None
    node: str = ""
    container: str = ""
    #: The broker has accepted the activation: the container may be started, however late.
    may_start: bool = False
    is_started: bool = False
    #: Reasons why its end would not be gpuhub's fault; if empty, it must keep running.
    excuses: set[str] = field(default_factory=set)


@dataclass(slots=True)
class People:
    """Users with their notebooks and jobs, and the administrator."""

    world: World
    notebooks: list[Notebook] = field(default_factory=list)
    jobs: list[JobView] = field(default_factory=list)
    #: Leases that an administrator forced: their containers are excused.
    forced: set[str] = field(default_factory=set)
    #: The lease that each key's first request got; it must never change.
    answers: dict[tuple[str, str], str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _count: int = 0

    # -- notebooks ------------------------------------------------------------------------------------------------

    def ask(self, owner: str, server: str, profile: str) -> Notebook:
        """Start a server as a user; the hub stops a known server of the same name first."""
        for other in self.notebooks:
            if (other.owner, other.server) == (owner, server) and "it was stopped" not in other.excuses:
                self.stop(other)
        # The hub was asked to stop the previous server, and has done so.
        self.world.hub.stops = [each for each in self.world.hub.stops if each != (owner, server)]
        self._count += 1
        notebook = Notebook(owner=owner, server=server, profile=profile, key=f"key-{self._count}")
        self.notebooks.append(notebook)
        self.ask_again(notebook)
        return notebook

    def ask_again(self, notebook: Notebook) -> bool:
        """Send the request, or repeat it after a lost response; return whether it was answered with a lease."""
        request = LeaseRequest(profile=notebook.profile, server=notebook.server, key=notebook.key, owner=notebook.owner)
        lease: LeaseView | None = self._call(lambda broker: broker.request_lease(SPAWNER, request))
        if lease is None:
            return False
        first = self.answers.setdefault((notebook.owner, notebook.key), lease.id)
        if first != lease.id:
            self.wrong.append(f"the key {notebook.key} of {notebook.owner} gave {first}, then {lease.id}")
        notebook.lease = lease.id
        return True

    def create(self, notebook: Notebook) -> None:
        """Create the container of a lease that the spawner saw granted, without starting it."""
        lease = self.see(notebook)
        if lease is not None and lease.nodes:
            self.create_for(notebook, lease)

    def create_for(self, notebook: Notebook, lease: LeaseView) -> None:
        """Create the container as `create` does, from an old view of the lease."""
        made = ContainerSpecStub(
            name=names.notebook_container_name("ghtest", notebook.owner, notebook.server),
            labels={
                names.LABEL_INSTANCE: "ghtest",
                names.LABEL_KIND: names.KIND_NOTEBOOK,
                names.LABEL_LEASE: lease.id,
                names.LABEL_EPOCH: str(lease.epoch),
                names.LABEL_OWNER: lease.owner,
                UUIDS: ",".join(gpu.uuid for gpu in lease.gpus),
                **({} if lease.slurm_job is None else {names.LABEL_SLURM_JOB: str(lease.slurm_job)}),
            },
        )
        # A leftover of that name is removed, as the product does.
        daemons = self.world.hub_daemons
        for other in self.notebooks:
            if other is not notebook and (other.owner, other.server) == (notebook.owner, notebook.server):
                other.excuses.add("the server was started again")
        found = self.world.outside(container_lifecycle.ensure_created(daemons, lease.nodes[0], made, adopt=False))  # type: ignore[arg-type]
        if found is not None:
            notebook.node, notebook.container = lease.nodes[0], found.id
            notebook.may_start = notebook.is_started = False

    def activate(self, notebook: Notebook) -> None:
        """Activate the lease; the spawner may start the container only after the response."""
        if not notebook.container or notebook.lease is None:
            return
        lease_id, container = notebook.lease, notebook.container
        activation = ActivationRequest(container_id=container)
        answer = self._call(lambda broker: broker.activate(SPAWNER, lease_id, activation))
        notebook.may_start = answer is not None

    def begin(self, notebook: Notebook) -> None:
        """Start the container; the spawner may have slept since the activation."""
        if not notebook.may_start or notebook.is_started:
            return
        daemons = self.world.hub_daemons

        async def start() -> bool:
            await daemons.call(notebook.node, "start", notebook.container)
            return True

        notebook.is_started = self.world.outside(start()) is True

    def run(self, notebook: Notebook) -> bool:
        """Run all steps of a start, and return whether the container runs."""
        self.create(notebook)
        self.activate(notebook)
        self.begin(notebook)
        return notebook.is_started

    def end(self, notebook: Notebook) -> None:
        """End the notebook's program."""
        notebook.excuses.add("it ended by itself")
        box = self.world.boxes.get(notebook.node)
        if box is None:
            return
        box.ghosts = [ghost for ghost in box.ghosts if ghost["Id"] != notebook.container]
        if notebook.container in box.node.containers:
            box.node.end_container(notebook.container)

    def stop(self, notebook: Notebook) -> None:
        """Stop the server as the hub does: the container if the node answers, then the lease."""
        notebook.excuses.add("it was stopped")
        if notebook.container:
            daemons = self.world.hub_daemons
            self.world.outside(
                container_lifecycle.remove_container(daemons, notebook.node, notebook.container, grace_s=1)
            )
        if notebook.lease is not None:
            lease_id = notebook.lease
            self._call(lambda broker: broker.release(SPAWNER, lease_id))

    def hub_polls(self, *, is_restored: bool) -> None:
        """Poll servers by the spawner's own `poll`, possibly after a restart of the hub, and stop those that have
        ended.
        """
        for notebook in self.notebooks:
            if notebook.is_started and "it was stopped" not in notebook.excuses:
                code = self.world.outside(GpuDockerSpawner.poll(self._spawner(notebook, is_restored=is_restored)))
                if code is not None:
                    self._stop_dead(notebook)

    def hub_stops(self) -> None:
        """Stop the servers that the broker asked the hub to stop."""
        todo, self.world.hub.stops = self.world.hub.stops, []
        for owner, server in todo:
            for notebook in self.notebooks:
                if (notebook.owner, notebook.server) == (owner, server) and notebook.lease is not None:
                    self._stop_dead(notebook)

    def see(self, notebook: Notebook) -> LeaseView | None:
        """Return the broker's view of the notebook's lease."""
        lease_id = notebook.lease
        if lease_id is None:
            return None
        lease: LeaseView | None = self._call(lambda broker: broker.lease(SPAWNER, lease_id))
        return lease

    def _stop_dead(self, notebook: Notebook) -> None:
        """Stop a server as the hub does, without an excuse: if it was alive, this is a bug."""
        had = set(notebook.excuses)
        self.stop(notebook)
        notebook.excuses = had

    def _spawner(self, notebook: Notebook, *, is_restored: bool) -> Any:
        """Return the parts of a spawner that its `poll` uses."""

        async def heal(_lease_id: str, _container: str) -> None:
            return

        return SimpleNamespace(
            object_id=notebook.container,
            lease_id="",
            node=notebook.node,
            daemons=self.world.hub_daemons,
            log=logging.getLogger("spawner"),
            http_timeout=30,
            server=None,  # its result is not awaited here
            _is_restored=is_restored,
            _is_watched=False,
            _log_name=notebook.owner,
            _recover_lease=heal,
        )

    # -- jobs -----------------------------------------------------------------------------------------------------

    def launch(self, owner: str, **shape: Any) -> JobView | None:
        """Request workers as a user."""
        self._count += 1
        request = JobRequest(run_id=f"run-{self._count:06d}", **shape)
        job: JobView | None = self._call(lambda broker: broker.request_job(Identity(name=owner), request))
        if job is not None:
            self._attend(job)
        return job

    def launch_array(self, owner: str, count: int, limit: int | None) -> None:
        """Request many jobs of one GPU each as a user."""
        self._count += 1
        job = JobRequest(run_id=f"run-{self._count:06d}", batch=True, detached=limit is not None)
        request = ArrayRequest(job=job, count=count, max_running=limit)
        for job in self._call(lambda broker: broker.request_array(Identity(name=owner), request)) or ():
            self._attend(job)

    def launch_after(self, job: JobView, *, is_array: bool, retries: int) -> None:
        """Request a job that starts after another one, or its array, and is tried again after failures."""
        run = job.array if is_array and job.array is not None else job.run_id
        self.launch(job.owner, detached=True, after=run, max_retries=retries)

    def launch_again(self, job: JobView) -> None:
        """Repeat the request of the same run."""
        request = JobRequest(run_id=job.run_id, nnodes=job.nnodes, nproc_per_node=job.nproc_per_node)
        again: JobView | None = self._call(lambda broker: broker.request_job(Identity(name=job.owner), request))
        if again is not None and again.id != job.id:
            self.wrong.append(f"the run {job.run_id} of {job.owner} is {job.id} and {again.id}")

    def stop_job(self, job: JobView) -> None:
        """Stop a job as its owner."""
        self._call(lambda broker: broker.stop_job(Identity(name=job.owner), job.id))

    def abandon(self, job: JobView) -> None:
        """Let the job's client stop its heartbeats."""
        self.world.attended.pop(job.id, None)

    def end_workers(self, job: JobView, code: int = 0) -> None:
        """End the job's program on every machine."""
        for box in self.world.boxes.values():
            for found in list(box.node.containers.values()):
                if found["Labels"].get(names.LABEL_JOB) == job.id and found["State"] == "running":
                    box.node.end_container(found["Id"], code=code)

    def fail_leader(self, job: JobView) -> None:
        """End the program of worker 0 with a failure."""
        self.end_leader(job, code=3)

    def end_leader(self, job: JobView, code: int = 0) -> None:
        """End the program of worker 0, which leads the others of a detached job."""
        for box in self.world.boxes.values():
            for found in list(box.node.containers.values()):
                labels = found["Labels"]
                if (labels.get(names.LABEL_JOB), labels.get(names.LABEL_WORKER)) == (job.id, "0"):
                    box.node.end_container(found["Id"], code=code)

    def _attend(self, job: JobView) -> None:
        self.jobs.append(job)
        self.world.attended[job.id] = job.owner

    # -- the administrator ----------------------------------------------------------------------------------------

    def force(self, lease_id: str) -> None:
        """Declare as administrator that nothing of the lease is left, whether or not this is true."""
        self.forced.add(lease_id)
        self._call(lambda broker: broker.force(ADMIN, lease_id))

    def open_leases(self, *states: LeaseState) -> list[str]:
        """Return the ids of leases in these states, oldest first."""
        if not self.world.is_alive:
            return []
        rows = sorted(self.world.core.ledger.snapshot.leases.values(), key=lambda row: row.seq)
        return [row.id for row in rows if row.state in states]

    def lend(self, notebook: Notebook, step: str) -> None:
        """Report that a notebook is idle or runs a cell, or suspend or resume it."""
        if not self.world.is_alive or notebook.lease is None:
            return
        core, owner = self.world.core, Identity(name=notebook.owner)
        report = ActivityReport(is_busy=step == "cell", inactive_s=0.0 if step == "suspend" else 600.0)
        if step != "resume":
            self.world.try_call(IdleOperations(core).report(owner, notebook.lease, report))
        if step in {"suspend", "resume"} and self.world.is_alive:
            operations = IdleOperations(self.world.core)
            self.world.try_call(getattr(operations, step)(owner, notebook.lease))

    def excuse(self, node: str, why: str) -> None:
        """Record a reason why containers on a node may end."""
        for notebook in self.notebooks:
            if notebook.node == node:
                notebook.excuses.add(why)

    def excuse_lease(self, lease_id: str, why: str) -> None:
        """Record a reason why containers of a lease may end."""
        for notebook in self.notebooks:
            if notebook.lease == lease_id:
                notebook.excuses.add(why)

    def _call(self, ask: Any) -> Any:
        """Return the response; None when it was refused or lost, or when no broker runs."""
        if not self.world.is_alive:
            return None
        try:
            return self.world.call(ask(self.world.broker))
        except (GpuhubError, NoResponse):
            return None
        except Exception as error:  # noqa: BLE001 - the client sees an HTTP status 500, and continues
            self.wrong.append(f"the broker failed: {error!r}")
            return None

    @property
    def unreachable(self) -> set[str]:
        """Return the nodes that the head node cannot reach now."""
        return {name for name, box in self.world.boxes.items() if box.link is not Link.UP}
