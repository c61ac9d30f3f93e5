"""Scavenging jobs that are suspended for others: the whole way at the broker, and when they are preempted after all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.controllers import suspension_controller
from gpuhub.broker.controllers.nodes import node_controller
from gpuhub.common import names
from gpuhub.config.settings import SchedulingSettings
from tests.support.broker.calls import ask, delete, post, read, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.clocks import AheadClock
from tests.support.docker.simulated_nodes import build_cluster

JOB = {
    "run_id": "run-000001", "name": "train.py", "detached": True, "scavenge": True, "nproc_per_node": 1,
    "models": ["RTX 5090"],
}  # fmt: skip
PROCESS, USED_MIB = (4711, 8000), 8192
HOUR = 3600.0


class Scene:
    """A broker with ada's scavenging job on the RTX 5090, which has 8 GiB on its GPU."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.node = running.setting.nodes["rig1"]
        self.clock = running.setting.clock
        assert isinstance(self.clock, AheadClock)
        self.job: Any = None
        self.container = ""

    @property
    def path(self) -> str:
        return f"/jobs/{self.job['id']}"

    async def start(self, **changes: Any) -> None:
        made = await post(self.running, "ada", "/jobs", {**JOB, **changes}, 201)
        self.job = await wait_for_state(self.running, f"/jobs/{made['id']}", "running")
        [worker] = self.node.of_kind(names.KIND_WORKER)
        self.container = worker["Id"]
        self.node.processes[0], self.node.used_mib[0] = [PROCESS], USED_MIB

        async def is_read() -> bool:
            gpus = self.running.core.capacity.inventory.nodes["rig1"].gpus
            return bool(gpus) and gpus[0].memory_used_mib == USED_MIB

        await until(is_read, "the memory in use is read")

    async def end_by_signal(self) -> None:
        """Wait for SIGTERM, and end as a program does."""
        await until(lambda: self.node.signals, "the job gets a signal")
        assert self.node.signals == [(self.container, "SIGTERM")]
        self.node.processes[0], self.node.used_mib[0] = [], 4
        self.node.end_container(self.container, code=143)

    async def wait_for(self, state: str | None) -> Any:
        async def look() -> Any:
            found = await read(self.running, "ada", self.path)
            suspension = found["lease"]["suspension"]
            return found if (None if suspension is None else suspension["state"]) == state else None

        return await until(look, f"ada's job is {state}")

    async def kinds(self) -> list[str]:
        return [event["kind"] for event in await read(self.running, "ada", "/events")]


@pytest.fixture
async def scene(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    """The job is not started yet; a parameter is the size of the RTX 5090's machine, cores and bytes."""
    monkeypatch.setattr(node_controller, "POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(suspension_controller, "CHECK_PERIOD_S", 0.05)
    scheduling = SchedulingSettings(preemption=True, suspend_scavengers=True, preempt_grace="1s", fair_share="0s")
    setting = Setting(tmp_path, cluster=build_cluster(scheduling=scheduling))
    setting.clock = AheadClock()
    setting.nodes["rig1"].size = getattr(request, "param", None)
    async with asgi_broker(setting) as running:
        yield Scene(running)


async def test_a_job_is_suspended_and_continues(scene: Scene) -> None:
    """ben's notebook gets the GPU; the job waits for this GPU with its time standing still, and continues after him."""
    await scene.start(time_limit_s=HOUR)
    ends_at = (await read(scene.running, "ada", scene.path))["lease"]["expires_at"]
    assert ends_at is not None
    ben = await ask(scene.running, "ben")
    await wait_for_state(scene.running, f"/leases/{ben['id']}", "granted")
    away = await scene.wait_for("resuming")
    assert (away["state"], away["lease"]["position"], away["lease"]["expires_at"]) == ("running", 1, None)
    assert "which others use: number 1 in the queue" in away["lease"]["suspension"]["text"]
    assert scene.node.suspender_commands == [["suspend", scene.container, "GPU-rig1-0", "32607"]]
    assert scene.node.signals == []
    assert (await read(scene.running, "ada", "/usage"))[0]["gpus"] == 0

    scene.clock.ahead_s += 2 * HOUR
    await delete(scene.running, "root", f"/leases/{ben['id']}")
    back = await scene.wait_for(None)
    assert scene.node.suspender_commands[1:] == [["resume", scene.container, "GPU-rig1-0"]]
    assert (back["state"], back["preemptions"], back["workers"][0]["state"]) == ("running", 0, "running")
    assert back["lease"]["expires_at"] > ends_at
    kinds = await scene.kinds()
    assert [kind for kind in kinds if kind.startswith(("lease.su", "lease.resum"))] == [
        "lease.suspended",
        "lease.resuming",
        "lease.resumed",
    ]
    scene.node.end_container(scene.container, code=0)
    assert (await wait_for_state(scene.running, scene.path, "ended"))["exit_code"] == 0


async def test_a_job_that_cannot_be_suspended_is_preempted(scene: Scene) -> None:
    """It gets SIGTERM and its time for a checkpoint, and waits again."""
    await scene.start()
    scene.node.suspender_outcomes["suspend"] = "refused"
    ben = await ask(scene.running, "ben")
    await scene.end_by_signal()
    await wait_for_state(scene.running, f"/leases/{ben['id']}", "granted")
    waiting = await wait_for_state(scene.running, scene.path, "waiting")
    assert (waiting["preemptions"], waiting["lease"]["suspension"]) == (1, None)
    assert "lease.not-suspended" in await scene.kinds()


@pytest.mark.parametrize("scene", [(8, 64 * 1024**3)], indirect=True)
async def test_a_job_beside_which_there_is_no_room_is_preempted(scene: Scene) -> None:
    """It has three quarters of the node's memory, which it would keep."""
    await scene.start(ram_mib=40 * 1024)
    made = await post(scene.running, "ben", "/jobs", {**JOB, "scavenge": False, "ram_mib": 20 * 1024}, 201)
    await scene.end_by_signal()
    await wait_for_state(scene.running, f"/jobs/{made['id']}", "running")
    assert scene.node.suspender_commands == []


@pytest.mark.parametrize("scene", [(8, 64 * 1024**3)], indirect=True)
async def test_a_job_keeps_its_memory_beside_another(scene: Scene) -> None:
    """Of 64 GiB there is room for both, and for what was on the GPU."""
    await scene.start(ram_mib=20 * 1024)
    made = await post(scene.running, "ben", "/jobs", {**JOB, "scavenge": False, "ram_mib": 20 * 1024}, 201)
    await wait_for_state(scene.running, f"/jobs/{made['id']}", "running")
    await scene.wait_for("resuming")
    await delete(scene.running, "root", f"/jobs/{made['id']}")
    await scene.wait_for(None)
    assert [command[0] for command in scene.node.suspender_commands] == ["suspend", "resume"]


async def test_a_suspended_job_can_be_cancelled(scene: Scene) -> None:
    """Its container is removed, and its GPU stays with the one who has it."""
    await scene.start()
    ben = await ask(scene.running, "ben")
    await scene.wait_for("resuming")
    await delete(scene.running, "ada", scene.path)
    ended = await wait_for_state(scene.running, scene.path, "ended")
    assert ended["lease"]["state"] == "released"
    assert scene.container not in scene.node.containers
    assert (await read(scene.running, "ben", f"/leases/{ben['id']}"))["state"] == "granted"
