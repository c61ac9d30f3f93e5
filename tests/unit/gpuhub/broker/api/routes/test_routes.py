"""The broker's API as its clients use it, on simulated nodes."""

from __future__ import annotations

import asyncio

from gpuhub.common import names
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import API, Setting, asgi_broker, until


async def test_a_free_gpu_is_granted_at_once(setting: Setting) -> None:
    """A request for a free card comes back granted, with its node and GPU."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
    assert lease["state"] == "granted"
    assert lease["nodes"] == ["rig1"]
    assert [gpu["uuid"] for gpu in lease["gpus"]] == ["GPU-rig1-0"]
    assert lease["gpus"][0]["model"] == "RTX 5090"


async def test_held_gpu_is_granted_to_the_next_request(setting: Setting) -> None:
    """The second user waits at place 1, is told who holds the card, and gets it when the first stops."""
    async with asgi_broker(setting) as running:
        first = await ask(running, "ada")
        await run_notebook(running, first)
        second = await ask(running, "ben")
        assert (second["state"], second["position"]) == ("requested", 1)
        assert second["waiting_for"].startswith("1 × RTX 5090")
        assert "held by ada" in second["waiting_for"]
        polling = asyncio.ensure_future(
            read(running, "ben", f"/leases/{second['id']}", wait_s=20, version=second["version"])
        )
        ended = await delete(running, "ada", f"/leases/{first['id']}")
        assert ended["state"] == "releasing"
        polled = await polling
        assert polled["state"] == "granted"
        assert [gpu["uuid"] for gpu in polled["gpus"]] == ["GPU-rig1-0"]
        assert setting.nodes["rig1"].of_kind("notebook") == []
        assert (await read(running, "ada", f"/leases/{first['id']}"))["state"] == "released"


async def test_request_and_release_can_wait_for_their_result(setting: Setting) -> None:
    """With `wait_s`, one request brings the grant, and one the proof that the GPU is free; other states wait."""
    async with asgi_broker(setting) as running, running.client("ada") as ada, running.client("ben") as ben:
        body = {"profile": "rtx5090", "key": "k1"}
        first = (await ada.post("/api/v1/leases", params={"wait_s": 20}, json=body)).json()
        assert first["state"] == "granted"
        unserved = (await ben.post("/api/v1/leases", params={"wait_s": 0.05}, json=body)).json()
        assert unserved["state"] == "requested"
        waiting = asyncio.ensure_future(ben.post("/api/v1/leases", params={"wait_s": 20}, json=body))
        ended = (await ada.delete(f"/api/v1/leases/{first['id']}", params={"wait_s": 20})).json()
        assert ended["state"] == "released"
        second = (await waiting).json()
        assert (second["id"], second["state"]) == (unserved["id"], "granted")
        assert second["gpus"] == first["gpus"]
        refused = await ada.post("/api/v1/leases", params={"wait_s": 31}, json=body)
        assert refused.status_code == 422


async def test_the_same_request_gives_the_same_lease(setting: Setting) -> None:
    """Asking again for the same server, with whatever key, neither takes a second GPU nor a second place."""
    async with asgi_broker(setting) as running:
        first = await ask(running, "spawner", owner="ada")
        again = await ask(running, "spawner", owner="ada", key="other")
        assert again["id"] == first["id"]
        assert len(await read(running, "root", "/leases")) == 1


async def test_another_profile_replaces_a_request_that_waits(setting: Setting) -> None:
    """Who chooses another profile while waiting leaves the old place; a running server is refused instead."""
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        waiting = await ask(running, "ben")
        other = await ask(running, "ben", profile="rtx5070")
        assert other["state"] == "granted"
        assert (await read(running, "ben", f"/leases/{waiting['id']}"))["state"] == "released"
        refused = await ask(running, "ada", profile="rtx5070", status=409)
        assert "runs with profile 'rtx5090'" in refused["detail"]


async def test_a_notebook_that_ends_frees_its_gpu(setting: Setting) -> None:
    """The container's end alone is enough: it is removed, and the lease is released with the reason."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        container = await run_notebook(running, lease)
        setting.nodes["rig1"].end_container(container)
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "released")
        assert ended["reason"] == "its container ended"
        assert setting.nodes["rig1"].of_kind("notebook") == []


async def test_an_unreachable_node_keeps_its_leases(setting: Setting) -> None:
    """Nothing is given again while a node does not answer, even after its user stopped."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        setting.nodes["rig1"].is_reachable = False
        await until(lambda: not running.core.capacity.inventory.nodes["rig1"].is_up, "rig1 is unreachable", 15)
        await delete(running, "ada", f"/leases/{lease['id']}")
        waiting = await ask(running, "ben")
        assert waiting["state"] == "requested"
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "releasing"
        view = await read(running, "ben", "/cluster")
        assert view["nodes"][0]["state"] == "unreachable"
        assert view["nodes"][0]["gpus"][0]["state"] == "unavailable"
        setting.nodes["rig1"].is_reachable = True
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")
        assert setting.nodes["rig1"].of_kind("notebook") == []


async def test_foreign_container_is_removed_before_the_node_takes_work(setting: Setting) -> None:
    """A container whose lease nobody knows may hold a GPU: the node gets work once it is gone."""
    node = setting.nodes["rig1"]
    node.run_container({names.LABEL_KIND: names.KIND_NOTEBOOK, names.LABEL_LEASE: "lost", names.LABEL_EPOCH: "1"})
    states: list[int] = []
    async with asgi_broker(setting, wait=False) as running:
        asked = await ask(running, "ada")
        await wait_for_state(running, f"/leases/{asked['id']}", "granted")
        states.append(len(node.of_kind("notebook")))
    assert states == [0]


async def test_a_job_runs_on_distinct_nodes_and_ends(setting: Setting) -> None:
    """A gang of two beside a notebook starts on the two other nodes, and is gone after its stop."""
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        body = {"run_id": "run-000001", "nnodes": 2, "nproc_per_node": 1, "exclude_nodes": ["rig1"]}
        job = await post(running, "ada", "/jobs", body, 201)
        ready = await wait_for_state(running, f"/jobs/{job['id']}", "running")
        assert sorted(worker["node"] for worker in ready["workers"]) == ["rig2", "rig3"]
        assert all(len(worker["gpus"]) == 1 for worker in ready["workers"])
        assert {spec.image for spec in running.workers.specs} == {"gpuhub/notebook:latest"}
        assert (await post(running, "ada", "/jobs", body, 201))["id"] == job["id"]
        await delete(running, "ada", f"/jobs/{job['id']}")
        ended = await wait_for_state(running, f"/jobs/{job['id']}", "ended")
        assert ended["lease"]["state"] == "released"
        assert [len(node.of_kind("worker")) for node in setting.nodes.values()] == [0, 0, 0]


async def test_a_job_ends_with_its_notebook(setting: Setting) -> None:
    """When the notebook that asked stops, its workers go and their GPUs are free."""
    async with asgi_broker(setting) as running:
        notebook = await ask(running, "ada")
        await run_notebook(running, notebook)
        body = {"run_id": "run-000001", "nnodes": 2, "nproc_per_node": 1, "exclude_nodes": ["rig1"]}
        job = await post(running, "ada", "/jobs", body, 201)
        await wait_for_state(running, f"/jobs/{job['id']}", "running")
        await delete(running, "ada", f"/leases/{notebook['id']}")
        ended = await wait_for_state(running, f"/jobs/{job['id']}", "ended")
        assert ended["reason"] == "the notebook that asked for it ended"
        await wait_for_state(running, f"/leases/{notebook['id']}", "released")
        view = await read(running, "ada", "/cluster")
        assert [gpu["state"] for node in view["nodes"] for gpu in node["gpus"]] == ["free"] * 3


async def test_worker_out_of_memory_is_reported(setting: Setting) -> None:
    """The last worker's end ends the job, with what the daemon says of it and the limit."""
    async with asgi_broker(setting) as running:
        body = {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1}
        job = await post(running, "ada", "/jobs", body, 201)
        ready = await wait_for_state(running, f"/jobs/{job['id']}", "running")
        node = setting.nodes[ready["workers"][0]["node"]]
        node.end_container(node.of_kind("worker")[0]["Id"], code=137, oom=True)
        ended = await wait_for_state(running, f"/jobs/{job['id']}", "ended")
        assert ended["workers"][0]["message"] == "out of memory (limit 16 GiB)"
        assert ended["workers"][0]["exit_code"] == 137
        assert ended["reason"] == f"worker 0 on {node.name}: out of memory (limit 16 GiB)"


async def test_a_worker_that_cannot_start_ends_the_job(setting: Setting) -> None:
    """One worker's failure frees the whole gang, and the reason names worker, node and failure."""
    async with asgi_broker(setting) as running:
        running.workers.failing["rig3"] = "node rig3: no such image: gpuhub/notebook:latest"
        body = {"run_id": "run-000001", "nnodes": 3, "nproc_per_node": 1}
        job = await post(running, "ada", "/jobs", body, 201)
        ended = await wait_for_state(running, f"/jobs/{job['id']}", "ended")
        assert ended["reason"].endswith("on rig3: node rig3: no such image: gpuhub/notebook:latest")
        assert [len(node.of_kind("worker")) for node in setting.nodes.values()] == [0, 0, 0]


async def test_infeasible_requests_are_refused_with_the_available_resources(setting: Setting) -> None:
    """More nodes than there are, no such model, no such profile: 422 in one line, and nothing is taken."""
    async with asgi_broker(setting) as running:
        for body, text in (
            ({"nnodes": 4, "nproc_per_node": 1}, "4 nodes were requested and the cluster has 3"),
            ({"nnodes": 1, "nproc_per_node": 2}, "2 × any GPU on one node was requested"),
            ({"nnodes": 1, "nproc_per_node": 1, "models": ["RTX 4090"]}, "1 × RTX 4090 on one node was requested"),
            ({"nnodes": 1, "nproc_per_node": 1, "exclude_nodes": ["rig9"]}, "there is no node 'rig9' to exclude"),
            ({"nnodes": 0, "nproc_per_node": 1}, "nnodes: Input should be greater than or equal to 1"),
            ({"nnodes": 1, "nproc_per_node": 1, "privileged": True}, "privileged: Extra inputs are not permitted"),
        ):
            refused = await post(running, "ada", "/jobs", {"run_id": "run-000001", **body}, 422)
            assert refused["detail"].startswith(text), refused
            is_malformed = "Input" in text or "Extra" in text
            assert refused["status"] == 422
            assert refused["code"] == ("malformed-request" if is_malformed else "invalid-request")
        refused = await ask(running, "ada", profile="rtx4090", status=422)
        assert refused["detail"].startswith("there is no profile 'rtx4090'; there are: ")
        assert await read(running, "root", "/leases") == []


async def test_unknown_routes_and_large_bodies_are_problems_too(setting: Setting) -> None:
    """Whatever goes wrong, the answer is a problem document."""
    async with asgi_broker(setting) as running, running.client("ada") as client:
        for answer, status in (
            (await client.get("/api/v1/nothing"), 404),
            (await client.put("/api/v1/leases"), 405),
            (await client.post("/api/v1/leases", content=b"{"), 422),
            (await client.post("/api/v1/leases", content=b"x" * 1_100_000), 413),
            (await client.get("/api/v1/leases/none"), 404),
        ):
            assert answer.status_code == status
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.json()["status"] == status


async def test_openapi_describes_problems(setting: Setting) -> None:
    """The API's description is open, and every protected route documents its problem answers."""
    async with asgi_broker(setting) as running, running.client(None) as client:
        document = (await client.get("/openapi.json")).json()
        health = (await client.get("/health")).json()
        root = await client.get("/")
    assert health == {"status": "ok"}
    assert (root.status_code, root.headers["Location"]) == (307, "/hub/gpus")
    assert "Problem" in document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert not path.startswith(API) or {"401", "403", "503"} <= set(operation["responses"])
