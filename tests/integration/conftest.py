"""Fixtures of the integration tests: the practice closet (three nodes with Docker daemons, instance `ghtest`) and its
hub.
"""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from jupyterhub import orm
from jupyterhub.objects import Hub
from jupyterhub.roles import create_role, get_default_roles
from jupyterhub.user import User
from traitlets.config import Config

from gpuhub.common import names
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.docker import networks
from gpuhub.docker.client import DockerClients
from gpuhub.docker.swarm import membership
from gpuhub.spawners.docker.spawner import GpuDockerSpawner
from gpuhub_closet import cluster_file, lifecycle
from gpuhub_closet.layouts import build_plan
from gpuhub_closet.paths import node_paths
from tests.support.closet import practice_closet
from tests.support.closet.head_node import NOTEBOOK, OWNER, HeadNode, read_gpu_uuids
from tests.support.closet.practice_closet import INSTANCE, Closet
from tests.support.closet.ssh_machines import Machine, make_key, ssh_agent, ssh_machine
from tests.support.docker.tiny_image import build_root_filesystem
from tests.support.hub.fake_broker import FakeBroker
from tests.support.launch.local_cluster import PYTHON, LocalBroker, Notebook
from tests.support.markers import mark_users_of_fixtures

#: Markers by fixture.
_NEEDS = {
    "closet": ("closet", "docker", "root"),
    "docker_daemon": ("docker", "root"),
    "interpreter": ("torch",),
    "playwright": ("browser",),
    "accounts": ("root",),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need; tests/run runs those of the closet one after the other."""
    mark_users_of_fixtures(items, Path(__file__).parent, _NEEDS)


@pytest.fixture(scope="session")
def interpreter() -> str:
    """Return the interpreter of notebooks and workers on this machine."""
    probe = subprocess.run([PYTHON, "-c", "import torch, gpu_launch"], check=False, capture_output=True, text=True)
    assert probe.returncode == 0, f"{PYTHON} lacks torch or gpu_launch; set GPU_LAUNCH_TEST_PYTHON.\n{probe.stderr}"
    return PYTHON


@pytest.fixture
def notebook(tmp_path: Path, interpreter: str) -> Iterator[Notebook]:
    """A notebook's home with its own broker, and no containers."""
    broker = LocalBroker(tmp_path)
    yield Notebook(broker)
    broker.close()


@pytest.fixture(params=["forked", "torchrun"])
def either(notebook: Notebook, request: pytest.FixtureRequest) -> Notebook:
    """A notebook whose ranks start in one of two ways; scripts see no difference."""
    notebook.is_cold = request.param == "torchrun"
    return notebook


@pytest.fixture(scope="session")
def closet() -> Iterator[Closet]:
    """Three nodes that run for the whole session; afterwards only images may remain."""
    plan, paths = build_plan(INSTANCE), Paths(INSTANCE)
    lifecycle.ensure_down(plan, paths)
    practice_closet.ensure_up(plan, paths)
    try:
        yield Closet(plan, paths, cluster_file.write_cluster_file(plan, paths))
    finally:
        lifecycle.ensure_down(plan, paths)
    assert lifecycle.find_leftovers(plan, paths) == []


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The administrator's key, and an SSH agent that has it."""
    key = tmp_path_factory.mktemp("admin") / "id"
    make_key(key)
    with ssh_agent(key) as socket_path:
        yield key, socket_path


@pytest.fixture
def rig3(closet: Closet, agent: tuple[Path, str], tmp_path: Path) -> Iterator[Machine]:
    """The third node, reached over SSH."""
    node = closet.plan.node("rig3")
    folder = node_paths(closet.paths, node).run
    with ssh_machine(closet.plan.netns_name(node), str(node.address), folder, tmp_path / "rig3", agent[0]) as machine:
        yield machine


@pytest.fixture(scope="session")
def tiny_image(closet: Closet) -> str:
    """A small image on every node, made of this machine's own files."""
    name = f"{INSTANCE}/tiny:{sysconfig.get_python_version()}-nsenter"
    content = b""
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            if not client.images.list(name):
                content = content or build_root_filesystem()
                client.api.import_image_from_data(content, repository=name.split(":")[0], tag=name.split(":")[1])
    return name


@pytest.fixture
async def head(closet: Closet, tiny_image: str) -> AsyncIterator[HeadNode]:
    """The closet's settings and clients, with a Swarm; profiles use the tiny image."""
    cluster = settings.load(closet.cluster_file)
    profiles = tuple(profile.model_copy(update={"image": tiny_image}) for profile in cluster.profiles)
    # The tiny image has no firewall; test_firewall covers it.
    network = cluster.network.model_copy(update={"guard": False})
    cluster = cluster.model_copy(update={"profiles": profiles, "network": network})
    daemons = DockerClients(cluster.nodes, instance=closet.paths.instance, run_dir=closet.paths.run)
    try:
        await membership.ensure_swarm(daemons, cluster)
        head_node = HeadNode(closet, cluster, daemons)
        yield head_node
        left = head_node.containers(names.KIND_NOTEBOOK) + head_node.containers(names.KIND_WORKER)
        head_node.remove_containers()
        assert left == []
        await networks.remove_idle_user_networks(daemons, cluster, closet.paths.instance, ())
    finally:
        daemons.close()


@pytest.fixture
def broker(head: HeadNode) -> FakeBroker:
    """A broker in memory that knows the closet's GPUs."""
    return FakeBroker(head.cluster, {node.name: read_gpu_uuids(head, node.name) for node in head.cluster.nodes})


@pytest.fixture
def users(head: HeadNode, broker: FakeBroker) -> Iterator[Any]:
    """A factory of JupyterHub's user objects, each as a hub sees it right after its start."""
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
