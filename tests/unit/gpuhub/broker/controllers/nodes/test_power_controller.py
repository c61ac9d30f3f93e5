"""Nodes that sleep: who wakes them, when they are put to sleep, and what must never be.

The nodes are simulated; what switches them are real commands, whose files the simulated machines follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.controllers.nodes import node_controller, power_controller
from gpuhub.common import names
from gpuhub.config.machines.power import NodePowerSettings
from gpuhub.config.settings import ClusterSettings
from gpuhub.nodes.power_status import PowerState
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, list_event_texts, until
from tests.support.docker.simulated_nodes import build_cluster, simulated_nodes
from tests.support.docker.sleepy_nodes import build_switch, follow_switches

pytestmark = pytest.mark.process

SLEEPERS = ("rig2", "rig3")


@pytest.fixture(autouse=True)
def _short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks in quick succession."""
    monkeypatch.setattr(node_controller, "POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(node_controller, "RETRY_POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(node_controller, "ASLEEP_POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(power_controller, "CHECK_PERIOD_S", 0.05)


def build_sleepy_cluster(folder: Path, **power: Any) -> ClusterSettings:
    """rig2 and rig3 sleep; `touch` stands for what switches them."""
    cluster = build_cluster()
    settings = {"idle": 3600, "wake_timeout": 20, **power}
    nodes = [
        node.model_copy(
            update={
                "power": NodePowerSettings(
                    on=build_switch(folder, node.name, "on"), off=build_switch(folder, node.name, "off")
                ).model_copy(update=settings)
            }
        )
        if node.name in SLEEPERS
        else node
        for node in cluster.nodes
    ]
    return cluster.model_copy(update={"nodes": tuple(nodes)})


@pytest.fixture
def sleepy(tmp_path: Path) -> Iterator[Setting]:
    yield Setting(tmp_path, cluster=build_sleepy_cluster(tmp_path))


def with_power(setting: Setting, **power: Any) -> None:
    setting.cluster = build_sleepy_cluster(setting.folder, **power)


@asynccontextmanager
async def sleepy_broker(setting: Setting) -> AsyncIterator[Running]:
    with follow_switches(setting.folder, setting.nodes):
        async with asgi_broker(setting, wait=False) as running:
            yield running


async def wait_for_node(running: Running, name: str, state: str) -> Any:
    async def find() -> Any:
        node = await view_node(running, name)
        return node if node["state"] == state else None

    return await until(find, f"{name} is {state}")


async def view_node(running: Running, name: str) -> Any:
    return next(node for node in await read(running, "root", "/nodes") if node["name"] == name)


async def put_to_sleep(running: Running, *nodes: str) -> None:
    for name in nodes:
        await wait_for_node(running, name, "up")
        await until(lambda name=name: has_fresh_gpus(running, name), "its GPUs are read")
        await post(running, "root", f"/nodes/{name}/power", {"on": False})
    for name in nodes:
        await wait_for_power(running, name, "asleep")


def has_fresh_gpus(running: Running, name: str) -> bool:
    record = running.core.capacity.inventory.nodes[name]
    return bool(record.gpus) and record.is_fresh(running.core.clock.monotonic())


async def wait_for_power(running: Running, name: str, state: str) -> None:
    await until(lambda: running.core.capacity.power[name].state == state, f"the power of {name} is {state}")


async def test_request_wakes_the_node_that_it_needs(sleepy: Setting) -> None:
    """Asleep it is no alarm; the request starts when it is up, and the time that took is known from then on."""
    async with sleepy_broker(sleepy) as running:
        await put_to_sleep(running, "rig2", "rig3")
        node = await wait_for_node(running, "rig2", "asleep")
        assert node["message"] == "asleep, woken when the queue needs it"
        assert [gpu["state"] for gpu in node["gpus"]] == ["unavailable"]
        lease = await ask(running, "ada", profile="rtx5070")
        await wait_for_state(running, f"/leases/{lease['id']}", "granted")
        await wait_for_node(running, "rig2", "up")
        assert running.core.capacity.power["rig3"].state == "asleep"
        assert (await view_node(running, "rig2"))["power"]["usual_wake_s"] > 0
        assert await list_event_texts(running, "node.down") == await list_event_texts(running, "node.unreachable") == []
        assert (await list_event_texts(running, "power.waking")) == ["node rig2 is woken for 1 waiting request"]


async def test_waiting_for_a_busy_gpu_wakes_one_node_only(sleepy: Setting) -> None:
    """A GPU of any model is asked for: one sleeping node is enough, and the smaller one does."""
    async with sleepy_broker(sleepy) as running:
        await put_to_sleep(running, "rig2", "rig3")
        await run_notebook(running, await ask(running, "ben", profile="rtx5090"))
        lease = await ask(running, "ada", profile="any")
        granted = await wait_for_state(running, f"/leases/{lease['id']}", "granted")
        assert granted["nodes"] == ["rig3"]
        assert running.core.capacity.power["rig2"].state == "asleep"


async def test_gang_wakes_all_of_its_nodes(sleepy: Setting) -> None:
    """None of them alone would let it start."""
    async with sleepy_broker(sleepy) as running:
        await put_to_sleep(running, "rig2", "rig3")
        job = {"run_id": "run-000001", "nnodes": 3, "nproc_per_node": 1, "models": [], "batch": True}
        made = await post(running, "ada", "/jobs", job, 201)
        await wait_for_state(running, f"/jobs/{made['id']}", "running")


async def test_nothing_is_woken_in_vain(sleepy: Setting) -> None:
    """A request that awake nodes serve, or that a cordoned sleeping node could, leaves all asleep."""
    async with sleepy_broker(sleepy) as running:
        await put_to_sleep(running, "rig2", "rig3")
        await post(running, "root", "/nodes/rig2/cordon", {})
        waiting = await ask(running, "ada", profile="rtx5070")
        assert (await ask(running, "ben", profile="rtx5090"))["state"] == "granted"
        await asyncio.sleep(0.4)
        assert [running.core.capacity.power[name].state for name in SLEEPERS] == ["asleep", "asleep"]
        await post(running, "root", "/nodes/rig2/undrain")
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")


async def test_wait_says_which_node_is_waking_and_how_long_that_takes(sleepy: Setting) -> None:
    """The usual time is that of earlier wakings."""
    async with sleepy_broker(sleepy) as running:
        await put_to_sleep(running, "rig2")
        power = running.core.capacity.power["rig2"]
        await running.core.set_power(power.record_awake(0.0, 38.0).begin(PowerState.ASLEEP, 0.0))
        with_power(sleepy, on=("/usr/bin/true",))
        running.core.cluster = sleepy.cluster
        lease = await ask(running, "ada", profile="rtx5070")
        await wait_for_node(running, "rig2", "waking")
        why = await read(running, "ada", f"/leases/{lease['id']}/why")
        assert "waking rig2, usually up after 38 s" in why["waits_for"]
        assert "not available" not in why["waits_for"]


async def test_node_that_does_not_come_up_is_reported_once(sleepy: Setting) -> None:
    """Its owner is notified, it counts as down, and the queue leaves it alone until the time that the node's page says."""
    with_power(sleepy, on=("/usr/bin/true",), wake_timeout=1, retry_after=3600)
    async with sleepy_broker(sleepy) as running:
        await put_to_sleep(running, "rig2")
        lease = await ask(running, "ada", profile="rtx5070")
        node = await wait_for_node(running, "rig2", "down")
        assert "did not come up within 1 s after it was woken; not tried again before" in node["message"]
        assert node["power"]["retry_at"] is not None
        await until(lambda: list_event_texts(running, "notified.node-down"), "its owner is told")
        await asyncio.sleep(0.3)
        assert len(await list_event_texts(running, "power.waking")) == 1
        sleepy.nodes["rig2"].is_reachable = True
        await wait_for_state(running, f"/leases/{lease['id']}", "granted")
        await wait_for_power(running, "rig2", "on")
        assert (await view_node(running, "rig2"))["power"] | {"since": ""} == {
            "state": "on", "since": "", "usual_wake_s": None, "retry_at": None, "error": None,
        }  # fmt: skip


async def test_command_that_fails_is_told_to_the_administrator(sleepy: Setting) -> None:
    """With the last line of its output; a later waking by hand tries again at once."""
    with_power(sleepy, on=("/bin/sh", "-c", "echo no route to the switch; exit 3"))
    async with sleepy_broker(sleepy) as running:
        await put_to_sleep(running, "rig2")
        await post(running, "root", "/nodes/rig2/power", {"on": True})
        node = await wait_for_node(running, "rig2", "down")
        assert node["power"]["error"] == "could not be woken: /bin/sh failed with exit code 3: no route to the switch"
        with_power(sleepy)
        running.core.cluster = sleepy.cluster
        await post(running, "root", "/nodes/rig2/power", {"on": True})
        await wait_for_node(running, "rig2", "up")


async def test_idle_nodes_go_to_sleep_and_used_ones_do_not(sleepy: Setting) -> None:
    """A lease keeps a node awake, and so does a program of others on its GPU."""
    with_power(sleepy, idle=1)
    sleepy.nodes["rig3"].processes[0] = [(4242, 500)]
    async with sleepy_broker(sleepy) as running:
        lease = await ask(running, "ada", profile="rtx5070")
        granted = await wait_for_state(running, f"/leases/{lease['id']}", "granted")
        await run_notebook(running, granted)
        await asyncio.sleep(2)
        assert [running.core.capacity.power[name].state for name in SLEEPERS] == ["on", "on"]
        await delete(running, "ada", f"/leases/{lease['id']}")
        sleepy.nodes["rig3"].processes.clear()
        await wait_for_power(running, "rig2", "asleep")
        await wait_for_power(running, "rig3", "asleep")
        assert (await view_node(running, "rig1"))["power"] is None


async def test_container_of_gpuhub_keeps_a_node_awake(sleepy: Setting) -> None:
    """Also one that belongs to no lease; the node takes work again at once."""
    async with sleepy_broker(sleepy) as running:
        await wait_for_node(running, "rig2", "up")
        await until(lambda: has_fresh_gpus(running, "rig2"), "its GPUs are read")
        container = sleepy.nodes["rig2"].run_container({names.LABEL_KIND: names.KIND_STAGER})
        refused = await post(running, "root", "/nodes/rig2/power", {"on": False}, 409)
        assert "a container of gpuhub runs there (stager)" in refused["detail"]
        assert running.core.capacity.power["rig2"].state == "on"
        del sleepy.nodes["rig2"].containers[container]
        await put_to_sleep(running, "rig2")


async def test_grant_that_is_being_written_keeps_the_node_awake(sleepy: Setting) -> None:
    """The node is told to sleep in the same moment: either the lease is on an awake node, or it wakes it."""
    async with sleepy_broker(sleepy) as running:
        await wait_for_node(running, "rig2", "up")
        await until(lambda: has_fresh_gpus(running, "rig2"), "its GPUs are read")
        lease, _ = await asyncio.gather(
            ask(running, "ada", profile="rtx5070"), send_off(running, "rig2"), return_exceptions=False
        )
        await wait_for_state(running, f"/leases/{lease['id']}", "granted")
        await wait_for_power(running, "rig2", "on")
        assert sleepy.nodes["rig2"].is_reachable


async def send_off(running: Running, node: str) -> int:
    async with running.client("root") as client:
        answer = await client.post(f"/api/v1/nodes/{node}/power", json={"on": False})
    return answer.status_code


async def test_node_that_goes_on_answering_takes_work_again(sleepy: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is shown to administrators, and is no alarm."""
    monkeypatch.setattr(power_controller, "STOP_TIMEOUT_S", 0.5)
    with_power(sleepy, off=("/usr/bin/true",))
    async with sleepy_broker(sleepy) as running:
        await wait_for_node(running, "rig2", "up")
        await until(lambda: has_fresh_gpus(running, "rig2"), "its GPUs are read")
        await post(running, "root", "/nodes/rig2/power", {"on": False})
        await wait_for_power(running, "rig2", "on")
        node = await view_node(running, "rig2")
        assert (node["state"], node["message"]) == ("up", None)
        assert "still answers" in node["power"]["error"]
        assert (await ask(running, "ada", profile="rtx5070"))["state"] == "granted"


async def test_refusal_of_the_machine_is_shown_and_not_repeated_at_once(sleepy: Setting) -> None:
    """Such as that somebody is logged in there."""
    with_power(sleepy, idle=1, off=("/bin/sh", "-c", "echo User mia is logged in on tty2.; exit 1"))
    async with sleepy_broker(sleepy) as running:
        texts = await until(lambda: list_event_texts(running, "power.refused"), "it is refused")
        assert "User mia is logged in on tty2." in texts[0]
        await asyncio.sleep(1.5)
        assert len(await list_event_texts(running, "power.stopping")) == len(SLEEPERS)


async def test_sleep_survives_a_restart_of_the_broker(sleepy: Setting) -> None:
    """A node that sleeps is not taken for one that is down, and one that woke in the meantime is on."""
    async with sleepy_broker(sleepy) as running:
        await put_to_sleep(running, "rig2", "rig3")
    sleepy.nodes["rig3"].is_reachable = True
    async with sleepy_broker(sleepy) as running:
        await wait_for_power(running, "rig3", "on")
        assert (await view_node(running, "rig2"))["state"] == "asleep"
        lease = await ask(running, "ada", profile="rtx5070")
        await wait_for_state(running, f"/leases/{lease['id']}", "granted")


async def test_power_is_switched_by_administrators_only(sleepy: Setting) -> None:
    """And only where cluster.toml says how."""
    async with sleepy_broker(sleepy) as running:
        await wait_for_node(running, "rig2", "up")
        await post(running, "ada", "/nodes/rig2/power", {"on": False}, 403)
        assert "stays on" in (await post(running, "root", "/nodes/rig1/power", {"on": False}, 422))["detail"]
        assert "rig2 is on" in (await post(running, "root", "/nodes/rig2/power", {"on": True}, 409))["detail"]
        await post(running, "root", "/nodes/rig9/power", {"on": True}, 404)


async def test_files_wake_a_node_where_all_sleep(tmp_path: Path) -> None:
    """The caller is told to try again, since no request of the queue waits for it."""
    cluster = build_sleepy_cluster(tmp_path)
    nodes = {name: node for name, node in simulated_nodes().items() if name in SLEEPERS}
    kept = tuple(node for node in cluster.nodes if node.name in SLEEPERS)
    setting = Setting(tmp_path, cluster=cluster.model_copy(update={"nodes": kept}), nodes=nodes)
    async with sleepy_broker(setting) as running:
        await put_to_sleep(running, *SLEEPERS)
        async with running.client("ada") as client:
            refused = await client.get("/api/v1/files", params={"path": "."})
        assert refused.status_code == 503
        assert refused.json()["detail"].startswith(
            "all nodes sleep, so files can be neither sent nor read: rig2 is being woken"
        )
        await wait_for_node(running, "rig2", "up")
