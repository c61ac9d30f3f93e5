"""Notebooks and workers on the closet's real daemons, started by JupyterHub's own user object."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from contextlib import closing
from typing import Any

import pytest

from gpuhub.broker_api.schemas import LeaseRequest, LeaseState
from gpuhub.common import names
from gpuhub.common.errors import Conflict, NotFound
from gpuhub.config import settings
from gpuhub.config.containers.profiles import ProfileSettings
from gpuhub.config.machines.data_network import map_data_address
from gpuhub.docker import networks
from gpuhub.docker.containers import container_spec
from gpuhub.docker.containers.user_containers import WorkerSpec, start_worker
from gpuhub.docker.swarm import membership
from gpuhub.spawners.base import SpawnFailed
from gpuhub.spawners.docker import spawner
from gpuhub_closet import shell
from tests.support.closet.head_node import NOTEBOOK, OWNER, HeadNode, read_gpu_uuids, until
from tests.support.closet.practice_closet import INSTANCE
from tests.support.hub.fake_broker import FakeBroker

ENDS = "import sys; print('no such kernel'); sys.exit(3)"


def profile_of(head: HeadNode, model: str) -> str:
    return next(profile.name for profile in head.cluster.profiles if profile.gpu_model == model)


async def test_notebook_runs_as_its_user_with_its_leased_gpu(head: HeadNode, broker: FakeBroker, users: Any) -> None:
    """The container has the lease's node, GPU, user, limits and networks; stopping it releases the GPU."""
    user = users()
    await user.spawn(options={"profile": profile_of(head, "RTX 5070")})
    (lease,) = broker.known.values()
    inspected = head.inspect("rig2", names.notebook_container_name(INSTANCE, OWNER, ""))
    networks_joined = set(inspected["NetworkSettings"]["Networks"])
    assert lease.state is LeaseState.ACTIVE
    assert inspected["Config"]["Labels"][names.LABEL_LEASE] == lease.id
    assert inspected["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] == [lease.gpus[0].uuid]
    assert inspected["HostConfig"]["CapDrop"] == ["ALL"]
    assert networks_joined == {names.access_network_name(INSTANCE), names.user_network_name(INSTANCE, OWNER)}
    assert user.spawner.server.ip == str(head.cluster.node("rig2").address)
    with closing(head.closet.client("rig2")) as client:
        container = client.containers.get(inspected["Id"])
        status = container.exec_run(["cat", "/proc/self/status"], user=inspected["Config"]["User"]).output.decode()
        accounts = container.exec_run(["cat", "/var/lib/extrausers/passwd"]).output.decode()
        container.exec_run(["sh", "-c", "echo kept > $HOME/file"], user=inspected["Config"]["User"])
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert accounts.startswith(f"{OWNER}:x:{inspected['Config']['User'].split(':')[0]}:")
    home = head.cluster.storage.home.replace("{username}", OWNER)
    assert (settings.Path(home) / "file").read_text(encoding="utf-8") == "kept\n"
    await user.stop()
    assert broker.known[lease.id].state is LeaseState.RELEASED


async def test_an_administrators_additions_are_in_the_container(head: HeadNode, users: Any) -> None:
    """DockerSpawner's traits add to what gpuhub decides, and change none of it."""
    user = users()
    user.settings["config"].DockerSpawner.update(
        read_only_volumes={"/usr/share": "/models/{username}"},
        mounts=[{"type": "tmpfs", "source": "", "target": "/fast"}],
        extra_host_config=lambda _spawner: {"extra_hosts": {"git.lan": "10.9.9.9"}},
        environment={"MINE": lambda spawner: spawner.user.name},
    )
    await user.spawn(options={"profile": "cpu"})
    inspected = head.inspect(user.spawner.node, names.notebook_container_name(INSTANCE, OWNER, ""))
    host = inspected["HostConfig"]
    assert host["Binds"] == [f"/usr/share:/models/{OWNER}:ro"]
    assert {mount["Target"] for mount in host["Mounts"]} >= {f"/home/{OWNER}", "/fast"}
    assert (host["ExtraHosts"], host["CapDrop"]) == (["git.lan:10.9.9.9"], ["ALL"])
    assert f"MINE={OWNER}" in inspected["Config"]["Env"]
    await user.stop()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pre_spawn_hook": lambda spawner: spawner.set_trait("mem_limit", "1G")}, "sets mem_limit of this notebook"),
        ({"extra_host_config": lambda _spawner: {"privileged": True}}, "'privileged' is not passed to Docker"),
    ],
)
async def test_what_only_a_start_shows_is_refused_there(
    head: HeadNode, broker: FakeBroker, users: Any, values: dict[str, Any], message: str
) -> None:
    """Nothing of the start remains."""
    user = users()
    user.settings["config"].DockerSpawner.update(values)
    with pytest.raises(SpawnFailed, match=message):
        await user.spawn(options={"profile": "cpu"})
    assert head.containers(names.KIND_NOTEBOOK) == []
    assert [lease.state for lease in broker.known.values()] in ([], [LeaseState.RELEASED])


async def test_restarted_hub_resumes_a_running_notebook(head: HeadNode, broker: FakeBroker, users: Any) -> None:
    """The hub's state leads to the same container at the same address, and stopping it works."""
    before = users()
    await before.spawn(options={"profile": "cpu"})
    after = users()
    restored = after.spawner
    assert await restored.poll() is None
    assert restored.object_id == before.spawner.object_id
    assert await restored.get_url() == before.spawner.server.url
    assert restored.http_timeout == spawner.RESTORED_TIMEOUT_S
    await after.stop()
    assert head.containers(names.KIND_NOTEBOOK) == []


async def test_a_restarted_hub_waits_only_while_the_notebook_runs(
    head: HeadNode, broker: FakeBroker, users: Any
) -> None:
    """The hub stops waiting for a notebook that does not answer once its container has ended."""
    before = users()
    await before.spawn(options={"profile": "cpu"})
    node, container = before.spawner.node, before.spawner.object_id
    # Not Docker's pause: Docker ends it before the kill, and the process might answer in between.
    with closing(head.closet.client(node)) as client:
        running = client.containers.get(container)
        done = running.exec_run(["sh", "-c", "kill -STOP -1"], user=running.attrs["Config"]["User"])
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


async def test_a_forgotten_notebook_is_adopted(head: HeadNode, broker: FakeBroker, users: Any) -> None:
    """A hub that lost its state finds the running container again when the same profile is started, with its token."""
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


async def test_lease_without_container_is_released_first(head: HeadNode, broker: FakeBroker, users: Any) -> None:
    """When hub and container are lost together, the next start gets a new lease."""
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


async def test_a_start_survives_the_removal_of_idle_networks(
    head: HeadNode, broker: FakeBroker, users: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's network may be removed until there is a lease of theirs, because the broker keeps it from then on."""
    user = users()
    claim = user.spawner._claim

    async def claim_after_removal(profile: ProfileSettings) -> object:
        await networks.remove_idle_user_networks(head.daemons, head.cluster, INSTANCE, ())
        return await claim(profile)

    monkeypatch.setattr(user.spawner, "_claim", claim_after_removal)
    await networks.ensure_user_network(head.daemons, head.cluster, INSTANCE, user.name)
    await user.spawn(options={"profile": "cpu"})
    assert await user.spawner.poll() is None
    await user.stop()


async def test_notebook_that_ends_during_its_start_leaves_nothing(
    head: HeadNode, broker: FakeBroker, users: Any
) -> None:
    """The user reads the reason; container and lease are gone."""
    user = users()
    user.spawner.cmd = ["python3", "-c", ENDS]
    with pytest.raises(SpawnFailed, match=r"ended.*(exit code 3|log)"):
        await user.spawn(options={"profile": "cpu"})
    assert head.containers(names.KIND_NOTEBOOK) == []
    assert [lease.state for lease in broker.known.values()] == [LeaseState.RELEASED]


async def test_queued_start_is_granted_in_turn_and_cancelled_one_leaves_the_queue(
    head: HeadNode, broker: FakeBroker, users: Any
) -> None:
    """Progress shows the position, and a cancelled start leaves the queue."""
    profile = profile_of(head, "RTX 5060")
    holder = await broker.request_lease(ask_for(profile, "ben"))
    user = users()
    start = asyncio.create_task(user.spawn(options={"profile": profile}))
    await until(lambda: any(lease.state is LeaseState.REQUESTED for lease in broker.known.values()))
    progress = user.spawner.progress()
    messages = [(await anext(progress))["message"], (await anext(progress))["message"]]
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


async def test_hub_restart_keeps_the_queue_position(head: HeadNode, broker: FakeBroker, users: Any) -> None:
    """A request outlives the hub, and the next start continues with it."""
    profile = profile_of(head, "RTX 5060")
    holder = await broker.request_lease(ask_for(profile, "ben"))
    killed = users()
    start = asyncio.create_task(killed.spawn(options={"profile": profile}))
    await until(lambda: users().spawner.lease_id)
    (waiting,) = (lease.id for lease in broker.known.values() if lease.state is LeaseState.REQUESTED)
    # A killed process cleans up nothing.
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
async def test_invalid_options_request_no_lease(broker: FakeBroker, users: Any, options: dict[str, object]) -> None:
    """Invalid options are refused before a lease is requested."""
    with pytest.raises(SpawnFailed, match=r"one of:|does not offer the image .x.; it offers: "):
        await users().spawn(options=options)
    assert broker.requests == []


async def test_missing_image_is_reported_before_a_request(head: HeadNode, broker: FakeBroker, users: Any) -> None:
    """The error names the node without the image, and the remedy."""
    user = users()
    gone = tuple(profile.model_copy(update={"image": "no/such:1"}) for profile in head.cluster.profiles)
    user.spawner.cluster = head.cluster.model_copy(update={"profiles": gone})
    with pytest.raises(SpawnFailed, match=r"no/such:1 is not on rig2 yet"):
        await user.spawn(options={"profile": profile_of(head, "RTX 5070")})
    assert broker.requests == []


async def test_workers_of_one_user_connect_and_repeated_start_is_idempotent(
    head: HeadNode, tiny_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers on two nodes reach each other by name on their user's network; a repeated start returns the same one."""
    monkeypatch.setattr(container_spec, "WORKER_COMMAND", ("python3", "-c", NOTEBOOK))
    specs = [
        WorkerSpec(
            instance=INSTANCE,
            owner=OWNER,
            job_id="trial",
            run_id="trial-run",
            index=index,
            run_index=index,
            lease_id="lease-1",
            epoch=1,
            node=node,
            gpu_uuids=tuple(read_gpu_uuids(head, node)[:1]),
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
        other = names.worker_container_name(INSTANCE, "trial", 1)
        fetch = f"import urllib.request as u; print(u.urlopen('http://{other}:8888', timeout=5).status)"

        def fetched() -> bool:
            # Names reach other nodes a moment after the containers join.
            with closing(head.closet.client("rig1")) as client:
                code, output = client.containers.get(first[0]).exec_run(["python3", "-c", fetch])
            return (code, output) == (0, b"200\n")

        await until(fetched)
    finally:
        for spec in specs:
            with contextlib.suppress(NotFound):
                name = names.worker_container_name(INSTANCE, "trial", spec.index)
                await head.daemons.call(spec.node, "remove_container", name, force=True)


async def test_ranks_of_notebook_and_worker_reach_each_other_on_the_network_card(
    head: HeadNode, tiny_image: str, users: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data_interface both have an address there, and a notebook without a GPU has none."""
    monkeypatch.setattr(container_spec, "WORKER_COMMAND", ("python3", "-c", NOTEBOOK))
    nodes = tuple(node.model_copy(update={"data_interface": "eth0"}) for node in head.cluster.nodes)
    cluster = head.cluster.model_copy(update={"nodes": nodes})
    data, worker = names.data_network_name(INSTANCE), names.worker_container_name(INSTANCE, "trial", 0)
    user = users()
    user.settings["config"].GpuDockerSpawner.cluster = cluster
    try:
        await user.spawn(options={"profile": "cpu"})
        plain = head.inspect(user.spawner.node, names.notebook_container_name(INSTANCE, OWNER, ""))
        assert data not in plain["NetworkSettings"]["Networks"]
        await user.stop()
        await user.spawn(options={"profile": profile_of(head, "RTX 5070")})
        spec = WorkerSpec(
            instance=INSTANCE,
            owner=OWNER,
            job_id="trial",
            run_id="trial-run",
            index=0,
            run_index=0,
            lease_id="lease-1",
            epoch=1,
            node="rig1",
            gpu_uuids=(),
            image=tiny_image,
        )
        started = [await start_worker(head.daemons, cluster, head.closet.paths, spec) for _ in range(2)]
        assert started[0] == started[1]
        notebook = head.inspect("rig2", names.notebook_container_name(INSTANCE, OWNER, ""))
        for container in (notebook, head.inspect("rig1", worker)):
            assert f"GPUHUB_DATA_SUBNET={cluster.network.data_pool}" in container["Config"]["Env"]
            joined = container["NetworkSettings"]["Networks"]
            own = joined[names.user_network_name(INSTANCE, OWNER)]["IPAddress"]
            assert joined[data]["IPAddress"] == map_data_address(cluster.network, own)
        address = notebook["NetworkSettings"]["Networks"][data]["IPAddress"]
        fetch = f"import urllib.request as u; print(u.urlopen('http://{address}:8888', timeout=5).status)"
        with closing(head.closet.client("rig1")) as client:
            assert client.containers.get(worker).exec_run(["python3", "-c", fetch]) == (0, b"200\n")
        await user.stop()
    finally:
        head.remove_containers()
        for node in ("rig1", "rig2"):
            for network in await head.daemons.call(node, "networks", names=[data]):
                await head.daemons.call(node, "remove_network", network["Id"])


async def test_user_networks_are_made_once_and_removed_when_idle(head: HeadNode) -> None:
    """Concurrent starts share one network; networks of users with leases are kept."""
    created = await asyncio.gather(
        *(networks.ensure_user_network(head.daemons, head.cluster, INSTANCE, "dora") for _ in range(6))
    )
    assert len({network.id for network in created}) == 1
    assert created[0].subnet.endswith("/24")
    kept = await networks.remove_idle_user_networks(head.daemons, head.cluster, INSTANCE, {"dora"})
    removed = await networks.remove_idle_user_networks(head.daemons, head.cluster, INSTANCE, ())
    assert created[0].name not in kept
    assert created[0].name in removed


async def test_bridge_of_a_single_node_is_replaced(head: HeadNode, tiny_image: str) -> None:
    """A network from before the second node is replaced when it is unused, and reported as in use otherwise."""
    name = names.user_network_name(INSTANCE, "cleo")
    labels = {names.LABEL_INSTANCE: INSTANCE, names.LABEL_OWNER: "cleo"}
    await head.daemons.call("rig1", "create_network", name, driver="bridge", labels=labels)
    created = await head.daemons.call("rig1", "create_container", tiny_image, ["sleep", "60"])
    await head.daemons.call("rig1", "connect_container_to_network", created["Id"], name)
    await head.daemons.call("rig1", "start", created["Id"])
    try:
        with pytest.raises(Conflict, match="cleo has a notebook or job from when rig1 was the only node"):
            await networks.ensure_user_network(head.daemons, head.cluster, INSTANCE, "cleo")
    finally:
        await head.daemons.call("rig1", "remove_container", created["Id"], force=True)
    network = await networks.ensure_user_network(head.daemons, head.cluster, INSTANCE, "cleo")
    assert (await head.daemons.call("rig1", "inspect_network", network.id))["Driver"] == "overlay"
    assert network.name in await networks.remove_idle_user_networks(head.daemons, head.cluster, INSTANCE, ())


async def test_network_that_swarm_cannot_set_up_is_joined_later(head: HeadNode, tiny_image: str) -> None:
    """Part of an older network is in the way on the node, as after its daemon was killed; Docker gives up after 20 s."""
    network = await networks.ensure_user_network(head.daemons, head.cluster, INSTANCE, "cleo")
    options = (await head.daemons.call("rig1", "inspect_network", network.id))["Options"]
    number = options["com.docker.network.driver.overlay.vxlanid_list"]
    node, aside = head.closet.plan.netns_name(head.closet.plan.node("rig3")), f"{INSTANCE}-aside"
    created = await head.daemons.call("rig3", "create_container", tiny_image, ["sleep", "60"])
    await head.daemons.call("rig3", "start", created["Id"])
    shell.run_command(("ip", "netns", "add", aside))
    try:
        shell.run_command(f"ip -n {node} link add old type vxlan id {number} dstport 4789 dev eth0".split())
        shell.run_command(f"ip -n {node} link set old netns {aside}".split())
        began = time.monotonic()
        joining = asyncio.create_task(networks.connect_container(head.daemons, "rig3", created["Id"], network))
        await asyncio.sleep(10)
        assert not joining.done()
        shell.run_command(("ip", "netns", "del", aside))
        await joining
        assert time.monotonic() - began > 15
        joined = head.inspect("rig3", created["Id"])["NetworkSettings"]["Networks"]
        assert joined[network.name]["IPAddress"].startswith(network.subnet.rpartition(".")[0])
    finally:
        if aside in shell.run_command(("ip", "netns", "list")):
            shell.run_command(("ip", "netns", "del", aside))
        await head.daemons.call("rig3", "remove_container", created["Id"], force=True)
    await networks.remove_idle_user_networks(head.daemons, head.cluster, INSTANCE, ())


async def test_network_is_replaced_when_encryption_changes(head: HeadNode, tiny_image: str) -> None:
    """An unused network is made again with the other option, and one in use is reported."""
    encrypting = head.cluster.model_copy(update={"network": head.cluster.network.model_copy(update={"encrypt": True})})

    async def ensure(cluster: settings.ClusterSettings) -> tuple[str, bool]:
        network = await networks.ensure_user_network(head.daemons, cluster, INSTANCE, "cleo")
        return network.id, "encrypted" in (await head.daemons.call("rig1", "inspect_network", network.id))["Options"]

    plain, is_encrypted = await ensure(head.cluster)
    assert not is_encrypted
    created = await head.daemons.call("rig1", "create_container", tiny_image, ["sleep", "60"])
    await head.daemons.call("rig1", "connect_container_to_network", created["Id"], plain)
    await head.daemons.call("rig1", "start", created["Id"])
    try:
        with pytest.raises(Conflict, match=r"from before network\.encrypt was changed, on a network that is not encr"):
            await ensure(encrypting)
    finally:
        await head.daemons.call("rig1", "remove_container", created["Id"], force=True)
    secret, is_encrypted = await ensure(encrypting)
    assert is_encrypted
    assert secret != plain
    assert await ensure(encrypting) == (secret, True)
    assert (await ensure(head.cluster))[1] is False
    await networks.remove_idle_user_networks(head.daemons, head.cluster, INSTANCE, ())


async def test_node_that_left_the_swarm_is_added_again(head: HeadNode) -> None:
    """A second `ensure_swarm` adds the node again, and a third changes nothing."""
    await head.daemons.call("rig2", "leave_swarm", force=True)
    await membership.ensure_swarm(head.daemons, head.cluster)
    await membership.ensure_swarm(head.daemons, head.cluster)
    info = await head.daemons.call("rig2", "info")
    assert info["Swarm"]["LocalNodeState"] == "active"


async def do_nothing() -> None:
    """Replace the cleanup that a killed process would not run."""


def ask_for(profile: str, owner: str) -> LeaseRequest:
    return LeaseRequest(profile=profile, key=f"{owner}-{os.getpid()}", owner=owner)
