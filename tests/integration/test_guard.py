"""The packet filter on the closet's real daemons: what a container reaches, and that the filter stays."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuhub import names, settings
from gpuhub.closet import daemons as closet_daemons
from gpuhub.closet import lifecycle, shell
from gpuhub.containers import creation, networks, swarm
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import GpuhubError
from gpuhub.guard import container as guard
from gpuhub.settings import Cluster
from tests.integration import guarded
from tests.integration.conftest import INSTANCE, Closet, _libraries, _under_usr
from tests.integration.guarded import Inside, Target

ADA, BEN = guarded.person("ada", 20001), guarded.person("ben", 20002)
TABLE = names.filter_table(INSTANCE)


@dataclass(frozen=True)
class Scene:
    """Ada and Ben on the closet, all that a node serves, and the world outside."""

    closet: Closet
    cluster: Cluster
    daemons: Daemons
    head: str
    #: On rig1 and rig2; Ada's first container scans.
    ada: Sequence[Inside]
    ben: Sequence[Inside]

    async def set_guard(self, nodes: Sequence[str] = ("rig1", "rig2", "rig3"), **network: object) -> None:
        """Other settings of the filter, in force on these nodes."""
        changed = self.cluster.network.model_copy(update=network)
        cluster = self.cluster.model_copy(update={"network": changed})
        await asyncio.gather(*(guard.ensure_guard(self.daemons, cluster, INSTANCE, node) for node in nodes))

    def scan(self, targets: dict[str, Target]) -> dict[str, str]:
        """What Ada's container finds."""
        return self.ada[0].probe(self.closet, targets)

    def allowed(self) -> dict[str, Target]:
        """What she must reach: hub and broker, her other worker, and the internet."""
        hub = self.cluster.hub
        return {
            "hub": (self.head, hub.api_port, ""),
            "broker": (self.head, hub.broker_port, ""),
            "own worker on another node": (self.ada[1].own, 29500, ""),
            "internet": (guarded.INTERNET, 80, ""),
        }

    def forbidden(self) -> dict[str, Target]:
        """What she must not reach, and could without a filter (or Docker's own)."""
        targets: dict[str, Target] = {"metadata": (guarded.METADATA, 80, ""), "private": (guarded.PRIVATE, 80, "")}
        for node in self.cluster.nodes:
            targets |= {f"{node.name}:{port}": (node.address, port, "") for port in guarded.ON_NODES}
        manager = swarm.manager(self.cluster)
        targets["Swarm"] = (manager.address, swarm.SWARM_PORT, "")
        targets["head's SSH"] = (self.head, 22, "")
        for inside in self.ben:
            address = self.cluster.node(inside.node).address
            targets[f"notebook published on {inside.node}"] = (
                address, guarded.published(self.closet, inside), "",
            )  # fmt: skip
        return targets

    def without(self, some: dict[str, Target]) -> dict[str, Target]:
        """What is forbidden, but for some."""
        return {name: target for name, target in self.forbidden().items() if name not in some}

    def published_from(self, namespace: str | None) -> set[str]:
        """What becomes of connections to all published notebooks from this machine, or a namespace of it."""
        targets: dict[str, Target] = {
            inside.id: (self.cluster.node(inside.node).address, guarded.published(self.closet, inside), "")
            for inside in (*self.ada, *self.ben)
        }
        return set(guarded.probe_from(namespace, targets).values())

    def unreachable(self) -> dict[str, Target]:
        """What the networks keep apart with or without a filter: addresses inside, by every interface."""
        return {
            f"{inside.node} {address}:{port} by {device or 'any'}": (address, port, device)
            for inside in self.ben
            for address in (inside.access, inside.own)
            for port in guarded.SERVED
            for device in ("", "eth0", "eth1")
        }


@pytest.fixture(scope="module")
def guard_image(closet: Closet, tiny_image: str) -> str:
    """The tiny image with this machine's nft, on every node: as small a stand-in for gpuhub/base."""
    name, nft = f"{INSTANCE}/guard:latest", Path("/usr/sbin/nft")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
        for file in sorted({nft, *_libraries([nft])}):
            tar.add(file, arcname=_under_usr(file))
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            made = client.containers.create(tiny_image, ["true"])
            made.put_archive("/", packed.getvalue())
            made.commit(*name.split(":"), changes="ENV PATH=/usr/sbin:/usr/bin")
            made.remove()
    return name


@pytest.fixture(autouse=True)
def small_image(guard_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of this tier have no gpuhub/base."""
    monkeypatch.setattr(guard, "IMAGE", guard_image)


@pytest.fixture(scope="module")
def world(closet: Closet) -> Iterator[None]:
    """Listeners on the head node and on every node, and what is beyond."""
    cluster = settings.load(closet.cluster_file)
    head = str(closet.plan.head)
    with ExitStack() as stack:
        stack.enter_context(guarded.outside(closet.plan))
        ports = (22, cluster.hub.api_port, cluster.hub.broker_port)
        stack.enter_context(guarded.listening(None, [f"{head}:{port}" for port in ports]))
        for node in closet.plan.nodes:
            addresses = [f"{node.address}:{port}" for port in guarded.ON_NODES]
            stack.enter_context(guarded.listening(closet.plan.netns(node), addresses))
        yield


@pytest.fixture
async def scene(closet: Closet, tiny_image: str, world: None) -> AsyncIterator[Scene]:
    """Two containers each, of two users."""
    cluster = settings.load(closet.cluster_file)
    daemons = Daemons(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)
    head = str(closet.plan.head)
    try:
        await swarm.ensure_swarm(daemons, cluster)
        ada = await guarded.run_for(daemons, cluster, ADA, ("rig1", "rig2"), image=tiny_image, head=head)
        ben = await guarded.run_for(daemons, cluster, BEN, ("rig1", "rig2"), image=tiny_image, head=head)
        yield Scene(closet, cluster, daemons, head, ada, ben)
        for inside in (*ada, *ben):
            await creation.remove(daemons, inside.node, inside.id)
        await networks.remove_idle_user_networks(daemons, cluster, INSTANCE, ())
        for node in cluster.nodes:
            await guard.remove_guard(daemons, INSTANCE, node.name)
            assert not guarded.has_table(closet.plan.netns(closet.plan.node(node.name)), TABLE)
    finally:
        daemons.close()


async def test_what_a_container_reaches(scene: Scene) -> None:
    """The whole scan, with the filter and without it: without it the same scan finds what it must not."""
    # None on docker_gwbridge, which no rule is about: a network with a way out is there already.
    assert {frozenset(inside.interfaces(scene.closet)) for inside in (*scene.ada, *scene.ben)} == {
        frozenset({"lo", "eth0", "eth1"})
    }
    await scene.set_guard()
    shut = scene.scan(scene.forbidden())
    # Told at once, so that nothing of a user's hangs.
    assert set(shut.values()) == {"refused"}, shut
    inner = scene.scan(scene.unreachable())
    assert "open" not in inner.values(), inner
    assert set(scene.scan(scene.allowed()).values()) == {"open"}
    assert scene.published_from(None) == {"open"}
    assert scene.published_from(guarded.OUTSIDE) == {"silent"}

    private: dict[str, Target] = {"private": (guarded.PRIVATE, 80, "")}
    world: dict[str, Target] = {"internet": (guarded.INTERNET, 80, "")}
    # What leaves a container is judged on its own node.
    await scene.set_guard(("rig1",), reach=(guarded.PRIVATE, "169.254.0.0/16", f"{scene.closet.plan.subnet}"))
    assert scene.scan(private) == {"private": "open"}
    assert set(scene.scan(scene.without(private)).values()) == {"refused"}
    await scene.set_guard(("rig1",), egress="none")
    assert scene.scan(world | private) == {"internet": "refused", "private": "refused"}
    assert scene.scan({"hub": scene.allowed()["hub"]}) == {"hub": "open"}
    await scene.set_guard(("rig1",), egress="open")
    assert scene.scan(world | private) == {"internet": "open", "private": "open"}
    assert set(scene.scan(scene.without(private)).values()) == {"refused"}

    await scene.set_guard(guard=False)
    found = scene.scan(scene.forbidden())
    assert set(found.values()) == {"open"}, found
    assert scene.published_from(guarded.OUTSIDE) == {"open"}


async def test_the_filter_stays(closet: Closet, tiny_image: str) -> None:
    """Whoever flushes or changes it; without its container; after a restart of Docker, or of the machine."""
    cluster = settings.load(closet.cluster_file)
    node = closet.plan.node("rig2")
    namespace = closet.plan.netns(node)
    daemons = Daemons(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)

    def is_whole() -> bool:
        return (
            guarded.has_table(namespace, TABLE) and guarded.nft(namespace, "-s", "list", "table", "inet", TABLE) == made
        )

    def comes_back() -> bool:
        return shell.wait_until(is_whole, timeout_s=20, interval_s=0.2)

    try:
        await guard.ensure_guard(daemons, cluster, INSTANCE, "rig2")
        before = (await daemons.call("rig2", "inspect_container", names.guard_container(INSTANCE)))["Id"]
        made = guarded.nft(namespace, "-s", "list", "table", "inet", TABLE)
        guarded.nft(namespace, "delete", "table", "inet", TABLE)
        assert comes_back()
        guarded.nft(namespace, "flush", "chain", "inet", TABLE, "leaving")
        assert comes_back()
        await guard.ensure_guard(daemons, cluster, INSTANCE, "rig2")
        assert (await daemons.call("rig2", "inspect_container", names.guard_container(INSTANCE)))["Id"] == before

        await daemons.call("rig2", "stop", before, timeout=3)
        assert is_whole()
        await guard.ensure_guard(daemons, cluster, INSTANCE, "rig2")

        closet_daemons.stop(closet.plan, [node])
        assert is_whole()
        guarded.nft(namespace, "delete", "table", "inet", TABLE)
        closet_daemons.start(closet.plan, node, closet.paths)
        lifecycle.wait_ready(closet.plan, closet.paths)
        assert comes_back()

        other = cluster.model_copy(update={"network": cluster.network.model_copy(update={"egress": "none"})})
        await guard.ensure_guard(daemons, other, INSTANCE, "rig2")
        assert not is_whole()
    finally:
        await guard.remove_guard(daemons, INSTANCE, "rig2")
        daemons.close()
    assert not guarded.has_table(namespace, TABLE)
    with closing(closet.client(node)) as client:
        labels = [f"{names.LABEL_INSTANCE}={INSTANCE}", f"{names.LABEL_KIND}={names.KIND_GUARD}"]
        assert client.containers.list(all=True, filters={"label": labels}) == []


async def test_a_node_without_filter_is_named(closet: Closet, tiny_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image without nft, as before this version."""
    cluster = settings.load(closet.cluster_file)
    daemons = Daemons(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)
    monkeypatch.setattr(guard, "IMAGE", tiny_image)
    try:
        with pytest.raises(GpuhubError, match=r"node rig3: its packet filter is not in place.*the image has no nft"):
            await guard.ensure_guard(daemons, cluster, INSTANCE, "rig3")
    finally:
        with closing(closet.client("rig3")) as client:
            client.containers.get(names.guard_container(INSTANCE)).remove(force=True)
        daemons.close()


async def test_one_machine_that_is_head_and_node(closet: Closet, tiny_image: str, world: None) -> None:
    """Users' networks are bridges of that machine then, hub and broker are its own, and it is no less shut."""
    whole = settings.load(closet.cluster_file)
    address = whole.node("rig3").address
    cluster = whole.model_copy(
        update={
            "nodes": (whole.node("rig3"),),
            "hub": whole.hub.model_copy(update={"address": address}),
            "network": whole.network.model_copy(update={"egress": "open"}),
        }
    )
    hub = cluster.hub
    namespace = closet.plan.netns(closet.plan.node("rig3"))
    daemons = Daemons(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)
    there: list[Inside] = []
    try:
        there += await guarded.run_for(daemons, cluster, ADA, ("rig3", "rig3"), image=tiny_image, head=address)
        there += await guarded.run_for(daemons, cluster, BEN, ("rig3",), image=tiny_image, head=address)
        ada, own, ben = there
        gateway = ada.own.rsplit(".", 1)[0] + ".1"
        allowed: dict[str, Target] = {
            "hub": (address, hub.api_port, ""),
            "broker": (address, hub.broker_port, ""),
            "own worker": (own.own, 29500, ""),
            "internet": (guarded.INTERNET, 80, ""),
        }
        forbidden: dict[str, Target] = {
            f"{host}:22 by {device or 'any'}": (host, 22, device)
            for host in (address, gateway)
            for device in ("", "eth0", "eth1")
        }
        forbidden["published"] = (address, guarded.published(closet, ben), "")
        apart: dict[str, Target] = {
            f"{host}:{port} by {device or 'any'}": (host, port, device)
            for host in (ben.access, ben.own)
            for port in guarded.SERVED
            for device in ("", "eth0", "eth1")
        }
        with guarded.listening(
            namespace, [f"{address}:{port}" for port in (hub.api_port, hub.broker_port)] + [f"{gateway}:22"]
        ):
            await guard.ensure_guard(daemons, cluster, INSTANCE, "rig3")
            assert set(ada.probe(closet, allowed).values()) == {"open"}
            shut = ada.probe(closet, forbidden | apart)
            assert "open" not in shut.values(), shut
            # The hub is on this machine itself.
            published: dict[str, Target] = {"own": (address, guarded.published(closet, ada), "")}
            assert guarded.probe_from(namespace, published) == {"own": "open"}
            assert guarded.probe_from(guarded.OUTSIDE, published) == {"own": "silent"}
            await guard.remove_guard(daemons, INSTANCE, "rig3")
            reached = ada.probe(closet, forbidden)
            assert set(reached.values()) == {"open"}, reached
    finally:
        for inside in there:
            await creation.remove(daemons, "rig3", inside.id)
        for who in (ADA, BEN):
            await daemons.call("rig3", "remove_network", names.user_network(INSTANCE, who.name))
        await guard.remove_guard(daemons, INSTANCE, "rig3")
        daemons.close()
