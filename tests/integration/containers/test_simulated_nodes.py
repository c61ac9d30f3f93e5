"""The simulated nodes refuse as a real daemon does: both are asked the same, and give errors of the same kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from docker.types import DeviceRequest

from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.docker.client import DockerClients
from tests.support.closet.head_node import HeadNode
from tests.support.docker.simulated_nodes import SimulatedDaemons, SimulatedNode, build_cluster, simulated_nodes

NAME = "gpuhub-simulated-or-real"


@dataclass(frozen=True)
class Daemon:
    """A node's Docker, and an image that it has."""

    clients: DockerClients
    image: str
    simulated: SimulatedNode | None

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the client, as the product does."""
        return await self.clients.call("rig1", method, *arguments, **options)

    async def create(self, **options: Any) -> str:
        """Create a container that runs, once it is started, until it is killed."""
        options = {"image": self.image, "name": NAME, "labels": {}, "command": ["sleep", "600"], **options}
        return str((await self.call("create_container", **options))["Id"])


@pytest.fixture(params=["simulated", "real"])
def daemon(request: pytest.FixtureRequest, head: HeadNode, tiny_image: str, tmp_path: Path) -> Daemon:
    """A simulated daemon, and a real one."""
    if request.param == "real":
        return Daemon(head.daemons, tiny_image, None)
    nodes = simulated_nodes()
    nodes["rig1"].images.add(tiny_image)
    return Daemon(SimulatedDaemons(build_cluster().nodes, nodes, tmp_path), tiny_image, nodes["rig1"])


@contextmanager
def refused(kind: type[GpuhubError], text: str) -> Iterator[None]:
    """Expect an error of exactly this kind."""
    with pytest.raises(GpuhubError, match=text) as refusal:
        yield
    assert type(refusal.value) is kind


async def test_removal_of_a_running_container(daemon: Daemon) -> None:
    """It is refused without force, as is a second container of the name; a second removal finds nothing."""
    made = await daemon.create()
    try:
        with refused(Conflict, "in use"):
            await daemon.create()
        await daemon.call("start", made)
        with refused(Conflict, "cannot remove a running container"):
            await daemon.call("remove_container", made)
    finally:
        await daemon.call("remove_container", made, force=True)
    with refused(NotFound, "(?i)no such container"):
        await daemon.call("remove_container", made, force=True)


async def test_start_without_the_driver_of_a_device(daemon: Daemon) -> None:
    """It is an internal error of the daemon, with a text that names what is missing."""
    request = DeviceRequest(driver="absent", capabilities=[["gpu"]], device_ids=["GPU-0"])
    if daemon.simulated is not None:
        daemon.simulated.has_toolkit = False
    host = await daemon.call("create_host_config", device_requests=[request])
    made = await daemon.create(host_config=host)
    try:
        with refused(GpuhubError, "could not select device driver .* with capabilities"):
            await daemon.call("start", made)
    finally:
        await daemon.call("remove_container", made, force=True)
