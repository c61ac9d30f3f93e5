"""The firewall on the closet's real daemons: what a container can reach, and that the rules persist."""

from __future__ import annotations

import asyncio
import io
import ipaddress
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuhub.common import names
from gpuhub.common.errors import GpuhubError
from gpuhub.common.names import NOTEBOOK_PORT
from gpuhub.config import settings
from gpuhub.config.machines.data_network import map_data_address
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker import networks
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers import container_lifecycle, firewall_container
from gpuhub.docker.swarm import membership
from gpuhub.docker.swarm.managers import SWARM_PORT
from gpuhub_closet import docker_daemons as closet_daemons
from gpuhub_closet import shell
from tests.support.closet import practice_closet
from tests.support.closet.practice_closet import INSTANCE, Closet
from tests.support.docker import user_containers
from tests.support.docker.tiny_image import find_libraries, path_under_usr
from tests.support.docker.user_containers import Target, UserContainer
from tests.support.launch.local_cluster import PYTHON

ADA, BEN = user_containers.build_identity("ada", 20001), user_containers.build_identity("ben", 20002)
TABLE = names.firewall_table_name(INSTANCE)


@dataclass(frozen=True)
class Scene:
    """Two users' containers on the closet, and all addresses that they must and must not reach."""

    closet: Closet
    cluster: ClusterSettings
    daemons: DockerClients
    head: str
    #: On rig1 and rig2; Ada's first container runs the scans.
    ada: Sequence[UserContainer]
    ben: Sequence[UserContainer]

    async def apply_settings(self, nodes: Sequence[str] = ("rig1", "rig2", "rig3"), **network: object) -> None:
        """Apply changed network settings on these nodes."""
        changed = self.cluster.network.model_copy(update=network)
        cluster = self.cluster.model_copy(update={"network": changed})
        await asyncio.gather(
            *(firewall_container.ensure_firewall(self.daemons, cluster, INSTANCE, node) for node in nodes)
        )

    def scan(self, targets: dict[str, Target]) -> dict[str, str]:
        """Return the result of each connection from Ada's container."""
        return self.ada[0].probe(self.closet, targets)

    def allowed(self) -> dict[str, Target]:
        """Return what Ada's container must reach: hub, broker, her other worker and the internet."""
        hub = self.cluster.hub
        return {
            "hub": (self.head, hub.api_port, ""),
            "broker": (self.head, hub.broker_port, ""),
            "own worker on another node": (self.ada[1].own, 29500, ""),
            "internet": (user_containers.INTERNET, 80, ""),
        }

    def forbidden(self) -> dict[str, Target]:
        """Return what Ada's container must not reach, and could reach without the firewall or Docker's own rules."""
        targets: dict[str, Target] = {
            "metadata": (user_containers.METADATA, 80, ""),
            "private": (user_containers.PRIVATE, 80, ""),
        }
        for node in self.cluster.nodes:
            targets |= {f"{node.name}:{port}": (node.address, port, "") for port in user_containers.ON_NODES}
        manager = self.cluster.swarm_managers[0]
        targets["Swarm"] = (manager.address, SWARM_PORT, "")
        targets["head's SSH"] = (self.head, 22, "")
        for inside in self.ben:
            address = self.cluster.node(inside.node).address
            targets[f"notebook published on {inside.node}"] = (
                address, user_containers.find_published_port(self.closet, inside), "",
            )  # fmt: skip
        return targets

    def without(self, some: dict[str, Target]) -> dict[str, Target]:
        """Return the forbidden targets except some."""
        return {name: target for name, target in self.forbidden().items() if name not in some}

    def published_from(self, namespace: str | None) -> set[str]:
        """Return the results of connections to all published notebooks, from this machine or a namespace of it."""
        targets: dict[str, Target] = {
            inside.id: (
                self.cluster.node(inside.node).address,
                user_containers.find_published_port(self.closet, inside),
                "",
            )
            for inside in (*self.ada, *self.ben)
        }
        return set(user_containers.probe_from(namespace, targets).values())

    def unreachable(self) -> dict[str, Target]:
        """Return what the networks separate even without the firewall: internal addresses, by every interface."""
        return {
            f"{inside.node} {address}:{port} by {device or 'any'}": (address, port, device)
            for inside in self.ben
            for address in (inside.access, inside.own)
            for port in user_containers.SERVED
            for device in ("", "eth0", "eth1")
        }


@pytest.fixture(scope="module")
def nft_image(closet: Closet, tiny_image: str) -> str:
    """The tiny image with this machine's nft on every node; it stands in for gpuhub/base."""
    name, nft = f"{INSTANCE}/guard:latest", Path("/usr/sbin/nft")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
        for file in sorted({nft, *find_libraries([nft])}):
            tar.add(file, arcname=path_under_usr(file))
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            container = client.containers.create(tiny_image, ["true"])
            container.put_archive("/", packed.getvalue())
            container.commit(*name.split(":"), changes="ENV PATH=/usr/sbin:/usr/bin")
            container.remove()
    return name


@pytest.fixture(autouse=True)
def small_image(nft_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the small image: nodes of these tests have no gpuhub/base."""
    monkeypatch.setattr(firewall_container, "BASE_IMAGE", nft_image)


@pytest.fixture(scope="module")
def world(closet: Closet) -> Iterator[None]:
    """Listeners on the head node, on every node, and outside the closet."""
    cluster = settings.load(closet.cluster_file)
    head = str(closet.plan.head)
    with ExitStack() as stack:
        stack.enter_context(user_containers.outside_hosts(closet.plan))
        ports = (22, cluster.hub.api_port, cluster.hub.broker_port)
        stack.enter_context(user_containers.listening(None, [f"{head}:{port}" for port in ports]))
        for node in closet.plan.nodes:
            addresses = [f"{node.address}:{port}" for port in user_containers.ON_NODES]
            stack.enter_context(user_containers.listening(closet.plan.netns_name(node), addresses))
        yield


@pytest.fixture
async def scene(closet: Closet, tiny_image: str, world: None) -> AsyncIterator[Scene]:
    """Two containers of each of two users."""
    cluster = settings.load(closet.cluster_file)
    daemons = DockerClients(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)
    head = str(closet.plan.head)
    try:
        await membership.ensure_swarm(daemons, cluster)
        ada = await user_containers.start_containers(
            daemons, cluster, ADA, ("rig1", "rig2"), image=tiny_image, head=head
        )
        ben = await user_containers.start_containers(
            daemons, cluster, BEN, ("rig1", "rig2"), image=tiny_image, head=head
        )
        yield Scene(closet, cluster, daemons, head, ada, ben)
        for inside in (*ada, *ben):
            await container_lifecycle.remove_container(daemons, inside.node, inside.id)
        await networks.remove_idle_user_networks(daemons, cluster, INSTANCE, ())
        for node in cluster.nodes:
            await firewall_container.remove_firewall(daemons, INSTANCE, node.name)
            assert not user_containers.has_table(closet.plan.netns_name(closet.plan.node(node.name)), TABLE)
    finally:
        daemons.close()


async def test_containers_reach_only_allowed_targets(scene: Scene) -> None:
    """The scan finds only allowed targets with the firewall, and forbidden ones without it."""
    # Not on docker_gwbridge, which has no rule: the container already has a network with a way out.
    assert {frozenset(inside.interfaces(scene.closet)) for inside in (*scene.ada, *scene.ben)} == {
        frozenset({"lo", "eth0", "eth1"})
    }
    await scene.apply_settings()
    shut = scene.scan(scene.forbidden())
    # Refused instead of dropped, so that users' programs do not hang.
    assert set(shut.values()) == {"refused"}, shut
    inner = scene.scan(scene.unreachable())
    assert "open" not in inner.values(), inner
    assert set(scene.scan(scene.allowed()).values()) == {"open"}
    assert scene.published_from(None) == {"open"}
    assert scene.published_from(user_containers.OUTSIDE) == {"silent"}

    private: dict[str, Target] = {"private": (user_containers.PRIVATE, 80, "")}
    world: dict[str, Target] = {"internet": (user_containers.INTERNET, 80, "")}
    # Outgoing packets are filtered on the container's own node.
    await scene.apply_settings(
        ("rig1",), reach=(user_containers.PRIVATE, "169.254.0.0/16", f"{scene.closet.plan.subnet}")
    )
    assert scene.scan(private) == {"private": "open"}
    assert set(scene.scan(scene.without(private)).values()) == {"refused"}
    await scene.apply_settings(("rig1",), egress="none")
    assert scene.scan(world | private) == {"internet": "refused", "private": "refused"}
    assert scene.scan({"hub": scene.allowed()["hub"]}) == {"hub": "open"}
    await scene.apply_settings(("rig1",), egress="open")
    assert scene.scan(world | private) == {"internet": "open", "private": "open"}
    assert set(scene.scan(scene.without(private)).values()) == {"refused"}

    await scene.apply_settings(guard=False)
    results = scene.scan(scene.forbidden())
    assert set(results.values()) == {"open"}, results
    assert scene.published_from(user_containers.OUTSIDE) == {"open"}


#: A rank that adds 1 and 2 over gloo, and prints the sum and the network from which it reached the store.
RANK = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as store:
    print(value.item(), store.getsockname()[0][:7])
    dist.barrier()
"""


def add_ranks(closet: Closet, containers: Sequence[UserContainer]) -> list[str]:
    """Run a rank in the network namespace of each container with torch of this machine; return what they print."""
    ranks = []
    for rank, inside in enumerate(containers):
        with closing(closet.client(inside.node)) as client:
            sandbox = client.api.inspect_container(inside.id)["NetworkSettings"]["SandboxKey"]
        processes = closet_daemons.find_processes(closet.plan, closet.plan.node(inside.node))
        daemon = next(pid for pid, name in processes.items() if name == "dockerd")
        space = f"/proc/{daemon}/root{sandbox.removeprefix('/var')}"
        variables = {
            "RANK": rank,
            "WORLD_SIZE": len(containers),
            "MASTER_ADDR": containers[0].data,
            "MASTER_PORT": 29501,
        }
        environ = os.environ | {name: str(value) for name, value in variables.items()} | {"GLOO_SOCKET_IFNAME": "eth2"}
        command = ("nsenter", f"--net={space}", PYTHON, "-c", RANK)
        ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    return [rank.communicate(timeout=120)[0].strip() for rank in ranks]


async def test_data_network_separates_users(closet: Closet, tiny_image: str, world: None, interpreter: str) -> None:
    """On the nodes' own network card, containers reach their own user's on other nodes, and no machine."""
    plain = settings.load(closet.cluster_file)
    nodes = tuple(node.model_copy(update={"data_interface": "eth0"}) for node in plain.nodes)
    cluster, head = plain.model_copy(update={"nodes": nodes}), str(closet.plan.head)
    daemons = DockerClients(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)
    containers: list[UserContainer] = []

    async def apply_rules(applied: ClusterSettings) -> None:
        await asyncio.gather(
            *(firewall_container.ensure_firewall(daemons, applied, INSTANCE, node) for node in ("rig1", "rig2"))
        )

    try:
        await membership.ensure_swarm(daemons, cluster)
        # Together, so that two starts create each node's data network.
        for started in await asyncio.gather(
            *(
                user_containers.start_containers(
                    daemons, cluster, identity, ("rig1", "rig2"), image=tiny_image, head=head
                )
                for identity in (ADA, BEN)
            )
        ):
            containers += started
        ada, other, near, far = containers
        assert ada.interfaces(closet) == {"lo", "eth0", "eth1", "eth2"}
        assert [inside.data for inside in containers] == [
            map_data_address(cluster.network, inside.own) for inside in containers
        ]
        own: dict[str, Target] = {
            "own": (other.data, 29500, ""),
            "own overlay": (other.own, 29500, ""),
            "broker": (head, cluster.hub.broker_port, ""),
            "internet": (user_containers.INTERNET, 80, ""),
        }
        stranger: dict[str, Target] = {"other user": (far.data, 29500, "")}
        machines: dict[str, Target] = {
            f"{host}:{port}": (host, port, "eth2")
            for host, port in [
                *((node.address, port) for node in cluster.nodes for port in user_containers.ON_NODES),
                *((head, port) for port in (22, cluster.hub.api_port, cluster.hub.broker_port)),
                (user_containers.INTERNET, 80),
                (user_containers.METADATA, 80),
                (user_containers.PRIVATE, 80),
            ]
        }
        inner: dict[str, Target] = {
            f"{inside.node} {address} by {device or 'any'}": (address, NOTEBOOK_PORT, device)
            for inside in (near, far)
            for address in (inside.access, inside.own, inside.data)
            for device in ("", "eth0", "eth1", "eth2")
        }
        in_pool = str(ipaddress.IPv4Network(cluster.network.data_pool)[-2])
        outside: dict[str, Target] = {"from the LAN": (ada.data, NOTEBOOK_PORT, "")}
        lan = ("ip", "-netns", user_containers.OUTSIDE, "address", "add", f"{in_pool}/16", "dev", "eth0")
        shell.run_command(lan)
        # Without the rules, so that the test shows what they are for.
        await apply_rules(plain)
        assert ada.probe(closet, own | stranger) == dict.fromkeys((*own, *stranger), "open")
        assert user_containers.probe_from(user_containers.OUTSIDE, outside) == {"from the LAN": "open"}
        await apply_rules(cluster)
        assert ada.probe(closet, own) == dict.fromkeys(own, "open")
        # Two users at once, with the same port of the first rank.
        sums = await asyncio.gather(
            asyncio.to_thread(add_ranks, closet, (ada, other)), asyncio.to_thread(add_ranks, closet, (near, far))
        )
        assert sums == [["3.0 10.202.", "3.0 10.202."]] * 2
        shut = ada.probe(closet, stranger | machines | inner)
        assert "open" not in shut.values(), shut
        assert user_containers.probe_from(user_containers.OUTSIDE, outside) == {"from the LAN": "silent"}
        # It is kept and removed with the other table.
        space = closet.plan.netns_name(closet.plan.node("rig1"))
        user_containers.run_nft(space, "delete", "table", "netdev", TABLE)
        assert shell.wait_until(lambda: user_containers.has_table(space, TABLE, "netdev"), timeout_s=60, interval_s=0.2)
        await apply_rules(plain)
        assert not user_containers.has_table(space, TABLE, "netdev")
        await apply_rules(cluster)
    finally:
        for inside in containers:
            await container_lifecycle.remove_container(daemons, inside.node, inside.id)
        await networks.remove_idle_user_networks(daemons, cluster, INSTANCE, ())
        for node in ("rig1", "rig2"):
            for network in await daemons.call(node, "networks", names=[names.data_network_name(INSTANCE)]):
                await daemons.call(node, "remove_network", network["Id"])
            await firewall_container.remove_firewall(daemons, INSTANCE, node)
            for family in ("inet", "netdev"):
                assert not user_containers.has_table(closet.plan.netns_name(closet.plan.node(node)), TABLE, family)
        daemons.close()


async def test_node_without_the_data_interface_is_named(closet: Closet, tiny_image: str) -> None:
    """No container starts there."""
    cluster = settings.load(closet.cluster_file)
    nodes = tuple(node.model_copy(update={"data_interface": "enp9s0"}) for node in cluster.nodes)
    daemons = DockerClients(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)
    try:
        with pytest.raises(GpuhubError, match=r"node rig3: its firewall is not in place.*no network interface enp9s0"):
            await firewall_container.ensure_firewall(
                daemons, cluster.model_copy(update={"nodes": nodes}), INSTANCE, "rig3"
            )
    finally:
        await firewall_container.remove_firewall(daemons, INSTANCE, "rig3")
        daemons.close()


async def test_firewall_is_restored(closet: Closet, tiny_image: str) -> None:
    """The firewall is restored after a flush, a change, the loss of its container and a restart of Docker or the
    machine.
    """
    cluster = settings.load(closet.cluster_file)
    node = closet.plan.node("rig2")
    namespace = closet.plan.netns_name(node)
    daemons = DockerClients(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)

    def is_whole() -> bool:
        return (
            user_containers.has_table(namespace, TABLE)
            and user_containers.run_nft(namespace, "-s", "list", "table", "inet", TABLE) == original
        )

    def comes_back() -> bool:
        return shell.wait_until(is_whole, timeout_s=60, interval_s=0.2)

    try:
        await firewall_container.ensure_firewall(daemons, cluster, INSTANCE, "rig2")
        before = (await daemons.call("rig2", "inspect_container", names.firewall_container_name(INSTANCE)))["Id"]
        original = user_containers.run_nft(namespace, "-s", "list", "table", "inet", TABLE)
        user_containers.run_nft(namespace, "delete", "table", "inet", TABLE)
        assert comes_back()
        user_containers.run_nft(namespace, "flush", "chain", "inet", TABLE, "leaving")
        assert comes_back()
        await firewall_container.ensure_firewall(daemons, cluster, INSTANCE, "rig2")
        assert (await daemons.call("rig2", "inspect_container", names.firewall_container_name(INSTANCE)))[
            "Id"
        ] == before

        await daemons.call("rig2", "stop", before, timeout=3)
        assert is_whole()
        await firewall_container.ensure_firewall(daemons, cluster, INSTANCE, "rig2")

        closet_daemons.stop_daemons(closet.plan, [node])
        assert is_whole()
        user_containers.run_nft(namespace, "delete", "table", "inet", TABLE)
        practice_closet.start_daemon(closet.plan, node, closet.paths)
        closet_daemons.wait_ready(closet.plan, closet.paths)
        assert comes_back()

        other = cluster.model_copy(update={"network": cluster.network.model_copy(update={"egress": "none"})})
        await firewall_container.ensure_firewall(daemons, other, INSTANCE, "rig2")
        assert not is_whole()
    finally:
        await firewall_container.remove_firewall(daemons, INSTANCE, "rig2")
        daemons.close()
    assert not user_containers.has_table(namespace, TABLE)
    with closing(closet.client(node)) as client:
        labels = [f"{names.LABEL_INSTANCE}={INSTANCE}", f"{names.LABEL_KIND}={names.KIND_FIREWALL}"]
        assert client.containers.list(all=True, ignore_removed=True, filters={"label": labels}) == []


async def test_node_without_nft_is_named(closet: Closet, tiny_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose image lacks nft is named."""
    cluster = settings.load(closet.cluster_file)
    daemons = DockerClients(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)
    monkeypatch.setattr(firewall_container, "BASE_IMAGE", tiny_image)
    try:
        with pytest.raises(GpuhubError, match=r"node rig3: its firewall is not in place.*the image has no nft"):
            await firewall_container.ensure_firewall(daemons, cluster, INSTANCE, "rig3")
    finally:
        with closing(closet.client("rig3")) as client:
            client.containers.get(names.firewall_container_name(INSTANCE)).remove(force=True)
        daemons.close()


async def test_head_node_that_is_also_a_node(closet: Closet, tiny_image: str, world: None) -> None:
    """The firewall is as strict when the head node is also a node and users' networks are its bridges."""
    loaded = settings.load(closet.cluster_file)
    address = loaded.node("rig3").address
    cluster = loaded.model_copy(
        update={
            "nodes": (loaded.node("rig3"),),
            "hub": loaded.hub.model_copy(update={"address": address}),
            "network": loaded.network.model_copy(update={"egress": "open"}),
        }
    )
    hub = cluster.hub
    namespace = closet.plan.netns_name(closet.plan.node("rig3"))
    daemons = DockerClients(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)
    containers: list[UserContainer] = []
    try:
        containers += await user_containers.start_containers(
            daemons, cluster, ADA, ("rig3", "rig3"), image=tiny_image, head=address
        )
        containers += await user_containers.start_containers(
            daemons, cluster, BEN, ("rig3",), image=tiny_image, head=address
        )
        ada, own, ben = containers
        gateway = ada.own.rsplit(".", 1)[0] + ".1"
        allowed: dict[str, Target] = {
            "hub": (address, hub.api_port, ""),
            "broker": (address, hub.broker_port, ""),
            "own worker": (own.own, 29500, ""),
            "internet": (user_containers.INTERNET, 80, ""),
        }
        forbidden: dict[str, Target] = {
            f"{host}:22 by {device or 'any'}": (host, 22, device)
            for host in (address, gateway)
            for device in ("", "eth0", "eth1")
        }
        forbidden["published"] = (address, user_containers.find_published_port(closet, ben), "")
        apart: dict[str, Target] = {
            f"{host}:{port} by {device or 'any'}": (host, port, device)
            for host in (ben.access, ben.own)
            for port in user_containers.SERVED
            for device in ("", "eth0", "eth1")
        }
        with user_containers.listening(
            namespace, [f"{address}:{port}" for port in (hub.api_port, hub.broker_port)] + [f"{gateway}:22"]
        ):
            await firewall_container.ensure_firewall(daemons, cluster, INSTANCE, "rig3")
            assert set(ada.probe(closet, allowed).values()) == {"open"}
            shut = ada.probe(closet, forbidden | apart)
            assert "open" not in shut.values(), shut
            # The hub runs on this machine.
            published: dict[str, Target] = {"own": (address, user_containers.find_published_port(closet, ada), "")}
            assert user_containers.probe_from(namespace, published) == {"own": "open"}
            assert user_containers.probe_from(user_containers.OUTSIDE, published) == {"own": "silent"}
            await firewall_container.remove_firewall(daemons, INSTANCE, "rig3")
            reached = ada.probe(closet, forbidden)
            assert set(reached.values()) == {"open"}, reached
    finally:
        for inside in containers:
            await container_lifecycle.remove_container(daemons, "rig3", inside.id)
        for who in (ADA, BEN):
            await daemons.call("rig3", "remove_network", names.user_network_name(INSTANCE, who.name))
        await firewall_container.remove_firewall(daemons, INSTANCE, "rig3")
        daemons.close()
