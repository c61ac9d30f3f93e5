"""Notebooks and workers on the closet's real daemons, started by JupyterHub's own user object."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import pytest
from jupyterhub import orm
from jupyterhub.objects import Hub
from jupyterhub.roles import create_role, get_default_roles
from jupyterhub.user import User
from traitlets.config import Config

from gpuhub import names, settings
from gpuhub.broker.schemas import LeaseRequest, LeaseState
from gpuhub.containers import arguments, networks, spawner, swarm
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.spawner import GpuDockerSpawner
from gpuhub.containers.troubles import SpawnFailed
from gpuhub.containers.workers import WorkerSpec, start_worker
from gpuhub.errors import Conflict, NotFound
from gpuhub.settings import Cluster
from tests.integration.conftest import INSTANCE, Closet
from tests.support.fake_broker import FakeBroker

OWNER = "ada"
#: Answers as a notebook server does, and ends on SIGTERM.
NOTEBOOK = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("X-JupyterHub-Version", "6.1.1")
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8888), Handler).serve_forever()
"""
ENDS = "import sys; print('no such kernel'); sys.exit(3)"


@dataclasses.dataclass(frozen=True)
class Head:
    """The head node's side of a closet."""

    closet: Closet
    cluster: Cluster
    daemons: Daemons

    def inspect(self, node: str, name: str) -> dict[str, Any]:
        """A container of the node."""
        with closing(self.closet.client(node)) as client:
            return dict(client.api.inspect_container(name))

    def containers(self, kind: str) -> list[str]:
        """Names of the instance's containers of that kind on all nodes."""
        labels = [f"{names.LABEL_INSTANCE}={self.closet.paths.instance}", f"{names.LABEL_KIND}={kind}"]
        found = []
        for node in self.cluster.nodes:
            with closing(self.closet.client(node.name)) as client:
                found += [one.name for one in client.containers.list(all=True, filters={"label": labels})]
        return found

    def remove_containers(self) -> None:
        """Remove whatever a failed test has left, so that the next one does not fail too."""
        for node in self.cluster.nodes:
            with closing(self.closet.client(node.name)) as client:
                for one in client.containers.list(all=True, filters={"label": names.LABEL_LEASE}):
                    one.remove(force=True)


@pytest.fixture
async def head(closet: Closet, tiny_image: str) -> AsyncIterator[Head]:
    """Settings and clients for the closet, its Swarm made; profiles use the tiny image."""
    cluster = settings.load(closet.cluster_file)
    profiles = tuple(profile.model_copy(update={"image": tiny_image}) for profile in cluster.profiles)
    # The guard's image is not in this tier; test_guard has its own.
    network = cluster.network.model_copy(update={"guard": False})
    cluster = cluster.model_copy(update={"profiles": profiles, "network": network})
    daemons = Daemons(cluster.nodes, instance=closet.paths.instance, run_dir=closet.paths.run)
    try:
        await swarm.ensure_swarm(daemons, cluster)
        found = Head(closet, cluster, daemons)
        yield found
        left = found.containers(names.KIND_NOTEBOOK) + found.containers(names.KIND_WORKER)
        found.remove_containers()
        assert left == []
        await networks.remove_idle_user_networks(daemons, cluster, closet.paths.instance, ())
    finally:
        daemons.close()


@pytest.fixture
def broker(head: Head) -> FakeBroker:
    """A broker in memory that knows the closet's cards."""
    return FakeBroker(head.cluster, {node.name: real_uuids(head, node.name) for node in head.cluster.nodes})


def real_uuids(head: Head, node: str) -> list[str]:
    cards = head.closet.paths.run / "closet" / node / "cards"
    texts = [(card / "card").read_text(encoding="utf-8") for card in sorted(cards.iterdir())]
    return [word for text in texts for word in text.split() if word.startswith("GPU-")]


@pytest.fixture
def users(head: Head, broker: FakeBroker) -> Iterator[Any]:
    """Makes JupyterHub's user objects, each time as a hub that was started just now sees them."""
    factory = orm.new_session_factory("sqlite:///:memory:")
    db = factory()
    for role in get_default_roles():
        create_role(db, role)
    db.add(orm.OAuthClient(identifier="jupyterhub"))
    db.add(orm.User(name=OWNER))
    db.commit()
    config = Config(
        GpuDockerSpawner={
            "cluster": head.cluster,
            "instance": head.closet.paths.instance,
            "head_address": str(head.closet.plan.head),
            "make_daemons": lambda: head.daemons,
            "make_broker": lambda: broker,
            "cmd": ["python3", "-c", NOTEBOOK],
            "start_timeout": 60,
        }
    )
    hub_settings = {
        "spawner_class": GpuDockerSpawner,
        "config": config,
        "hub": Hub(ip=str(head.closet.plan.head), port=8081),
        "internal_ssl": False,
        "allow_named_servers": True,
    }

    def make() -> User:
        return User(orm.User.find(db, OWNER), hub_settings)

    yield make
    db.close()


def profile_of(head: Head, model: str) -> str:
    return next(profile.name for profile in head.cluster.profiles if profile.gpu_model == model)


async def test_a_notebook_runs_as_its_user_with_its_lease_alone(head: Head, broker: FakeBroker, users: Any) -> None:
    """Node, GPU, user, limits and networks are those of the lease; stopping removes the container and frees the GPU."""
    user = users()
    await user.spawn(options={"profile": profile_of(head, "RTX 5070")})
    (lease,) = broker.known.values()
    found = head.inspect("rig2", names.notebook_container(INSTANCE, OWNER, ""))
    networks_joined = set(found["NetworkSettings"]["Networks"])
    assert lease.state is LeaseState.ACTIVE
    assert found["Config"]["Labels"][names.LABEL_LEASE] == lease.id
    assert found["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] == [lease.gpus[0].uuid]
    assert found["HostConfig"]["CapDrop"] == ["ALL"]
    assert networks_joined == {names.access_network(INSTANCE), names.user_network(INSTANCE, OWNER)}
    assert user.spawner.server.ip == str(head.cluster.node("rig2").address)
    with closing(head.closet.client("rig2")) as client:
        container = client.containers.get(found["Id"])
        status = container.exec_run(["cat", "/proc/self/status"], user=found["Config"]["User"]).output.decode()
        accounts = container.exec_run(["cat", "/var/lib/extrausers/passwd"]).output.decode()
        container.exec_run(["sh", "-c", "echo kept > $HOME/file"], user=found["Config"]["User"])
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert accounts.startswith(f"{OWNER}:x:{found['Config']['User'].split(':')[0]}:")
    home = head.cluster.storage.home.replace("{username}", OWNER)
    assert (settings.Path(home) / "file").read_text(encoding="utf-8") == "kept\n"
    await user.stop()
    assert broker.known[lease.id].state is LeaseState.RELEASED


async def test_a_restarted_hub_goes_on_with_a_running_notebook(head: Head, broker: FakeBroker, users: Any) -> None:
    """Its state leads to the same container at the same address, and stopping it then works."""
    before = users()
    await before.spawn(options={"profile": "cpu"})
    after = users()
    restored = after.spawner
    assert await restored.poll() is None
    assert restored.object_id == before.spawner.object_id
    assert await restored.get_url() == before.spawner.server.url
    assert restored.http_timeout == spawner.RESTORED_LIMIT_S
    await after.stop()
    assert head.containers(names.KIND_NOTEBOOK) == []


async def test_a_restarted_hub_waits_only_while_the_notebook_runs(head: Head, broker: FakeBroker, users: Any) -> None:
    """One that does not answer, and then ends, is not waited for any longer: it could not be stopped meanwhile."""
    before = users()
    await before.spawn(options={"profile": "cpu"})
    node, container = before.spawner.node, before.spawner.object_id
    # Not Docker's pause: Docker ends that before it kills, and in between a process might still answer.
    with closing(head.closet.client(node)) as client:
        found = client.containers.get(container)
        done = found.exec_run(["sh", "-c", "kill -STOP -1"], user=found.attrs["Config"]["User"])
    assert done.exit_code == 0, done.output
    after = users()
    assert await after.spawner.poll() is None
    waiting = asyncio.ensure_future(after._wait_up(after.spawner))
    await asyncio.sleep(1)
    assert not waiting.done()
    await head.daemons.call(node, "remove_container", container, force=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 30)
    assert head.containers(names.KIND_NOTEBOOK) == []


async def test_a_forgotten_notebook_is_adopted(head: Head, broker: FakeBroker, users: Any) -> None:
    """Where the hub lost its state, a start of the same profile finds the running container again, with its token."""
    before = users()
    await before.spawn(options={"profile": "cpu"})
    container, token = before.spawner.object_id, before.spawner.api_token
    before.spawner.orm_spawner.state = {}
    before.spawner.server = None
    after = users()
    await after.spawn(options={"profile": "cpu"})
    assert after.spawner.object_id == container
    assert after.spawner.api_token == token
    assert len(broker.requests) == 1
    await after.stop()


async def test_a_lease_whose_container_is_gone_is_given_back_first(head: Head, broker: FakeBroker, users: Any) -> None:
    """Where hub and container were lost together, the next start gets a lease of its own."""
    before = users()
    await before.spawn(options={"profile": "cpu"})
    (lost,) = broker.known
    await head.daemons.call(before.spawner.node, "remove_container", before.spawner.object_id, force=True)
    before.spawner.orm_spawner.state = {}
    before.spawner.server = None
    after = users()
    await after.spawn(options={"profile": "cpu"})
    assert broker.known[lost].state is LeaseState.RELEASED
    assert after.spawner.lease_id != lost
    await after.stop()


async def test_a_notebook_that_ends_while_it_starts_leaves_nothing(head: Head, broker: FakeBroker, users: Any) -> None:
    """The user reads why; container and lease are gone."""
    user = users()
    user.spawner.cmd = ["python3", "-c", ENDS]
    with pytest.raises(SpawnFailed, match=r"ended.*(exit code 3|log)"):
        await user.spawn(options={"profile": "cpu"})
    assert head.containers(names.KIND_NOTEBOOK) == []
    assert [lease.state for lease in broker.known.values()] == [LeaseState.RELEASED]


async def test_a_queued_start_is_granted_in_turn_and_a_stopped_one_gives_up_its_place(
    head: Head, broker: FakeBroker, users: Any
) -> None:
    """Progress tells the position; a cancelled start leaves the queue."""
    profile = profile_of(head, "RTX 5060")
    holder = await broker.request_lease(ask_for(profile, "ben"))
    user = users()
    start = asyncio.create_task(user.spawn(options={"profile": profile}))
    await until(lambda: any(lease.state is LeaseState.REQUESTED for lease in broker.known.values()))
    told = user.spawner.progress()
    messages = [(await anext(told))["message"], (await anext(told))["message"]]
    assert messages[-1].startswith("Waiting for a GPU: position 1.")
    start.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await start
    await user.stop()
    assert [lease.state for lease in broker.known.values()] == [LeaseState.GRANTED, LeaseState.RELEASED]

    later = users()
    again = asyncio.create_task(later.spawn(options={"profile": profile}))
    await until(lambda: any(lease.state is LeaseState.REQUESTED for lease in broker.known.values()))
    await broker.release(holder.id)
    await again
    assert later.spawner.node == "rig3"
    await later.stop()


async def test_a_restart_keeps_the_place_in_the_queue(head: Head, broker: FakeBroker, users: Any) -> None:
    """A start that waited is over with its hub, its request is not, and the next start goes on with it."""
    profile = profile_of(head, "RTX 5060")
    holder = await broker.request_lease(ask_for(profile, "ben"))
    killed = users()
    start = asyncio.create_task(killed.spawn(options={"profile": profile}))
    await until(lambda: users().spawner.lease_id)
    (waiting,) = (lease.id for lease in broker.known.values() if lease.state is LeaseState.REQUESTED)
    # A process that is killed undoes nothing.
    killed.spawner._undo = do_nothing
    start.cancel()
    await asyncio.wait([start])
    restarted = users()
    assert await restarted.spawner.poll() == 0
    await restarted.stop()
    assert broker.known[waiting].state is LeaseState.REQUESTED
    start = asyncio.create_task(restarted.spawn(options={"profile": profile}))
    await until(lambda: restarted.spawner.lease_id)
    await broker.release(holder.id)
    await start
    assert broker.known[waiting].state is LeaseState.ACTIVE
    await restarted.stop()


@pytest.mark.parametrize("options", [{"profile": "nope"}, {"profile": "cpu", "image": "x"}, {"profile": ["cpu"]}, {}])
async def test_bad_options_take_no_lease(broker: FakeBroker, users: Any, options: dict[str, object]) -> None:
    """They are refused before anything is asked for."""
    with pytest.raises(SpawnFailed, match="one of:"):
        await users().spawn(options=options)
    assert broker.requests == []


async def test_a_missing_image_is_told_before_a_lease_is_asked(head: Head, broker: FakeBroker, users: Any) -> None:
    """With the node that lacks it, and what to do."""
    user = users()
    gone = tuple(profile.model_copy(update={"image": "no/such:1"}) for profile in head.cluster.profiles)
    user.spawner.cluster = head.cluster.model_copy(update={"profiles": gone})
    with pytest.raises(SpawnFailed, match=r"no/such:1 is not on rig2 yet"):
        await user.spawn(options={"profile": profile_of(head, "RTX 5070")})
    assert broker.requests == []


async def test_workers_of_one_user_reach_each_other_and_starting_twice_gives_one(
    head: Head, tiny_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers on two nodes see each other by name on their user's network; a repeated start is the same one."""
    monkeypatch.setattr(arguments, "WORKER_COMMAND", ("python3", "-c", NOTEBOOK))
    specs = [
        WorkerSpec(
            instance=INSTANCE,
            owner=OWNER,
            job_id="trial",
            run_id="trial-run",
            index=index,
            number=index,
            lease_id="lease-1",
            epoch=1,
            node=node,
            gpu_uuids=tuple(real_uuids(head, node)[:1]),
            image=tiny_image,
        )
        for index, node in enumerate(("rig1", "rig3"))
    ]

    async def start_both() -> list[str]:
        return await asyncio.gather(
            *(start_worker(head.daemons, head.cluster, head.closet.paths, spec) for spec in specs)
        )

    try:
        first = await start_both()
        assert await start_both() == first
        other = names.worker_container(INSTANCE, "trial", 1)
        fetch = f"import urllib.request as u; print(u.urlopen('http://{other}:8888', timeout=5).status)"

        def fetched() -> bool:
            # Names travel between the nodes a moment later than the containers join.
            with closing(head.closet.client("rig1")) as client:
                code, output = client.containers.get(first[0]).exec_run(["python3", "-c", fetch])
            return (code, output) == (0, b"200\n")

        await until(fetched)
    finally:
        for spec in specs:
            with contextlib.suppress(NotFound):
                name = names.worker_container(INSTANCE, "trial", spec.index)
                await head.daemons.call(spec.node, "remove_container", name, force=True)


async def test_user_networks_are_made_once_and_removed_when_idle(head: Head) -> None:
    """Several starts at once get the same network; those of users with leases stay."""
    made = await asyncio.gather(
        *(networks.ensure_user_network(head.daemons, head.cluster, INSTANCE, "dora") for _ in range(6))
    )
    assert len({network.id for network in made}) == 1
    assert made[0].subnet.endswith("/24")
    kept = await networks.remove_idle_user_networks(head.daemons, head.cluster, INSTANCE, {"dora"})
    removed = await networks.remove_idle_user_networks(head.daemons, head.cluster, INSTANCE, ())
    assert made[0].name not in kept
    assert made[0].name in removed


async def test_a_bridge_of_a_single_node_gives_way(head: Head, tiny_image: str) -> None:
    """A user's network from before the second node: replaced when nobody is on it, and said to be in use else."""
    name = names.user_network(INSTANCE, "cleo")
    labels = {names.LABEL_INSTANCE: INSTANCE, names.LABEL_OWNER: "cleo"}
    await head.daemons.call("rig1", "create_network", name, driver="bridge", labels=labels)
    made = await head.daemons.call("rig1", "create_container", tiny_image, ["sleep", "60"])
    await head.daemons.call("rig1", "connect_container_to_network", made["Id"], name)
    await head.daemons.call("rig1", "start", made["Id"])
    try:
        with pytest.raises(Conflict, match="cleo has a notebook or job from when rig1 was the only node"):
            await networks.ensure_user_network(head.daemons, head.cluster, INSTANCE, "cleo")
    finally:
        await head.daemons.call("rig1", "remove_container", made["Id"], force=True)
    network = await networks.ensure_user_network(head.daemons, head.cluster, INSTANCE, "cleo")
    assert (await head.daemons.call("rig1", "inspect_network", network.id))["Driver"] == "overlay"
    assert network.name in await networks.remove_idle_user_networks(head.daemons, head.cluster, INSTANCE, ())


async def test_a_node_that_left_the_swarm_is_taken_in_again(head: Head) -> None:
    """Bringing the Swarm up again mends it, and doing so twice changes nothing."""
    await head.daemons.call("rig2", "leave_swarm", force=True)
    await swarm.ensure_swarm(head.daemons, head.cluster)
    await swarm.ensure_swarm(head.daemons, head.cluster)
    info = await head.daemons.call("rig2", "info")
    assert info["Swarm"]["LocalNodeState"] == "active"


async def do_nothing() -> None:
    """Instead of what a killed process would not do."""


def ask_for(profile: str, owner: str) -> LeaseRequest:
    return LeaseRequest(profile=profile, key=f"{owner}-{os.getpid()}", owner=owner)


async def until(condition: Any, deadline_s: float = 20.0) -> None:
    """Wait for a condition that has no event of its own."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
