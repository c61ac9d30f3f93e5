"""Lifetime of couriers: started on demand on nodes that take work, and removed when idle."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.files.couriers import IDLE_TIMEOUT_S
from gpuhub.common import names
from gpuhub.common.errors import ImageMissing, NodeUnreachable
from tests.support.broker.calls import ask, post, read
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.clocks import AheadClock


@pytest.fixture
def clock() -> AheadClock:
    """A clock that tests advance."""
    return AheadClock()


@pytest.fixture
def setting(tmp_path: Path, clock: AheadClock) -> Setting:
    """The practice closet's three nodes, simulated."""
    return Setting(tmp_path, clock=clock)


def couriers(setting: Setting) -> dict[str, list[str]]:
    """Return the owners of couriers by node."""
    found = {
        name: [one["Labels"].get(names.LABEL_OWNER, "") for one in node.of_kind(names.KIND_COURIER)]
        for name, node in setting.nodes.items()
    }
    return {name: owners for name, owners in found.items() if owners}


async def send(running: Running, owner: str = "ada", status: int = 200) -> Any:
    """Send one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("file"), io.BytesIO())
    async with running.client(owner) as client:
        answer = await client.put("/api/v1/files", params={"path": "work"}, content=buffer.getvalue())
    assert answer.status_code == status, answer.text
    return answer.json()


@asynccontextmanager
async def with_courier(setting: Setting) -> AsyncIterator[tuple[Running, str]]:
    """Yield a broker with ada's courier, and the courier's node."""
    async with asgi_broker(setting) as running:
        await send(running)
        (node,) = couriers(setting)
        yield running, node


async def test_courier_serves_until_the_idle_timeout(setting: Setting, clock: AheadClock) -> None:
    """One courier serves all requests of its owner; it is not a lease and blocks no GPU."""
    async with with_courier(setting) as (running, node):
        await send(running)
        await send(running)
        assert len(setting.couriers.specs) == 1
        assert await read(running, "root", "/leases") == []
        assert (await ask(running, "ben"))["state"] == "granted"
        clock.ahead_s += IDLE_TIMEOUT_S - 5
        await send(running)
        clock.ahead_s += IDLE_TIMEOUT_S - 5
        await running.core.ledger.change(lambda draft: None)
        assert couriers(setting) == {node: ["ada"]}
        clock.ahead_s += 10
        await until(lambda: not couriers(setting), "it is removed")
        await send(running)
        assert len(setting.couriers.specs) == 2


async def test_couriers_of_an_earlier_broker_are_removed(setting: Setting) -> None:
    """A new broker does not know what runs in them."""
    async with with_courier(setting):
        pass
    stranger = setting.nodes["rig3"].run_container({"gpuhub.instance": "other", names.LABEL_KIND: names.KIND_COURIER})
    async with asgi_broker(setting):
        await until(lambda: "rig1" not in couriers(setting) and "rig2" not in couriers(setting), "it is removed")
        assert stranger in setting.nodes["rig3"].containers


async def test_courier_moves_off_a_drained_node(setting: Setting) -> None:
    """The next file is sent through a courier on another node."""
    async with with_courier(setting) as (running, node):
        await post(running, "root", f"/nodes/{node}/drain", {"grace_s": 3600})
        await until(lambda: not couriers(setting), "it is removed")
        await send(running)
        assert node not in couriers(setting)


async def test_vanished_courier_is_started_again(setting: Setting) -> None:
    """Users do not notice that it was removed by hand or ended with its node."""
    async with with_courier(setting) as (running, node):
        setting.nodes[node].containers.clear()
        await send(running)
        (container,) = setting.nodes[node].of_kind(names.KIND_COURIER)
        setting.nodes[node].end_container(container["Id"])
        await send(running)
        assert len(setting.couriers.specs) == 3


async def test_courier_start_is_retried_on_another_node(setting: Setting) -> None:
    """When a node cannot start a courier, another one does; when none can, the error has the reason."""
    async with asgi_broker(setting) as running:
        setting.couriers.failing = {
            "rig1": NodeUnreachable("node rig1: its Docker daemon cannot be reached"),
            "rig2": ImageMissing("node rig2: no such image: gpuhub/notebook:latest"),
        }
        await send(running)
        assert couriers(setting) == {"rig3": ["ada"]}
        setting.couriers.failing = dict.fromkeys(setting.nodes, ImageMissing("no such image"))
        refused = await send(running, "ben", 503)
        assert refused["code"] == "image-missing"
        for node in setting.nodes:
            await post(running, "root", f"/nodes/{node}/cordon", {})
        refused = await send(running, "ben", 503)
        assert refused["detail"] == "no node takes work now, so files can be neither sent nor read"
