"""Which nodes manage the Swarm of users' networks, and what works without one of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from docker.errors import APIError

from gpuhub.common.errors import SetupError
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker import networks
from gpuhub.docker.swarm import managers, membership
from gpuhub.docker.swarm.managers import SWARM_PORT
from gpuhub_closet import docker_daemons, shell
from tests.support.closet import practice_closet
from tests.support.closet.head_node import HeadNode, until

#: docker-py leaves the socket of a refused connection to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:.*<socket.socket:pytest.PytestUnraisableExceptionWarning")

OWNER = "swarm-user"
LISTEN = "import socket; s = socket.create_server(('', 9000)); print('ready', flush=True); s.accept()[0].send(b'hello')"
ASK = "import socket; print(socket.create_connection(('peer', 9000), 20).recv(9).decode())"


async def wait_for_managers(closet: Any, node: str, *names: str, unreachable: str = "") -> None:
    """Wait until a node reports that exactly these manage the Swarm."""
    wanted = dict.fromkeys(names, "reachable") | ({unreachable: "unreachable"} if unreachable else {})
    await until(lambda: read_managers(closet, node) == wanted, deadline_s=90)


def read_managers(closet: Any, node: str) -> dict[str, str] | None:
    """Return the reachability of each node that manages the Swarm; None while the node asked is not ready."""
    with closing(closet.client(node)) as client:
        try:
            members = client.api.nodes()
        except APIError as error:
            assert "Manager is being prepared" in str(error)
            return None
    return {
        member["Description"]["Hostname"]: member["ManagerStatus"]["Reachability"]
        for member in members
        if member.get("ManagerStatus")
    }


def has_leader(closet: Any, node: str) -> bool:
    """Return whether the managers have a leader, as one of them knows it."""
    with closing(closet.client(node)) as client:
        try:
            client.api.inspect_swarm()
        except APIError as error:
            # One that has just lost the others answers the latter for a while.
            assert any(text in str(error) for text in ("does not have a leader", "context deadline exceeded"))
            return "does not have a leader" not in str(error)
        return True


def stop(closet: Any, name: str) -> None:
    docker_daemons.stop_daemons(closet.plan, [closet.plan.node(name)])


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Afterwards no such socket is left for another test."""
    yield
    gc.collect()


@pytest.fixture
def all_nodes(head: HeadNode) -> Iterator[None]:
    """Afterwards every node runs again."""
    yield
    practice_closet.ensure_up(head.closet.plan, head.closet.paths)


@contextmanager
def closed_port(closet: Any, name: str) -> Iterator[None]:
    """Drop what a node receives for the managers' port, as its firewall might."""
    netns = closet.plan.netns_name(closet.plan.node(name))
    rule = ("INPUT", "-p", "tcp", "--dport", str(SWARM_PORT), "-j", "DROP")
    shell.run_command(("ip", "netns", "exec", netns, "iptables", "-I", *rule))
    try:
        yield
    finally:
        shell.run_command(("ip", "netns", "exec", netns, "iptables", "-D", *rule))


def leave_out(cluster: ClusterSettings, node: NodeSettings) -> ClusterSettings:
    return cluster.model_copy(update={"nodes": tuple(one for one in cluster.nodes if one != node)})


@pytest.mark.usefixtures("all_nodes")
async def test_users_networks_are_made_while_a_manager_is_away(head: HeadNode, tiny_image: str) -> None:
    """Even the one that was asked so far, and led the others; two containers on the remaining nodes find each other."""
    here, there = (node.name for node in head.cluster.nodes[1:])
    before = await networks.ensure_user_network(head.daemons, head.cluster, head.closet.paths.instance, OWNER)
    assert before.subnet.startswith("10.")
    stop(head.closet, "rig1")
    network = await networks.ensure_user_network(head.daemons, head.cluster, head.closet.paths.instance, f"{OWNER}-2")
    assert network.id != before.id
    with closing(head.closet.client(here)) as one, closing(head.closet.client(there)) as two:
        peer = one.containers.create(tiny_image, ["python3", "-c", LISTEN], name="peer")
        asking = two.containers.create(tiny_image, ["python3", "-c", ASK], name="asking")
        try:
            for node, container in ((here, peer), (there, asking)):
                await networks.connect_container(head.daemons, node, container.id, network)
            peer.start()
            await until(lambda: b"ready" in peer.logs())
            asking.start()
            assert asking.wait(timeout=60)["StatusCode"] == 0, asking.logs()
            assert asking.logs() == b"hello\n"
        finally:
            peer.remove(force=True)
            asking.remove(force=True)
    removed = await networks.remove_idle_user_networks(head.daemons, head.cluster, head.closet.paths.instance, ())
    assert sorted(removed) == sorted([before.name, network.name])


@pytest.mark.usefixtures("all_nodes")
async def test_nodes_come_and_go(head: HeadNode) -> None:
    """Three nodes manage the Swarm; when one leaves, one of two does; a node that was replaced leaves no vote behind."""
    await wait_for_managers(head.closet, "rig1", "rig1", "rig2", "rig3")

    first, _, third = head.cluster.nodes
    await membership.hand_over(head.daemons, head.cluster, first)
    await wait_for_managers(head.closet, "rig2", "rig2")
    await membership.remove_member(head.daemons, head.cluster, first)
    with closing(head.closet.client("rig1")) as client:
        assert client.info()["Swarm"]["LocalNodeState"] == "inactive"

    # With one manager of three behind a firewall, two would be left, and both needed.
    with closed_port(head.closet, "rig3"):
        warning = await membership.ensure_member(head.daemons, head.cluster, first)
        assert warning is not None
        assert warning.startswith("rig2 alone keeps users' networks")
        assert f"{third.address}:2377 cannot be reached" in warning
        await wait_for_managers(head.closet, "rig2", "rig2")

    assert await membership.ensure_member(head.daemons, head.cluster, first) is None
    await wait_for_managers(head.closet, "rig1", "rig1", "rig2", "rig3")

    stop(head.closet, "rig3")
    await wait_for_managers(head.closet, "rig2", "rig1", "rig2", unreachable="rig3")
    await membership.hand_over(head.daemons, head.cluster, third)
    await membership.remove_member(head.daemons, head.cluster, third)
    # Of the two that remain, one manages the Swarm: two would both be needed.
    await wait_for_managers(head.closet, "rig1", "rig1")
    with closing(head.closet.client("rig1")) as client:
        assert len(client.nodes.list()) == 2
    await membership.ensure_swarm(head.daemons, leave_out(head.cluster, third))

    practice_closet.ensure_up(head.closet.plan, head.closet.paths)
    await membership.ensure_swarm(head.daemons, head.cluster)
    await wait_for_managers(head.closet, "rig3", "rig1", "rig2", "rig3")


async def test_a_first_node_that_lost_its_disk_joins_again(head: HeadNode) -> None:
    """Users' networks outlive it, and its former self has no vote any more."""
    instance = head.closet.paths.instance
    before = await networks.ensure_user_network(head.daemons, head.cluster, instance, OWNER)
    with closing(head.closet.client("rig1")) as client:
        client.api.leave_swarm(force=True)
    await membership.ensure_swarm(head.daemons, head.cluster)
    await wait_for_managers(head.closet, "rig1", "rig1", "rig2", "rig3")
    assert await networks.ensure_user_network(head.daemons, head.cluster, instance, OWNER) == before


async def test_lost_managers_leave_an_error_that_says_what_to_do(
    head: HeadNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two of three managers gone for good, the third has no leader; what the error advises repairs that."""
    for name in ("rig2", "rig3"):
        with closing(head.closet.client(name)) as client:
            client.api.leave_swarm(force=True)
    await until(lambda: not has_leader(head.closet, "rig1"))
    with monkeypatch.context() as patch:
        patch.setattr(managers, "_ELECTION_DEADLINE_S", 1)
        with pytest.raises(SetupError, match=r"rig1 manages has no leader.*`docker swarm leave --force` on rig1"):
            await membership.ensure_swarm(head.daemons, head.cluster)
    with closing(head.closet.client("rig1")) as client:
        client.api.leave_swarm(force=True)
    await membership.ensure_swarm(head.daemons, head.cluster)
    await wait_for_managers(head.closet, "rig1", "rig1", "rig2", "rig3")


async def test_the_swarm_of_others_is_not_taken_for_that_of_the_cluster(head: HeadNode) -> None:
    """A node that is no longer in it, and manages its own, is refused by name, and stays as it is."""
    second = head.cluster.nodes[1]
    await membership.hand_over(head.daemons, head.cluster, second)
    await membership.remove_member(head.daemons, head.cluster, second)
    with closing(head.closet.client("rig2")) as client:
        client.swarm.init(advertise_addr=second.address)
        try:
            with pytest.raises(Exception, match="node rig2 belongs to another Swarm"):
                await membership.ensure_swarm(head.daemons, head.cluster)
            assert client.info()["Swarm"]["Nodes"] == 1
        finally:
            client.api.leave_swarm(force=True)
    await membership.ensure_swarm(head.daemons, head.cluster)
    await wait_for_managers(head.closet, "rig1", "rig1", "rig2", "rig3")
