"""Suspended notebooks at the broker: who is suspended for whom, the way back, failures, and restarts in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.controllers import idle_controller, server_restarter, suspension_controller
from gpuhub.broker.controllers.nodes import node_controller
from gpuhub.broker.state import mutations
from gpuhub.broker_api.schemas import NotificationKind
from gpuhub.config.containers.idle import ProfileIdleSettings
from gpuhub.config.settings import ClusterSettings, IdleSettings, ProfileSettings
from gpuhub.domain import lease_states
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import ACCESS, Running, Setting, asgi_broker, until
from tests.support.clocks import AheadClock
from tests.support.docker.simulated_nodes import build_cluster, simulated_nodes

PROFILES = [
    ProfileSettings(name="rtx5090", title="RTX 5090", gpu_model="RTX 5090"),
    ProfileSettings(
        name="rtx5070", title="RTX 5070", gpu_model="RTX 5070", idle=ProfileIdleSettings(suspend_after="0s")
    ),
    ProfileSettings(name="cpu", title="No GPU", gpu_count=0),
]
HOUR = 3600.0
CULLER = {"kind": "service", "name": "gpuhub-idle-culler", "scopes": [ACCESS, "custom:gpuhub:reclaim"]}
PROCESS, USED_MIB = (4711, 8000), 8192


def with_suspension(**values: Any) -> ClusterSettings:
    return build_cluster(profiles=PROFILES).model_copy(update={"idle": IdleSettings(suspend_after="10m", **values)})


class Scene:
    """A broker with ada's notebook on the RTX 5090, which has 8 GiB on its GPU."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.node = running.setting.nodes["rig1"]
        self.lease: Any = None
        self.container = ""

    async def start(self) -> None:
        self.lease = await ask(self.running, "ada")
        self.container = await run_notebook(self.running, self.lease)
        self.node.processes[0], self.node.used_mib[0] = [PROCESS], USED_MIB
        await self.let_readings_arrive()

    async def let_readings_arrive(self) -> None:
        async def is_read() -> bool:
            gpus = self.running.core.capacity.inventory.nodes["rig1"].gpus
            return bool(gpus) and gpus[0].memory_used_mib == self.node.used_mib.get(0, 4)

        await until(is_read, "the memory in use is read")

    @property
    def path(self) -> str:
        return f"/leases/{self.lease['id']}"

    async def report(self, inactive_s: float = 0.0, *, is_busy: bool = False, last_cell_s: float | None = None) -> Any:
        body = {"is_busy": is_busy, "inactive_s": inactive_s, "last_cell_s": last_cell_s}
        return await post(self.running, "ada", f"{self.path}/activity", body)

    async def be_idle(self) -> None:
        await self.report(HOUR)

    async def wait_for(self, state: str | None) -> Any:
        async def look() -> Any:
            found = await read(self.running, "ada", self.path)
            reached = None if found["suspension"] is None else found["suspension"]["state"]
            return found if reached == state else None

        return await until(look, f"ada's notebook is {state}")

    async def events(self, kind: str) -> list[str]:
        return [event["text"] for event in await read(self.running, "ada", "/events") if event["kind"] == kind]


@pytest.fixture
async def scene(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    """Notebooks are suspended after ten minutes; a parameter replaces the settings."""
    hasten(monkeypatch)
    setting = Setting(tmp_path, cluster=getattr(request, "param", None) or with_suspension())
    setting.clock = AheadClock()
    async with asgi_broker(setting) as running:
        scene = Scene(running)
        await scene.start()
        yield scene


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_controller, "CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr(node_controller, "POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(suspension_controller, "CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr(server_restarter, "CHECK_PERIOD_S", 0.05)


async def test_an_idle_notebook_lends_its_gpu_and_gets_it_back(scene: Scene) -> None:
    """The whole way: suspended for ben, who gets the GPU; ada waits with a place in the queue, and continues after him."""
    await scene.be_idle()
    ben = await ask(scene.running, "ben")
    await wait_for_state(scene.running, f"/leases/{ben['id']}", "granted")
    shown = await read(scene.running, "ada", scene.path)
    assert (shown["state"], shown["suspension"]["state"], shown["suspension"]["moved_mib"]) == (
        "active",
        "suspended",
        USED_MIB,
    )
    assert shown["nodes"] == ["rig1"]
    assert scene.node.suspender_commands == [["suspend", scene.container, "GPU-rig1-0", "32607"]]
    # The container may have what was on the GPU, besides its own memory.
    await until(lambda: _has_limit(scene, 16384 + USED_MIB + 512), "the limit has room for what was moved")
    assert "8.0 GiB" in (await scene.events("lease.suspended"))[0]

    # A cell: the notebook waits for this GPU, as number 1 in the queue.
    assert (await scene.report(is_busy=True))["suspension"]["state"] == "resuming"
    waiting = await read(scene.running, "ada", scene.path)
    assert (waiting["position"], waiting["suspension"]["state"]) == (1, "resuming")
    assert waiting["suspension"]["text"] == "waits for the RTX 5090 on rig1, which others use: number 1 in the queue"
    assert "the GPU it was suspended on" in waiting["waiting_for"]
    assert "ben" in waiting["waiting_for"]
    assert len(scene.node.suspender_commands) == 1

    await delete(scene.running, "root", f"/leases/{ben['id']}")
    await scene.wait_for(None)
    assert scene.node.suspender_commands[1:] == [["resume", scene.container, "GPU-rig1-0"]]
    back = await read(scene.running, "ada", scene.path)
    assert (back["state"], back["epoch"], [gpu["uuid"] for gpu in back["gpus"]]) == ("active", 1, ["GPU-rig1-0"])
    await until(lambda: _has_limit(scene, 16384), "the limit is as before")
    assert (await scene.events("lease.resumed")) == ["ada's notebook has GPU 0 of rig1 back and continues"]


async def test_an_owner_who_waited_is_notified_that_the_gpu_is_back(scene: Scene) -> None:
    """ben had it for ten minutes since ada's cell; whoever waits for a moment watches."""
    clock = scene.running.setting.clock
    assert isinstance(clock, AheadClock)
    await post_suspended(scene)
    await post(scene.running, "ada", f"{scene.path}/resume")
    await scene.wait_for(None)
    await post_suspended(scene)
    ben = await ask(scene.running, "ben")
    await wait_for_state(scene.running, f"/leases/{ben['id']}", "granted")
    await post(scene.running, "ada", f"{scene.path}/resume")
    clock.ahead_s += 600
    await delete(scene.running, "root", f"/leases/{ben['id']}")
    await scene.wait_for(None)
    [stored] = scene.running.store.outbox.list_notifications("ada", None, 10)
    assert (stored.kind, stored.title) == (NotificationKind.GRANTED, "Your GPU is back: RTX 5090 on rig1")
    assert stored.body == "Your notebook waited 10 min and continues now."


async def test_a_cell_that_ran_meanwhile_brings_the_gpu_back(scene: Scene) -> None:
    """One that began after the suspension, and has ended; one from before it does not count."""
    scene.node.on_call = _refuse_suspender
    await scene.report(0)
    await post(scene.running, "ada", f"{scene.path}/suspend")
    await scene.report(last_cell_s=500)
    assert (await scene.wait_for("suspending"))["state"] == "active"
    await scene.report(last_cell_s=0)
    scene.node.on_call = lambda _method: None
    await scene.wait_for(None)
    assert [command[0] for command in scene.node.suspender_commands] == ["suspend", "resume"]
    await scene.report(last_cell_s=700)
    await post(scene.running, "ada", f"{scene.path}/suspend")
    await scene.wait_for("suspended")
    await scene.report(last_cell_s=700)
    assert (await scene.wait_for("suspended"))["state"] == "active"


@pytest.mark.parametrize(
    "why", ["busy", "recent", "kept", "unwilling", "nobody waits", "another model", "another profile"]
)
async def test_only_idle_notebooks_are_suspended_and_only_for_others_who_wait(scene: Scene, why: str) -> None:
    """A running cell, ten minutes that are not over, keeping, an unwilling owner, and requests that it would not serve."""
    lease = scene.running.core.ledger.snapshot.leases[scene.lease["id"]]
    changed = {
        "kept": lease.evolve(kept_until=scene.running.core.clock.now() + HOUR),
        "unwilling": lease.evolve(resources=replace(lease.resources, suspendable=False)),
    }
    await scene.running.core.ledger.change(lambda transaction: transaction.put_lease(changed.get(why, lease)))
    await scene.report(60 if why == "recent" else HOUR, is_busy=why == "busy")
    if why == "another model":
        first = await ask(scene.running, "ben", profile="rtx5070")
        await run_notebook(scene.running, first)
        await ask(scene.running, "ben", profile="rtx5070")
    elif why == "another profile":
        # Its own profile forbids it.
        mine = await ask(scene.running, "ada", profile="rtx5070", server="two")
        await run_notebook(scene.running, mine)
        body = {"is_busy": False, "inactive_s": HOUR}
        await post(scene.running, "ada", f"/leases/{mine['id']}/activity", body)
        await ask(scene.running, "ben", profile="rtx5070")
    elif why != "nobody waits":
        await ask(scene.running, "ben")
    await suspension_controller.SuspensionController(scene.running.core, scene.running.app.state.daemons).update()
    assert scene.running.core.ledger.find_leases("suspended") == []
    assert scene.node.suspender_commands == []


@pytest.mark.parametrize(
    ("why", "suspended"),
    [("nothing", 0), ("cordoned", 1), ("does not answer", 1), ("defect", 1), ("in use outside", 1), ("quarantined", 1)],
)
async def test_a_free_gpu_counts_only_where_it_can_be_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, suspended: int
) -> None:
    """ben waits, and the second RTX 5090 is free: what keeps it from him is no reason to leave ada's idle one to her."""
    hasten(monkeypatch)
    cards = {"rig1": [("NVIDIA GeForce RTX 5090", 32607)], "rig2": [("NVIDIA GeForce RTX 5090", 32607)]}
    cluster = build_cluster(cards, profiles=PROFILES[:1])
    setting = Setting(
        tmp_path,
        cluster=cluster.model_copy(update={"idle": IdleSettings(suspend_after="10m")}),
        nodes=simulated_nodes(cards),
    )
    setting.clock = AheadClock()
    async with asgi_broker(setting) as running:
        await post(running, "root", "/nodes/rig2/cordon", {"reason": "repair"})
        scene = Scene(running)
        await scene.start()
        other = setting.nodes["rig2"]
        if why == "does not answer":
            other.is_reachable = False
        elif why == "defect":
            other.ecc[0] = 1
        elif why == "in use outside":
            other.processes[0], other.used_mib[0] = [PROCESS], USED_MIB
        if why != "cordoned":
            await post(running, "root", "/nodes/rig2/undrain")

        if why == "quarantined":
            ended = await ask(running, "ben", server="two")
            await run_notebook(running, ended)
            other.is_reachable = False
            await delete(running, "ben", f"/leases/{ended['id']}")
            await running.core.ledger.change(mutations.quarantine({ended["id"]: "node rig2 does not answer"}))

        async def is_seen() -> bool:
            [slot] = running.core.capacity.build_node_capacity("rig2").slots
            return slot.available is (why == "nothing")

        await until(is_seen, "the second GPU is as it should be")
        await ask(running, "ben")
        await scene.be_idle()
        await suspension_controller.SuspensionController(running.core, running.app.state.daemons).update()
        assert len(running.core.ledger.find_leases("suspended")) == suspended


@pytest.mark.parametrize(("why", "suspended"), [("quota", 0), ("own quota", 1), ("reservation", 0)])
async def test_nobody_is_suspended_for_who_could_not_have_the_gpu(scene: Scene, why: str, suspended: int) -> None:
    """A quota or a reservation keeps it from him; what a user holds already may make way for the same user's request."""
    running = scene.running
    owner = "ada" if why == "own quota" else "ben"
    if why == "reservation":
        now = datetime.now(UTC)
        body = {
            "name": "course", "nodes": ["rig1"], "users": ["ada"],
            "starts_at": (now - timedelta(hours=1)).isoformat(), "ends_at": (now + timedelta(hours=9)).isoformat(),
        }  # fmt: skip
        await post(running, "root", "/reservations", body, 201)
    else:
        async with running.client("root") as root:
            assert (await root.put(f"/api/v1/limits/{owner}", json={"max_gpus": 1})).status_code == 200
    if why == "quota":
        await run_notebook(running, await ask(running, "ben", profile="rtx5070"))
    waiting = await ask(running, owner, server="two")
    await scene.be_idle()
    await suspension_controller.SuspensionController(running.core, running.app.state.daemons).update()
    assert len(running.core.ledger.find_leases("suspended")) == suspended
    await wait_for_state(running, f"/leases/{waiting['id']}", "granted" if suspended else "requested")


@pytest.mark.parametrize(("memory", "suspended"), [("24G", 1), ("48G", 0), (None, 0)])
async def test_nobody_is_suspended_where_there_is_no_room_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str | None, suspended: int
) -> None:
    """A suspended notebook keeps its CPU and memory, and host memory for its GPU's: of 64 GiB, or all of the node's."""
    hasten(monkeypatch)
    profile = ProfileSettings.model_validate(
        {"name": "rtx5090", "title": "RTX 5090", "gpu_model": "RTX 5090", "memory": memory}
    )
    cluster = with_suspension().model_copy(update={"profiles": (profile,)})
    setting = Setting(tmp_path, cluster=cluster)
    setting.clock = AheadClock()
    setting.nodes["rig1"].size = (8, 64 * 1024**3)
    async with asgi_broker(setting) as running:
        scene = Scene(running)
        await scene.start()
        await scene.be_idle()
        ben = await ask(running, "ben")
        await suspension_controller.SuspensionController(running.core, running.app.state.daemons).update()
        assert len(running.core.ledger.find_leases("suspended")) == suspended
        state = "granted" if suspended else "requested"
        await wait_for_state(running, f"/leases/{ben['id']}", state)


async def test_an_owner_suspends_and_resumes_by_hand(scene: Scene) -> None:
    """Without anybody waiting; the GPU is free then, and comes back at once."""
    await scene.report(0)
    assert (await read(scene.running, "ada", scene.path))["may_suspend"] is True
    await post(scene.running, "ada", f"{scene.path}/suspend")
    await scene.wait_for("suspended")
    assert (await read(scene.running, "ada", "/usage"))[0]["gpus"] == 0
    # Again, and for a notebook that is busy.
    await post(scene.running, "ada", f"{scene.path}/suspend")
    await post(scene.running, "ada", f"{scene.path}/resume")
    await scene.wait_for(None)
    await scene.report(is_busy=True)
    refused = await post(scene.running, "ada", f"{scene.path}/suspend", status=409)
    assert "a cell or a job of it runs" in refused["detail"]


async def test_without_the_setting_nobody_can_suspend(scene: Scene) -> None:
    """The owner of the machines decides, by profile."""
    lease = await ask(scene.running, "ada", profile="rtx5070", server="two")
    await run_notebook(scene.running, lease)
    refused = await post(scene.running, "ada", f"/leases/{lease['id']}/suspend", status=409)
    assert "idle.suspend_after" in refused["detail"]


async def test_a_refusal_changes_nothing_and_is_not_repeated(scene: Scene) -> None:
    """The notebook keeps its GPU, its memory limit is as before, and only after its next use it is tried again."""
    scene.node.suspender_outcomes["suspend"] = "refused"
    await scene.be_idle()
    await ask(scene.running, "ben")
    await until(lambda: _has(scene, "lease.not-suspended"), "the refusal is reported")
    assert (await read(scene.running, "ada", scene.path))["suspension"] is None
    await until(lambda: _has_limit(scene, 16384), "the limit is as before")
    await scene.be_idle()
    await suspension_controller.SuspensionController(scene.running.core, scene.running.app.state.daemons).update()
    assert len(scene.node.suspender_commands) == 1
    await scene.report(is_busy=True)
    del scene.node.suspender_outcomes["suspend"]
    await scene.be_idle()
    await scene.wait_for("suspended")


async def _has(scene: Scene, kind: str) -> bool:
    return bool(await scene.events(kind))


async def _has_limit(scene: Scene, mib: int) -> bool:
    return bool(scene.node.containers[scene.container]["Limits"]["mem_limit"] == mib * 1024**2)


async def test_nothing_is_restored_onto_a_gpu_in_use(scene: Scene) -> None:
    """The script says so, and is asked again until the GPU is empty."""
    await post_suspended(scene)
    scene.node.suspender_outcomes["resume"] = "busy"
    await post(scene.running, "ada", f"{scene.path}/resume")
    await scene.wait_for("restoring")

    async def is_repeated() -> bool:
        return len(scene.node.suspender_commands) > 3

    await until(is_repeated, "it is asked again")
    del scene.node.suspender_outcomes["resume"]
    await scene.wait_for(None)


async def test_memory_that_is_lost_ends_the_notebook_with_the_reason(scene: Scene) -> None:
    """The GPU is free after the proof that the container is gone."""
    await post_suspended(scene)
    scene.node.suspender_outcomes["resume"] = "failed"
    await post(scene.running, "ada", f"{scene.path}/resume")
    ended = await wait_for_state(scene.running, scene.path, "released")
    assert ended["reason"] == "it was suspended and cannot continue: resume was failed. Its files are kept"
    assert scene.container not in scene.node.containers


async def test_a_suspended_notebook_that_is_stopped_frees_its_container(scene: Scene) -> None:
    """Its lease holds no GPU any more, and still ends by proof alone."""
    await post_suspended(scene)
    ben = await ask(scene.running, "ben")
    await wait_for_state(scene.running, f"/leases/{ben['id']}", "granted")
    scene.node.is_reachable = False
    await delete(scene.running, "ada", scene.path)
    assert (await read(scene.running, "ada", scene.path))["state"] == "releasing"
    scene.node.is_reachable = True
    await wait_for_state(scene.running, scene.path, "released")
    assert scene.container not in scene.node.containers
    assert (await read(scene.running, "ben", f"/leases/{ben['id']}"))["state"] == "granted"


@pytest.mark.parametrize("stage", ["suspending", "suspended", "resuming", "restoring"])
async def test_a_restart_of_the_broker_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Every state is stored before the node is called, and every call may be repeated."""
    hasten(monkeypatch)
    setting = Setting(tmp_path, cluster=with_suspension())
    setting.clock = AheadClock()
    async with asgi_broker(setting) as running:
        scene = Scene(running)
        await scene.start()
        await scene.report(0)
        if stage == "suspending":
            scene.node.on_call = _refuse_suspender
        await post(running, "ada", f"{scene.path}/suspend")
        await scene.wait_for("suspending" if stage == "suspending" else "suspended")
        if stage == "resuming":
            ben = await ask(running, "ben")
            await wait_for_state(running, f"/leases/{ben['id']}", "granted")
        if stage == "restoring":
            scene.node.suspender_outcomes["resume"] = "busy"
        if stage in ("resuming", "restoring"):
            await post(running, "ada", f"{scene.path}/resume")
            await scene.wait_for(stage)
    scene.node.on_call = lambda _method: None
    scene.node.suspender_outcomes.clear()
    async with asgi_broker(setting) as running:
        after = Scene(running)
        after.lease, after.container = scene.lease, scene.container
        if stage in ("suspending", "suspended"):
            await after.wait_for("suspended")
            await after.report(is_busy=True)
        if stage == "resuming":
            await after.wait_for("resuming")
            await delete(running, "root", f"/leases/{ben['id']}")
        await after.wait_for(None)
        lease = running.core.ledger.snapshot.leases[scene.lease["id"]]
        assert lease.state in lease_states.LIVE
        assert [gpu.uuid for gpu in lease.held] == ["GPU-rig1-0"]


def _refuse_suspender(method: str) -> None:
    if method == "update_container":
        from gpuhub.common.errors import NodeUnreachable

        raise NodeUnreachable("node rig1: its Docker daemon cannot be reached")


@pytest.mark.parametrize("scene", [with_suspension(stop_after="4h")], indirect=True)
async def test_a_forgotten_suspended_notebook_is_warned_and_stopped(scene: Scene) -> None:
    """As one that holds its GPU: its memory is the node's. Its owner's wish to continue begins the warning again."""
    clock = scene.running.setting.clock
    assert isinstance(clock, AheadClock)
    await post_suspended(scene)
    assert (await scene.report(3 * HOUR))["idle"]["is_warned"] is False
    await scene.report(4 * HOUR)
    await until(lambda: _has(scene, "lease.idle"), "its owner is warned")
    clock.ahead_s += 590
    scene.node.suspender_outcomes["resume"] = "busy"
    await post(scene.running, "ada", f"{scene.path}/resume")
    await scene.wait_for("restoring")
    clock.ahead_s += 20
    await scene.report(4.1 * HOUR)
    assert not await _ask_culler(scene)
    del scene.node.suspender_outcomes["resume"]
    await scene.wait_for(None)
    await post_suspended(scene, 4.2 * HOUR)

    async def is_stopped() -> bool:
        clock.ahead_s += 60
        await scene.report(4.2 * HOUR)
        return await _ask_culler(scene)

    await until(is_stopped, "it is stopped")
    [event] = await scene.events("lease.reclaimed")
    assert event == "ada's notebook (RTX 5090 on rig1): stopped after 4 h 12 min without activity; files are kept"
    await until(lambda: scene.running.setting.hub.stopped == [("ada", "")], "the broker has it stopped as well")


async def _ask_culler(scene: Scene) -> bool:
    scene.running.setting.hub.models["culler"] = CULLER
    return bool((await post(scene.running, "culler", "/reclaims", {"owner": "ada", "server": ""}))["stop"])


async def test_gpu_time_is_not_charged_while_suspended(scene: Scene) -> None:
    """One record continues after it; fair share counts what was held before and after, also after a restart."""
    clock = scene.running.setting.clock
    assert isinstance(clock, AheadClock)
    clock.ahead_s += 2 * HOUR
    await scene.report(0)
    await post(scene.running, "ada", f"{scene.path}/suspend")
    await scene.wait_for("suspended")
    clock.ahead_s += 5 * HOUR
    await post(scene.running, "ada", f"{scene.path}/resume")
    await scene.wait_for(None)
    clock.ahead_s += HOUR
    await scene.running.core.costs.flush()
    [record] = await scene.running.core.costs.list_recent("ada", 10)
    assert record.used.gpu_hours == pytest.approx(3.0, abs=0.05)
    used = scene.running.core.scheduler.report_usage(clock.now())["ada"]
    assert used.gpu_hours_week == pytest.approx(3.0, abs=0.05)
    stored = scene.running.core.store.load_usage(0.0)
    assert sum((row.ended_at - row.started_at) * row.gpus for row in stored) == pytest.approx(2 * HOUR, abs=120)


async def post_suspended(scene: Scene, inactive_s: float = 0.0) -> None:
    await scene.report(inactive_s)
    await post(scene.running, "ada", f"{scene.path}/suspend")
    await scene.wait_for("suspended")
