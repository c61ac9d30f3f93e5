"""Jobs whose workers cannot be started because a node does not answer, on simulated nodes."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.broker.calls import post, read, wait_for_state
from tests.support.broker.in_process import Setting, asgi_broker, list_event_texts, until

JOB = {"run_id": "run-000001", "name": "train.py"}
REASON = "node rig3: its Docker daemon does not answer in time"


@pytest.mark.parametrize("detached", [True, False])
async def test_job_of_a_vanished_node_starts_on_another(setting: Setting, detached: bool) -> None:
    """Nothing of it was started, so it does not wait for the node; only the node's GPU does."""
    async with asgi_broker(setting) as running:
        setting.nodes["rig3"].is_reachable = False
        job = await post(running, "ada", "/jobs", {**JOB, "detached": detached}, 201)
        view = await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        assert ([worker["node"] for worker in view["workers"]], view["reason"]) == (["rig2"], None)
        assert (view["retries"], view["preemptions"]) == (0, 0)
        old = await read(running, "ada", f"/leases/{job['lease']['id']}")
        assert (old["state"], old["reason"]) == ("releasing", REASON)
        assert await list_event_texts(running, "lease.releasing") == [f"job lease of ada ends: {REASON}"]


async def test_job_of_which_a_container_may_run_waits_for_proof(setting: Setting) -> None:
    """The other worker has begun, and two of the same number must never run at the same time."""
    async with asgi_broker(setting) as running:
        running.workers.lost_answers = {"rig3"}
        job = await post(running, "ada", "/jobs", {**JOB, "detached": True, "nnodes": 3}, 201)
        await wait_for_state(running, f"/leases/{job['lease']['id']}", "released", "ada")
        view = await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        assert (view["retries"], view["preemptions"], view["reason"]) == (0, 1, None)
        assert view["lease"]["created_at"] == job["lease"]["created_at"]
        assert [len(node.of_kind("worker")) for node in setting.nodes.values()] == [1, 1, 1]
        assert await list_event_texts(running, "lease.releasing") == [f"job lease of ada ends: {REASON}"]


async def test_job_of_an_earlier_broker_waits_for_proof(setting: Setting) -> None:
    """The earlier broker may have started the worker that is not recorded."""
    async with asgi_broker(setting) as running:
        running.workers.held = asyncio.Event()
        job = await post(running, "ada", "/jobs", {**JOB, "detached": True, "models": ["RTX 5060"]}, 201)
        await until(lambda: running.workers.specs, "the start begins")
    async with asgi_broker(setting, wait=False) as running:
        await until(lambda: running.core.capacity.inventory.nodes["rig3"].is_up, "the node answers")
        setting.nodes["rig3"].is_reachable = False
        await wait_for_state(running, f"/jobs/{job['id']}", "preempting", "ada")
        setting.nodes["rig3"].is_reachable = True
        view = await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        assert view["lease"]["id"] != job["lease"]["id"]


async def test_launch_from_a_notebook_fails_when_a_worker_may_run(setting: Setting) -> None:
    """Its user waits for it, and learns which node does not answer."""
    async with asgi_broker(setting) as running:
        running.workers.lost_answers = {"rig3"}
        job = await post(running, "ada", "/jobs", {**JOB, "nnodes": 3}, 201)
        view = await wait_for_state(running, f"/jobs/{job['id']}", "ended", "ada")
        assert view["reason"] == REASON


async def test_job_that_waited_at_a_restart_of_the_broker_waits_again(setting: Setting) -> None:
    """The earlier broker cannot have started anything of it."""
    async with asgi_broker(setting) as running:
        await post(running, "root", "/nodes/rig3/cordon", {"reason": "new fans"}, 200)
        job = await post(running, "ada", "/jobs", {**JOB, "models": ["RTX 5060"]}, 201)
        assert job["state"] == "waiting"
    async with asgi_broker(setting) as running:
        setting.nodes["rig3"].is_reachable = False
        await post(running, "root", "/nodes/rig3/undrain", {}, 200)
        await wait_for_state(running, f"/leases/{job['lease']['id']}", "releasing", "ada")
        view = await read(running, "ada", f"/jobs/{job['id']}")
        assert (view["state"], view["preemptions"]) == ("waiting", 0)
        setting.nodes["rig3"].is_reachable = True
        await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
