"""Restarts: the broker over its own store, and requests that a restart of the hub left behind."""

from __future__ import annotations

import pytest

from gpuhub.broker.controllers import server_restarter
from tests.support.broker.calls import ask, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Setting, asgi_broker, until
from tests.support.docker.simulated_nodes import CLOSET, build_cluster


async def test_waiting_request_keeps_its_position_after_a_restart(setting: Setting) -> None:
    """After a restart the queue is as it was, the running notebook untouched, and the next grant in order."""
    async with asgi_broker(setting) as running:
        first = await ask(running, "ada")
        container = await run_notebook(running, first)
        queue = [(await ask(running, user))["id"] for user in ("ben", "cleo", "dora")]
    async with asgi_broker(setting) as running:
        view = await read(running, "ben", "/cluster")
        assert [entry["lease"] for entry in view["queue"]] == queue
        assert (await ask(running, "spawner", owner="cleo"))["id"] == queue[1]
        assert container in setting.nodes["rig1"].containers
        assert (await read(running, "ada", f"/leases/{first['id']}"))["state"] == "active"
        setting.nodes["rig1"].end_container(container)
        await wait_for_state(running, f"/leases/{queue[0]}", "granted")
        assert (await read(running, "cleo", f"/leases/{queue[1]}"))["position"] == 1


async def test_nothing_is_granted_before_a_node_is_probed(setting: Setting) -> None:
    """What a node's GPUs were in an earlier run is known, and no reason to give them."""
    async with asgi_broker(setting) as running:
        await ask(running, "ada")
    for node in setting.nodes.values():
        node.is_reachable = False
    async with asgi_broker(setting, wait=False) as running:
        lease = await ask(running, "ben", profile="rtx5070", key="first")
        assert lease["state"] == "requested"
        assert "currently not available: rig2" in lease["waiting_for"]
        await ask(running, "ben", profile="any", server="second", key="second")
        setting.nodes["rig2"].is_reachable = True
        await wait_for_state(running, f"/leases/{lease['id']}", "granted")


async def test_running_job_survives_a_broker_restart(setting: Setting) -> None:
    """A running job continues over a restart, and its end frees everything."""
    async with asgi_broker(setting) as running:
        job = await post(running, "ada", "/jobs", {"run_id": "run-000001", "nnodes": 3, "nproc_per_node": 1}, 201)
        await wait_for_state(running, f"/jobs/{job['id']}", "running")
    async with asgi_broker(setting) as running:
        assert (await read(running, "ada", f"/jobs/{job['id']}"))["state"] == "running"
        assert running.workers.specs == []
        async with running.client("ada") as client:
            await client.delete(f"/api/v1/jobs/{job['id']}")
        await wait_for_state(running, f"/jobs/{job['id']}", "ended")
    assert [len(node.of_kind("worker")) for node in setting.nodes.values()] == [0, 0, 0]


async def test_leases_of_a_node_removed_from_the_settings_end(setting: Setting) -> None:
    """Its lease ends with the reason; when the node returns, what still runs there goes before it gets work, and it does
    get work: that it was cordoned is over.
    """
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        container = await run_notebook(running, lease)
        await post(running, "root", "/nodes/rig1/cordon", {"reason": "it is being taken out"})
    whole = setting.cluster
    setting.cluster = build_cluster({name: CLOSET[name] for name in ("rig2", "rig3")})
    async with asgi_broker(setting) as running:
        ended = await read(running, "ada", f"/leases/{lease['id']}")
        assert (ended["state"], ended["reason"]) == ("released", "node rig1 is no longer in cluster.toml")
    setting.cluster = whole
    async with asgi_broker(setting, wait=False) as running:
        again = await ask(running, "ben")
        await wait_for_state(running, f"/leases/{again['id']}", "granted")
        assert container not in setting.nodes["rig1"].containers


async def test_jobs_of_a_node_removed_from_the_settings_may_start_again(setting: Setting) -> None:
    """With `--retry` a job waits for another node, as after a failure; without it, it ends with the reason."""
    async with asgi_broker(setting) as running:
        for run_id, models, retries in (("run-000001", ["RTX 5090"], 0), ("run-000002", ["RTX 5070", "RTX 5060"], 1)):
            body = {"run_id": run_id, "detached": True, "models": models, "max_retries": retries}
            job = await post(running, "ada", "/jobs", body, 201)
            await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
    setting.cluster = build_cluster({"rig3": CLOSET["rig3"]})
    async with asgi_broker(setting) as running:
        ended, again = sorted(await read(running, "ada", "/jobs", ended=True), key=lambda view: view["run_id"])
        assert (ended["state"], ended["reason"]) == ("ended", "node rig1 is no longer in cluster.toml")
        view = await wait_for_state(running, f"/jobs/{again['id']}", "running", "ada")
        assert (view["retries"], view["lease"]["nodes"]) == (1, ["rig3"])


async def test_versions_increase_across_a_restart(setting: Setting) -> None:
    """Who long-polls with a version from before gets an answer at once."""
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        before = await ask(running, "ben")
    async with asgi_broker(setting) as running:
        after = await read(running, "ben", f"/leases/{before['id']}")
        assert after["version"] > before["version"]
        assert after["position"] == 1


async def test_forgotten_server_is_restarted_through_the_hub(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting request that no spawner asks for gets one again; so does one that is granted meanwhile."""
    monkeypatch.setattr(server_restarter, "CHECK_PERIOD_S", 0.05)
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        monkeypatch.setattr(server_restarter, "POLL_TIMEOUT_S", 0.3)
        await ask(running, "spawner", owner="ben", server="work")
        await until(lambda: ("ben", "work", "rtx5090") in setting.hub.started, "the hub is asked for ben's server")
        assert ("ada", "", "rtx5090") not in setting.hub.started
        setting.hub.unknown_users.add("ben")
        await until(lambda: len(running.core.ledger.snapshot.leases) == 1, "the request of an unknown user ends")


async def test_forgotten_server_has_the_options_that_were_chosen(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub would replace the image by that of the profile, and keep this as the user's choice."""
    monkeypatch.setattr(server_restarter, "CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr(server_restarter, "POLL_TIMEOUT_S", 0.3)
    async with asgi_broker(setting) as running:
        await ask(running, "spawner", owner="ben", image="lab/other:1", suspendable=False)
        await until(lambda: ("ben", "", "rtx5090") in setting.hub.started, "the hub is asked for ben's server")
        chosen = {"profile": "rtx5090", "image": "lab/other:1", "suspend": "no"}
        assert setting.hub.options["ben", ""] == chosen


async def test_server_with_a_polling_spawner_is_not_restarted(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a long poll of the spawner is open, the hub is not asked."""
    monkeypatch.setattr(server_restarter, "POLL_TIMEOUT_S", 3.0)
    monkeypatch.setattr(server_restarter, "CHECK_PERIOD_S", 0.05)
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        lease = await ask(running, "spawner", owner="ben")
        for _ in range(4):
            lease = await read(running, "spawner", f"/leases/{lease['id']}", wait_s=1.0, version=lease["version"])
        assert setting.hub.started == []
