"""The rules of the random tests: users, spawners, administrators, machines and the broker's death, in any order."""

from __future__ import annotations

import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuhub.broker_api.schemas import CordonRequest, ExtensionRequest, LeaseState, ReservationRequest
from gpuhub.common import names
from gpuhub.domain.models import Identity
from tests.integration.gpuhub.broker.stateful.boxes import UUIDS, Link
from tests.integration.gpuhub.broker.stateful.people import People
from tests.integration.gpuhub.broker.stateful.settling import settle
from tests.integration.gpuhub.broker.stateful.truth import find_violations
from tests.integration.gpuhub.broker.stateful.world import ADMIN, CARDS, CIRCUIT, CLUSTERS, PROFILES, World

T = TypeVar("T")
OWNERS = st.sampled_from(("ada", "ben", "cleo"))
SERVERS = st.sampled_from(("", "two"))
NODES = st.sampled_from(tuple(CARDS))
PROFILE_NAMES = st.sampled_from(tuple(profile.name for profile in PROFILES))
#: The index of an object, modulo the number of objects.
INDEX = st.integers(0, 7)
STEPS = st.integers(0, 30)
#: The steps of a spawner in order; each may come late or again.
NOTEBOOK_STEPS = ("ask_again", "create", "activate", "begin", "run")
JOB_STEPS = ("stop_job", "abandon", "launch_again", "end_workers", "end_leader", "fail_leader")
SHAPES = st.sampled_from(
    (
        {"nnodes": 1, "nproc_per_node": 1},
        {"nnodes": 2, "nproc_per_node": 2},
        {"nnodes": 3, "nproc_per_node": 1},
        {"nnodes": 3, "nproc_per_node": 1, "min_nnodes": 1},
        {"gpus": 2},
        {"gpus": 5},
    )
)
#: The client of a job: its notebook, none at the moment, or none at all (detached).
WAYS = st.sampled_from(({}, {"batch": True}, {"detached": True}))
#: The shortest duration of a reboot, seconds.
OFF_S = 6.0


class BrokerMachine(RuleBasedStateMachine):
    """The rules on one world; `teardown` heals it and checks that its state becomes correct."""

    backend = "builtin"

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpuhub-stateful-"))
        circuits = (CIRCUIT,) if seed % 2 and self.backend == "builtin" else ()
        cluster = CLUSTERS[self.backend]().model_copy(update={"circuits": circuits})
        self.world = World(self.folder, seed, cluster=cluster)
        self.people = People(self.world)
        self.world.start()
        self.world.advance(12)

    # -- users and their spawners ---------------------------------------------------------------------------------

    @rule(owner=OWNERS, server=SERVERS, profile=PROFILE_NAMES, wait_s=st.sampled_from((1, 3)))
    def start_server(self, owner: str, server: str, profile: str, wait_s: int) -> None:
        notebook = self.people.ask(owner, server, profile)
        self.world.advance(wait_s)
        self.people.run(notebook)

    @rule(owner=OWNERS, server=SERVERS)
    def start_any(self, owner: str, server: str) -> None:
        self.start_server(owner, server, "any", 1)

    @precondition(lambda self: self.people.notebooks)
    @rule(index=INDEX, step=st.sampled_from(NOTEBOOK_STEPS))
    def go_on(self, index: int, step: str) -> None:
        """Run one step of any notebook: in order, late, or again."""
        getattr(self.people, step)(pick(self.people.notebooks, index))

    @precondition(lambda self: self.people.notebooks)
    @rule(index=INDEX, is_stopped=st.booleans())
    def leave(self, index: int, is_stopped: bool) -> None:
        notebook = pick(self.people.notebooks, index)
        (self.people.stop if is_stopped else self.people.end)(notebook)

    @precondition(lambda self: self.backend == "builtin" and self.people.notebooks)
    @rule(index=INDEX, step=st.sampled_from(("idle", "cell", "suspend", "resume")), wait_s=st.sampled_from((0, 4)))
    def lend(self, index: int, step: str, wait_s: int) -> None:
        """Let a notebook report, or its owner lend its GPU or ask for it again."""
        self.people.lend(pick(self.people.notebooks, index), step)
        self.world.advance(wait_s)

    @rule(is_restored=st.booleans())
    def hub_looks(self, is_restored: bool) -> None:
        self.people.hub_stops()
        self.people.hub_polls(is_restored=is_restored)

    @rule(owner=OWNERS, shape=SHAPES, scavenge=st.booleans(), way=WAYS, exclusive=st.booleans())
    def launch(self, owner: str, shape: dict[str, int], scavenge: bool, way: dict[str, bool], exclusive: bool) -> None:
        self.people.launch(owner, scavenge=scavenge, exclusive=exclusive, **way, **shape)
        self.world.advance(1)

    @rule(owner=OWNERS, count=st.integers(1, 4), limit=st.none() | st.integers(1, 2))
    def launch_array(self, owner: str, count: int, limit: int | None) -> None:
        self.people.launch_array(owner, count, limit)

    @precondition(lambda self: self.people.jobs)
    @rule(index=INDEX, is_array=st.booleans(), retries=st.integers(0, 2))
    def launch_after(self, index: int, is_array: bool, retries: int) -> None:
        self.people.launch_after(pick(self.people.jobs, index), is_array=is_array, retries=retries)

    @precondition(lambda self: self.people.jobs)
    @rule(index=INDEX, step=st.sampled_from(JOB_STEPS))
    def job_goes_on(self, index: int, step: str) -> None:
        getattr(self.people, step)(pick(self.people.jobs, index))

    # -- time and the broker's death ------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from((0.005, 0.05, 1.0, 5.0, 20.0, 70.0)))
    def wait(self, seconds: float) -> None:
        """Let time pass; after 5 s the supervisor restarts a dead broker."""
        self.world.advance(seconds)
        if seconds >= 5 and not self.world.is_alive:
            self.world.start()

    @rule(jump=st.sampled_from((-3600.0, -5.0, 5.0, 3600.0)))
    def clock_jumps(self, jump: float) -> None:
        self.world.skew += jump
        if not self.world.is_alive:
            # The broker does not notice a jump while it does not run: see `gpuhub.domain.clock`.
            for notebook in self.people.notebooks:
                notebook.excuses.add("the clock was set while no broker ran")

    @rule(steps=st.none() | STEPS)
    def broker(self, steps: int | None) -> None:
        """Kill the broker at once or after some steps; start a dead one, which may die within its first steps."""
        if not self.world.is_alive:
            self.world.start(steps)
        elif steps is None:
            self.world.kill()
        else:
            self.world.die_after(steps)

    # -- machines -------------------------------------------------------------------------------------------------

    @rule(node=NODES, what=st.sampled_from(("down", "hung", "reboot", "wipe", "lose_gpu", "restore_gpus")))
    def machine_breaks(self, node: str, what: str) -> None:
        box = self.world.boxes[node]
        if what in {"down", "hung"}:
            box.link = Link(what)
        elif what == "reboot":
            self.people.excuse(node, "its node was rebooted")
            box.reboot()
            if self.world.slurm is not None:
                self.world.slurm.lose_node(node)
            self.world.advance(OFF_S)
            box.heal_link()
        elif what == "wipe":
            self.people.excuse(node, "its daemon was wiped")
            box.wipe()
        else:
            getattr(box, what)()

    @rule(node=NODES)
    def link_heals(self, node: str) -> None:
        self.world.boxes[node].heal_link()

    @precondition(lambda self: self.people.notebooks)
    @rule(index=INDEX, node=NODES, epoch=st.integers(0, 2))
    def stale_container_appears(self, index: int, node: str, epoch: int) -> None:
        """Let a forgotten process create a container of an old grant without starting it."""
        notebook = pick(self.people.notebooks, index)
        labels = {
            names.LABEL_KIND: names.KIND_NOTEBOOK,
            names.LABEL_LEASE: notebook.lease or "never-was",
            names.LABEL_EPOCH: str(epoch),
            names.LABEL_OWNER: notebook.owner,
            UUIDS: "",
        }
        if self.world.boxes[node].link is Link.UP:
            self.world.boxes[node].node.run_container(labels, state="created")

    # -- the administrator, and limits ----------------------------------------------------------------------------

    @precondition(lambda self: self.world.is_alive)
    @rule(node=NODES, step=st.sampled_from(("cordon", "drain", "undrain", "reserve")), seconds=st.sampled_from((0, 30)))
    def administrator(self, node: str, step: str, seconds: int) -> None:
        admin = self.world.admin
        if step == "undrain":
            self.world.try_call(admin.undrain(ADMIN, node))
        elif step == "reserve":
            self._reserve(node, seconds)
        else:
            if step == "drain":
                self.people.excuse(node, "its node is drained")
            request = CordonRequest(reason="work on it", grace_s=seconds if step == "drain" else 0)
            self.world.try_call(getattr(admin, step)(ADMIN, node, request))

    @precondition(lambda self: self.world.is_alive)
    @rule(index=INDEX, what=st.sampled_from(("force", "extend")))
    def force_or_extend(self, index: int, what: str) -> None:
        ending = self.people.open_leases(LeaseState.QUARANTINED, LeaseState.RELEASING)
        if what == "force" and ending:
            self.people.force(pick(ending, index))
        if what == "extend" and self.people.notebooks:
            notebook = pick(self.people.notebooks, index)
            if notebook.lease is not None:
                extension = ExtensionRequest(time_limit_s=600)
                self.world.try_call(self.world.broker.extend(Identity(name=notebook.owner), notebook.lease, extension))

    def _reserve(self, node: str, begins_s: int) -> None:
        now = datetime.fromtimestamp(self.world.now, UTC)
        request = ReservationRequest(
            name=f"{node} for ada",
            nodes=(node,),
            users=("ada",),
            starts_at=now + timedelta(seconds=begins_s),
            ends_at=now + timedelta(seconds=begins_s + 60),
        )
        self.world.try_call(self.world.admin.reserve(ADMIN, request))

    # -- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            found = find_violations(self.world, self.people)
            assert not found, found

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            found = settle(self.world, self.people, lambda: find_violations(self.world, self.people))
        finally:
            self.world.close()
            shutil.rmtree(self.folder)
        assert not found, found


def pick(things: list[T], index: int) -> T:
    """Return one of the objects."""
    return things[index % len(things)]
