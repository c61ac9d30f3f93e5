"""What time alone brings about."""

from __future__ import annotations

import asyncio

import pytest

from gpuhub.broker.controllers import deadlines, server_restarter
from gpuhub.broker.state import broker_state, mutations
from gpuhub.config.settings import GroupSettings, JobSettings, ProfileSettings, UserSettings
from gpuhub.domain import reconcile
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Setting, asgi_broker, until
from tests.support.clocks import AheadClock
from tests.support.docker.simulated_nodes import build_cluster


async def test_job_without_heartbeat_ends(setting: Setting) -> None:
    """A notebook that stops reporting loses its workers; one that reports keeps them."""
    setting.cluster = build_cluster(jobs=JobSettings(renew_within="10m"))
    setting.clock = AheadClock()
    async with asgi_broker(setting) as running:
        jobs = [
            await post(running, "ada", "/jobs", {"run_id": f"run-00000{n}", "nnodes": 1, "nproc_per_node": 1}, 201)
            for n in range(2)
        ]
        setting.clock.ahead_s += 400.0
        await post(running, "ada", f"/jobs/{jobs[0]['id']}/renew", status=204)
        setting.clock.ahead_s += 400.0
        await wait_for_state(running, f"/jobs/{jobs[1]['id']}", "ended")
        assert (await read(running, "ada", f"/jobs/{jobs[1]['id']}"))["reason"] == "the notebook stopped reporting"
        assert (await read(running, "ada", f"/jobs/{jobs[0]['id']}"))["state"] == "running"
        assert (await read(running, "ada", f"/jobs/{jobs[0]['id']}"))["renew_within_s"] == 600.0
        refused = await post(running, "ada", f"/jobs/{jobs[1]['id']}/renew", status=409)
        assert "has ended: the notebook stopped reporting" in refused["detail"]


async def test_an_overdue_notebook_is_stopped_by_the_hub_first(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is asked to stop it; when it does not, the container goes all the same, with the reason."""
    monkeypatch.setattr(server_restarter, "CHECK_PERIOD_S", 0.05)
    setting.cluster = build_cluster(profiles=[ProfileSettings(name="short", title="Short", time_limit="1s")])
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", profile="short")
        assert lease["expires_at"] is not None
        await run_notebook(running, lease)
        await until(lambda: setting.hub.stopped == [("ada", "")], "the hub is asked to stop it")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"
        monkeypatch.setattr(reconcile, "HUB_GRACE_S", 1.0)
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "released")
        assert ended["reason"] == "its time limit of 1 s was reached"


async def test_an_overdue_job_ends(setting: Setting) -> None:
    """A job's time limit counts from its grant."""
    setting.cluster = build_cluster(jobs=JobSettings(time_limit="1s"))
    async with asgi_broker(setting) as running:
        job = await post(running, "ada", "/jobs", {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1}, 201)
        ended = await wait_for_state(running, f"/jobs/{job['id']}", "ended")
        assert ended["reason"] == "its time limit of 1 s was reached"


async def test_request_ends_at_the_queue_limit(setting: Setting) -> None:
    """After the queue limit it ends, and says so; as does one whose profile is no longer offered, or for others."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada",), queue_limit="1s"))
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        waiting = await ask(running, "ben")
        ended = await wait_for_state(running, f"/leases/{waiting['id']}", "released")
        assert ended["reason"] == "it waited longer than 1 s"
    setting.cluster = build_cluster()
    async with asgi_broker(setting) as running:
        waiting = await ask(running, "ben", key="again")
        assert waiting["state"] == "requested"
        other = await ask(running, "cyd", key="third")
    only = ProfileSettings(name="rtx5090", title="5090", gpu_model="RTX 5090", groups=("vision",))
    members = (GroupSettings(name="vision", members=("ben",)),)
    setting.cluster = build_cluster(profiles=[only], groups=members)
    async with asgi_broker(setting) as running:
        ended = await wait_for_state(running, f"/leases/{other['id']}", "released")
        assert ended["reason"] == "profile 'rtx5090' is only for members of vision, and cyd is not one"
        assert (await read(running, "ben", f"/leases/{waiting['id']}"))["state"] == "requested"
    setting.cluster = build_cluster(profiles=[ProfileSettings(name="other", title="Other")])
    async with asgi_broker(setting) as running:
        ended = await wait_for_state(running, f"/leases/{waiting['id']}", "released")
        assert ended["reason"] == "the profile 'rtx5090' is no longer offered"


async def test_number_of_waiting_requests_is_limited(setting: Setting) -> None:
    """The request beyond the limit is refused with 429, the limit, and when to come back."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada",), max_waiting=1))
    async with asgi_broker(setting) as running:
        await ask(running, "ada")
        await ask(running, "ben", server="a", key="a")
        refused = await ask(running, "ben", server="b", key="b", status=429)
        assert refused["detail"].startswith("ben has 1 waiting requests; the limit is 1.")


async def test_a_notebook_and_its_job_count_together(setting: Setting) -> None:
    """A job that could never run beside its own notebook, by the owner's limit, is refused at once."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada",), max_gpus=2))
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        body = {"run_id": "run-000001", "nnodes": 2, "nproc_per_node": 1}
        refused = await post(running, "ada", "/jobs", body, 422)
        assert refused["detail"] == "2 GPUs were requested in addition to the notebook's 1; one user may hold at most 2"
        job = await post(running, "ada", "/jobs", {**body, "nnodes": 1}, 201)
        assert job["state"] == "starting"


@pytest.fixture
def short_check_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is looked at often."""
    monkeypatch.setattr(broker_state, "HOUSEKEEPING_S", 0.05)
    monkeypatch.setattr(deadlines, "CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr(reconcile, "HUB_GRACE_S", 0.1)
    monkeypatch.setattr(server_restarter, "CHECK_PERIOD_S", 0.05)


@pytest.mark.usefixtures("short_check_period")
@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
async def test_clock_jump_ends_no_lease(setting: Setting, jump_s: float) -> None:
    """A lease keeps the time it had left, told by the new clock; the jump is told; what waits keeps its place."""
    setting.clock = AheadClock()
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", key="1", time_limit_s=3600)
        container = await run_notebook(running, lease)
        queue = [(await ask(running, owner, key=owner))["id"] for owner in ("ben", "cleo")]
        before = running.core.ledger.snapshot.leases[lease["id"]]
        setting.clock.jump_s = jump_s
        await until(lambda: not running.core.clock.measure_jump(), "the clock is followed")
        after = running.core.ledger.snapshot.leases[lease["id"]]
        assert after.expires_at == pytest.approx((before.expires_at or 0) + jump_s, abs=1)
        assert after.expires_at - running.core.clock.now() == pytest.approx(3600, abs=60)
        (event,) = [one for one in await read(running, "root", "/events") if one["kind"] == "clock.jumped"]
        assert event["text"] == f"the head node's clock was set by {jump_s:+.0f} s: leases keep the time they had left"
        assert setting.hub.stopped == []
        setting.nodes["rig1"].end_container(container)
        await wait_for_state(running, f"/leases/{queue[0]}", "granted")
        assert (await read(running, "cleo", f"/leases/{queue[1]}"))["position"] == 1


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
async def test_a_change_stored_together_with_a_jump_has_the_new_time(setting: Setting, jump_s: float) -> None:
    """A lease that ends in the same transaction ends now, and its GPU is proven free at once."""
    setting.clock = AheadClock()
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", key="1", time_limit_s=3600)
        setting.clock.jump_s = jump_s
        end = running.core.ledger.change(mutations.end_leases({lease["id"]: "it is over"}))
        await asyncio.gather(running.core.apply_clock_jump(), end)
        row = running.core.ledger.snapshot.leases[lease["id"]]
        assert row.since == pytest.approx(running.core.clock.now(), abs=60)
        await wait_for_state(running, f"/leases/{lease['id']}", "released")


async def test_list_taken_during_a_clock_jump_is_not_proof(setting: Setting) -> None:
    """Whether a lease began to end before such a list cannot be told: its GPU waits for the next one."""
    setting.clock = AheadClock()
    lists = 0

    def set_clock(method: str) -> None:
        nonlocal lists
        if method == "containers":
            lists += 1
            setting.clock.apply_jump(0.0)

    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", key="1")
        await run_notebook(running, lease)
        setting.nodes["rig1"].on_call = set_clock
        await delete(running, "ada", f"/leases/{lease['id']}")
        await until(lambda: not setting.nodes["rig1"].of_kind("notebook"), "its container is removed")
        lists = 0
        await until(lambda: lists >= 2, "the node is looked at again")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "releasing"
        setting.nodes["rig1"].on_call = lambda method: None
        await wait_for_state(running, f"/leases/{lease['id']}", "released")


async def test_clock_set_forward_between_runs_ends_leases(setting: Setting) -> None:
    """What was to end by it ends; its GPU is given again on proof alone."""
    setting.clock = AheadClock()
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", key="1", time_limit_s=3600)
        await run_notebook(running, lease)
    setting.clock = AheadClock()
    setting.clock.jump_s = 7200.0
    setting.clock.apply_jump(7200.0)
    async with asgi_broker(setting) as running:
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "released")
        assert ended["reason"] == "its time limit of 1 h was reached"
        assert setting.nodes["rig1"].of_kind("notebook") == []
        assert (await ask(running, "ben", key="b"))["state"] == "granted"


async def test_clock_set_back_between_runs_does_not_delay_releases(setting: Setting) -> None:
    """What began in what is now the future is proven gone at once, and keeps the time it had left."""
    setting.clock = AheadClock()
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", key="1", time_limit_s=3600)
        container = await run_notebook(running, lease)
        waiting = await ask(running, "ben", key="b")
    setting.clock = AheadClock()
    setting.clock.jump_s = -7200.0
    setting.clock.apply_jump(-7200.0)
    async with asgi_broker(setting) as running:
        now = running.core.clock.now()
        row = running.core.ledger.snapshot.leases[lease["id"]]
        assert row.since <= now
        assert (row.expires_at or 0) - now == pytest.approx(3600, abs=60)
        setting.nodes["rig1"].end_container(container)
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")


async def test_batch_job_needs_no_heartbeat(setting: Setting) -> None:
    """Nobody watches it, neither while it waits nor while it runs."""
    setting.cluster = build_cluster(jobs=JobSettings(renew_within="4s"))
    async with asgi_broker(setting) as running:
        body = {"nnodes": 3, "nproc_per_node": 1}
        batch = [
            await post(running, "ada", "/jobs", {"run_id": f"run-00000{n}", **body, "batch": True}, 201) for n in (1, 2)
        ]
        watched = await post(running, "ada", "/jobs", {"run_id": "run-000003", **body}, 201)
        await wait_for_state(running, f"/jobs/{watched['id']}", "ended")
        states = [(await read(running, "ada", f"/jobs/{job['id']}"))["state"] for job in batch]
        assert states == ["running", "waiting"]


async def test_overdue_notebook_is_released_without_node_and_hub(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over, its node does not answer: it is releasing, and its GPU stays blocked."""
    monkeypatch.setattr(reconcile, "HUB_GRACE_S", 0.2)
    setting.cluster = build_cluster(profiles=[ProfileSettings(name="short", title="Short", time_limit="1s")])
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", profile="short", key="1")
        await run_notebook(running, lease)
        setting.nodes[lease["nodes"][0]].is_reachable = False
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "releasing")
        assert ended["reason"] == "its time limit of 1 s was reached"
        assert [gpu.uuid for gpu in running.core.ledger.snapshot.leases[lease["id"]].held] == [lease["gpus"][0]["uuid"]]
