"""Idle notebooks at the broker: reports, warnings, keeping, the culler's question, and what others see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.controllers import idle_controller, server_restarter
from gpuhub.broker.controllers.nodes import node_controller
from gpuhub.config.settings import ClusterSettings, IdleSettings, ProfileSettings
from tests.support.broker.calls import ask, post, read, run_notebook
from tests.support.broker.in_process import ACCESS, Running, Setting, asgi_broker, held_writes, until
from tests.support.clocks import AheadClock
from tests.support.docker.simulated_nodes import build_cluster

PROFILES = [
    ProfileSettings(name="rtx5090", title="RTX 5090", gpu_model="RTX 5090"),
    ProfileSettings(name="cpu", title="No GPU", gpu_count=0),
]
CULLER = {"kind": "service", "name": "gpuhub-idle-culler", "scopes": [ACCESS, "custom:gpuhub:reclaim"]}
NO_CELL = {"is_busy": False}
HOUR = 3600.0


def with_idle(**values: Any) -> ClusterSettings:
    return build_cluster(profiles=PROFILES).model_copy(update={"idle": IdleSettings(**values)})


class Scene:
    """A broker whose clock is set ahead, with ada's notebook on the RTX 5090."""

    def __init__(self, running: Running, lease: Any, clock: AheadClock) -> None:
        self.running = running
        self.lease = lease
        self.path = f"/leases/{lease['id']}"
        self._clock = clock

    async def report(self, inactive_s: float, *, is_busy: bool = False) -> Any:
        """Report as the notebook's server does, and return what it is told once the controller has seen the report."""
        body = {"is_busy": is_busy, "inactive_s": inactive_s}
        await post(self.running, "ada", f"{self.path}/activity", body)
        await self.let_controller_run()
        return await post(self.running, "ada", f"{self.path}/activity", body)

    def pass_time(self, seconds: float) -> None:
        """Set the clocks ahead."""
        self._clock.ahead_s += seconds

    async def let_controller_run(self) -> None:
        """Wait for an update of the assessments with fresh readings."""
        names = self.lease["nodes"]

        async def is_fresh() -> bool:
            now = self.running.core.clock.monotonic()
            return all(self.running.core.capacity.inventory.nodes[name].is_fresh(now) for name in names)

        await until(is_fresh, "the nodes are read again")
        await idle_controller.IdleController(self.running.core).update()

    async def ask_culler(self) -> bool:
        """Return what the culler is told about ada's notebook."""
        answer = await post(self.running, "culler", "/reclaims", {"owner": "ada", "server": ""})
        return bool(answer["stop"])

    async def events(self, kind: str) -> list[str]:
        """Return the texts of ada's events of a kind."""
        return [event["text"] for event in await read(self.running, "ada", "/events") if event["kind"] == kind]


@pytest.fixture
async def scene(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    """One hour without activity, or two with low use; `parametrize(..., indirect=True)` replaces these settings."""
    # The controller's loop: the tests call it themselves.
    monkeypatch.setattr(idle_controller, "CHECK_PERIOD_S", 3600)
    monkeypatch.setattr(node_controller, "POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(server_restarter, "CHECK_PERIOD_S", 0.05)
    limits = getattr(request, "param", {"stop_after": "1h", "low_use_after": "2h"})
    setting = Setting(tmp_path, cluster=with_idle(**limits))
    setting.hub.models["culler"] = CULLER
    setting.clock = clock = AheadClock()
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        yield Scene(running, lease, clock)


async def test_warned_then_kept_then_reclaimed(scene: Scene) -> None:
    """The whole life: idle, warned with an event, kept, warned again, stopped with the reason for owner and page."""
    assert (await scene.report(60))["idle"]["is_warned"] is False
    told = await scene.report(52 * 60)
    assert (told["idle"]["is_warned"], told["idle"]["text"], told["idle"]["keep_s"]) == (
        True,
        "no activity for 52 min",
        3600,
    )
    [event] = await scene.events("lease.idle")
    assert event == (
        "ada's notebook on rig1: no activity for 52 min; it will be stopped in 10 min unless it is used or kept"
    )
    kept = await post(scene.running, "ada", f"{scene.path}/keep")
    assert kept["idle"]["is_warned"] is False
    assert kept["idle"]["kept_until"] is not None
    assert (await scene.events("lease.kept"))[0].startswith("ada keeps the idle notebook for 1 h")
    scene.pass_time(HOUR)
    assert (await scene.report(112 * 60))["idle"]["is_warned"] is True
    assert not await scene.ask_culler()
    scene.pass_time(601)
    assert (await scene.report(123 * 60))["report_in_s"] == 1.0
    assert await scene.ask_culler()
    [event] = await scene.events("lease.reclaimed")
    assert event == "ada's notebook (RTX 5090 on rig1): stopped after 2 h 3 min without activity; files are kept"
    await until(lambda: scene.running.setting.hub.stopped == [("ada", "")], "the broker has it stopped as well")
    assert (await read(scene.running, "ada", scene.path))["reason"].startswith("stopped after 2 h 3 min without")


async def test_a_running_cell_and_a_job_survive(scene: Scene) -> None:
    """Neither policy stops a notebook in which a cell runs, or of which a job runs, however long nothing was reported."""
    await scene.report(2 * HOUR)
    scene.pass_time(3 * HOUR)
    assert (await scene.report(5 * HOUR, is_busy=True))["idle"] is None
    assert not await scene.ask_culler()
    job = {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1, "server": ""}
    await post(scene.running, "ada", "/jobs", job, 201)
    assert (await scene.report(5 * HOUR))["idle"] is None
    assert not await scene.ask_culler()
    refused = await post(scene.running, "ada", f"{scene.path}/keep", status=409)
    assert refused["detail"] == "the notebook is not idle: it need not be kept"


async def test_only_a_fresh_report_lets_it_be_stopped(scene: Scene) -> None:
    """A notebook that is due is not stopped on a report that is older than some seconds, nor without any."""
    await scene.report(2 * HOUR)
    scene.pass_time(601)
    assert not await scene.ask_culler()
    await scene.report(2 * HOUR)
    scene.pass_time(4)
    assert not await scene.ask_culler()
    await scene.report(2 * HOUR)
    assert await scene.ask_culler()


@pytest.mark.parametrize("scene", [{"low_use_after": "2h"}], indirect=True)
async def test_low_use_counts_from_readings(scene: Scene) -> None:
    """The GPU's readings are below the limit all the time; one above it starts the time again."""
    node = scene.running.setting.nodes[scene.lease["nodes"][0]]
    await scene.report(0)
    scene.pass_time(1.9 * HOUR)
    assert (await scene.report(0))["idle"]["reason"] == "low-use"
    node.use_percent[0] = 80

    async def is_read() -> bool:
        reading = scene.running.core.capacity.inventory.nodes[node.name].gpus[0]
        return reading.utilisation_percent == 80

    await until(is_read, "the use is read")
    assert (await scene.report(0))["idle"] is None


async def test_others_see_idle_gpus_while_they_wait(scene: Scene) -> None:
    """The holder is shown as idle once another user waits, and not before."""
    await scene.report(30 * 60)

    async def find_idle() -> list[str]:
        view = await read(scene.running, "ben", "/cluster")
        return [
            g["holder"]["idle_since"]
            for n in view["nodes"]
            for g in n["gpus"]
            if g["holder"] and g["holder"]["idle_since"]
        ]

    assert await find_idle() == []
    waiting = await ask(scene.running, "ben")
    assert waiting["state"] == "requested"
    assert len(await find_idle()) == 1
    await scene.report(60)
    await until(lambda: _is_empty(find_idle), "a used one is not shown")


async def _is_empty(find: Any) -> bool:
    return not await find()


@pytest.mark.parametrize("scene", [{}], indirect=True)
async def test_without_limits_nothing_is_stopped_or_shown(scene: Scene) -> None:
    """Reports are wanted rarely, for what they answer about the GPUs."""
    assert await scene.report(9 * HOUR) == {
        "idle": None, "report_in_s": 60.0, "gpu_problems": [], "suspension": None,
    }  # fmt: skip
    assert not await scene.ask_culler()
    assert (await read(scene.running, "ada", scene.path))["idle"] is None


async def test_reclaim_is_in_the_audit_log(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """One line names the culler, the owner, the lease and the reason; questions without a stop are not logged."""
    caplog.set_level("INFO", "gpuhub.audit")
    await scene.report(2 * HOUR)
    assert not await scene.ask_culler()
    scene.pass_time(601)
    await scene.report(2 * HOUR)
    assert await scene.ask_culler()
    [line] = [json.loads(record.message) for record in caplog.records if record.name == "gpuhub.audit"]
    assert (line["who"], line["action"], line["owner"]) == ("gpuhub-idle-culler", "POST /reclaims", "ada")
    assert line["reason"] == f"{scene.lease['id']}: stopped after 2 h without activity; files are kept"


async def test_what_is_kept_survives_a_restart_of_the_broker(tmp_path: Path) -> None:
    """The store has it; idle times come with the next report."""
    setting = Setting(tmp_path, cluster=with_idle(stop_after="1h"))
    setting.clock = AheadClock()
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        await post(running, "ada", f"/leases/{lease['id']}/activity", NO_CELL | {"inactive_s": 55 * 60})
        kept = await post(running, "ada", f"/leases/{lease['id']}/keep")
    async with asgi_broker(setting) as running:
        answer = await post(running, "ada", f"/leases/{lease['id']}/activity", NO_CELL | {"inactive_s": 56 * 60})
        assert answer["idle"]["kept_until"] == kept["idle"]["kept_until"]
        assert answer["idle"]["is_warned"] is False


async def test_culler_is_answered_while_a_request_is_being_written(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of a request that is not stored yet is not stopped."""
    core = scene.running.core
    with held_writes(scene.running, monkeypatch):
        request = asyncio.ensure_future(ask(scene.running, "ben"))
        await until(lambda: core.ledger.index.find("server", "ben", ""), "the request is being written")
        answer = await post(scene.running, "culler", "/reclaims", {"owner": "ben", "server": ""})
        assert answer["stop"] is False
    assert (await request)["state"] == "requested"
