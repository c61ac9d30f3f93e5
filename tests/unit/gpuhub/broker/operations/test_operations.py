"""What users and administrators do to leases and nodes that exist: more time, why, force, drain, arrays, parts."""

from __future__ import annotations

from typing import Any

import pytest

from gpuhub.broker.admission import submit
from gpuhub.broker.controllers import deadlines, server_restarter
from gpuhub.broker.controllers.nodes import node_controller
from gpuhub.config.settings import JobSettings, ProfileSettings, SchedulingSettings, UserSettings
from gpuhub.config.users.users import GroupSettings, LimitSettings
from gpuhub.domain import reconcile
from gpuhub.domain.rate_limit import RateLimit
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.docker.simulated_nodes import CLOSET, build_cluster

JOB = {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1}


# -- more time --------------------------------------------------------------------------------------------------------


async def test_lease_is_extended_if_no_request_waits(setting: Setting) -> None:
    """Within the profile's time and what one lease may last; a shorter time can always be had."""
    setting.cluster = build_cluster(
        profiles=[ProfileSettings(name="rtx5090", title="5090", gpu_model="RTX 5090", time_limit="2h")],
        users=UserSettings(allowed=("ada",), longest_lease="3h"),
    )
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", time_limit_s=3600)
        path = f"/leases/{lease['id']}/extend"
        more = await post(running, "ada", path, {"time_limit_s": 7200})
        assert more["expires_at"] > lease["expires_at"]
        refused = await post(running, "ada", path, {"time_limit_s": 7201}, 422)
        assert refused["detail"] == "at most 2 h from now are allowed"
        await post(running, "ben", path, {"time_limit_s": 7200}, 404)
        await ask(running, "ben", key="b")
        refused = await post(running, "ada", path, {"time_limit_s": 7200}, 409)
        assert refused["detail"] == "ben waits for such GPUs"
        assert (await post(running, "ada", path, {"time_limit_s": 60}))["expires_at"] < more["expires_at"]


async def test_extensions_are_limited_in_total(setting: Setting) -> None:
    """All extensions together count from the grant."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada",), longest_lease="1h"))
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        refused = await post(running, "ada", f"/leases/{lease['id']}/extend", {"time_limit_s": 7200}, 422)
        assert refused["detail"].startswith("one lease may last 1 h in all; ")


async def test_requests_for_other_gpus_do_not_block_an_extension(setting: Setting) -> None:
    """Nor is one's own request; a lease without a limit has no time to extend beyond."""
    setting.cluster = build_cluster(jobs=JobSettings(time_limit="1h"))
    async with asgi_broker(setting) as running:
        job = await post(running, "ada", "/jobs", {**JOB, "models": ["RTX 5090"], "time_limit_s": 600}, 201)
        await run_notebook(running, await ask(running, "cleo", profile="rtx5070", key="c"))
        assert (await ask(running, "ben", profile="rtx5070", key="b"))["state"] == "requested"
        assert (await ask(running, "ada", key="a"))["state"] == "requested"
        more = await post(running, "ada", f"/leases/{job['lease']['id']}/extend", {"time_limit_s": 3600})
        assert more["expires_at"] > job["lease"]["expires_at"]
        waiting = await ask(running, "ben", server="second", key="d")
        refused = await post(running, "ben", f"/leases/{waiting['id']}/extend", {"time_limit_s": 60}, 409)
        assert "is requested: only a lease that continues" in refused["detail"]


# -- why --------------------------------------------------------------------------------------------------------------


async def test_pending_reason_of_a_request(setting: Setting) -> None:
    """What for, who holds it, and which of its own demands makes it wait; what does not wait has no why."""
    async with asgi_broker(setting) as running:
        first = await ask(running, "ada", key="1")
        second = await ask(running, "ben", key="2")
        why = await read(running, "ben", f"/leases/{second['id']}/why")
        assert (why["position"], why["expected_start"]) == (1, None)
        assert "held by ada" in why["waits_for"]
        assert why["obstacles"][0]["demand"] == "model RTX 5090"
        assert why["obstacles"][0]["would_start_at"] is not None
        await read(running, "ada", f"/leases/{second['id']}/why", 404)
        refused = await read(running, "ada", f"/leases/{first['id']}/why", 409)
        assert refused["detail"].endswith("is granted: it does not wait")


# -- quarantine and force ---------------------------------------------------------------------------------------------


async def stuck_lease(running: Running) -> Any:
    """A lease that ended while its node did not answer, quarantined."""
    lease = await ask(running, "ada", key="stuck")
    await run_notebook(running, lease)
    running.setting.nodes["rig1"].is_reachable = False
    await until(lambda: not running.core.capacity.inventory.nodes["rig1"].is_up, "rig1 is unreachable", 15)
    await delete(running, "ada", f"/leases/{lease['id']}")
    return await wait_for_state(running, f"/leases/{lease['id']}", "quarantined")


@pytest.fixture
def quick_quarantine(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Quarantine after a second."""
    monkeypatch.setattr(node_controller, "POLL_PERIOD_S", 0.2)
    monkeypatch.setattr(node_controller, "RETRY_POLL_PERIOD_S", 0.1)
    monkeypatch.setattr(deadlines, "CHECK_PERIOD_S", 0.1)
    setting.cluster = build_cluster(scheduling=SchedulingSettings(quarantine_after="1s"))
    return setting


async def test_unproven_lease_blocks_its_gpu_until_proof(quick_quarantine: Setting) -> None:
    """Over a restart as well; the node's own word ends it."""
    async with asgi_broker(quick_quarantine) as running:
        lease = await stuck_lease(running)
        assert "rig1" in lease["note"]
        waiting = await ask(running, "ben", key="b")
        assert waiting["state"] == "requested"
    async with asgi_broker(quick_quarantine, wait=False) as running:
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "quarantined"
        quick_quarantine.nodes["rig1"].is_reachable = True
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "released"
        assert quick_quarantine.nodes["rig1"].of_kind("notebook") == []


async def test_only_administrators_can_force_a_release(quick_quarantine: Setting) -> None:
    """Nobody else may; the lease is over, which is told with the name, and the container still goes."""
    async with asgi_broker(quick_quarantine) as running:
        lease = await stuck_lease(running)
        path = f"/leases/{lease['id']}/force"
        refused = await post(running, "ada", path, status=403)
        assert refused["detail"] == "ada is not an administrator: only administrators may free GPUs without proof"
        freed = await post(running, "root", path)
        assert (freed["state"], freed["note"]) == ("released", "freed without proof by root")
        kinds = [event["kind"] for event in await read(running, "ada", "/events")]
        assert kinds[-2:] == ["lease.forced", "lease.released"]
        waiting = await ask(running, "ben", key="b")
        assert waiting["state"] == "requested"
        quick_quarantine.nodes["rig1"].is_reachable = True
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")
        assert quick_quarantine.nodes["rig1"].of_kind("notebook") == []
        await post(running, "root", f"/leases/{waiting['id']}/force", status=409)


# -- cordon and drain -------------------------------------------------------------------------------------------------


async def test_a_cordoned_node_takes_no_new_work(setting: Setting) -> None:
    """What runs there continues; it is known after a restart; taken away, whoever waits is served."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", key="a")
        await run_notebook(running, lease)
        refused = await post(running, "ada", "/nodes/rig1/cordon", {}, 403)
        assert refused["detail"] == "ada is not an administrator: only administrators may cordon nodes"
        refused = await post(running, "root", "/nodes/rig9/cordon", {}, 404)
        assert refused["detail"] == "there is no node 'rig9'; there are: rig1, rig2, rig3"
        view = await post(running, "root", "/nodes/rig1/cordon", {"reason": "new fans"})
        assert (view["state"], view["leases"]) == ("cordoned", 1)
        assert "cordoned by root: new fans" in view["message"]
        await delete(running, "ada", f"/leases/{lease['id']}")
        await wait_for_state(running, f"/leases/{lease['id']}", "released")
        waiting = await ask(running, "ben", key="b")
        assert waiting["state"] == "requested"
    async with asgi_broker(setting) as running:
        assert (await read(running, "ben", "/cluster"))["nodes"][0]["state"] == "cordoned"
        assert (await post(running, "root", "/nodes/rig1/undrain"))["state"] == "up"
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")


async def test_a_drained_node_is_empty_after_the_grace(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs end with the reason, and so do notebooks, by the hub first; nothing new comes."""
    monkeypatch.setattr(reconcile, "HUB_GRACE_S", 0.5)
    monkeypatch.setattr(server_restarter, "CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr(deadlines, "CHECK_PERIOD_S", 0.1)
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", key="a")
        await run_notebook(running, lease)
        view = await post(running, "root", "/nodes/rig1/drain", {"reason": "reboot", "grace_s": 1})
        assert view["state"] == "draining"
        short = await read(running, "ada", f"/leases/{lease['id']}")
        assert (short["state"], short["reason"]) == ("active", "node rig1 is draining by root: reboot")
        assert short["expires_at"] is not None
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "released")
        assert setting.hub.stopped == [("ada", "")]
        assert ended["reason"] == "node rig1 is draining by root: reboot"


async def test_uncordon_restores_the_time_limits(setting: Setting) -> None:
    """Its own limit, or none."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", time_limit_s=7200)
        await post(running, "root", "/nodes/rig1/drain", {"grace_s": 600})
        refused = await post(running, "ada", f"/leases/{lease['id']}/extend", {"time_limit_s": 7200}, 409)
        assert "node rig1 is draining by root" in refused["detail"]
        await post(running, "root", "/nodes/rig1/undrain")
        again = await read(running, "ada", f"/leases/{lease['id']}")
        assert (again["expires_at"], again["reason"]) == (lease["expires_at"], None)


# -- keys -------------------------------------------------------------------------------------------------------------


async def test_requests_with_the_same_key_are_idempotent(setting: Setting) -> None:
    """Also when it has ended; another request with the same key is refused, another owner's is not the same."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", key="once")
        await delete(running, "ada", f"/leases/{lease['id']}")
        await wait_for_state(running, f"/leases/{lease['id']}", "released")
        again = await ask(running, "ada", key="once")
        assert (again["id"], again["state"]) == (lease["id"], "released")
        refused = await ask(running, "ada", key="once", profile="rtx5070", status=409)
        assert refused["detail"] == "the key 'once' was used for another request"
        assert (await ask(running, "ben", key="once"))["id"] != lease["id"]
    async with asgi_broker(setting) as running:
        assert (await ask(running, "ada", key="once"))["id"] == lease["id"]


# -- arrays -----------------------------------------------------------------------------------------------------------


async def test_array_creates_many_jobs_from_one_request(setting: Setting) -> None:
    """As many run as there are GPUs; asked for again, they are the same; limits count it as one request."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada",), max_waiting=1, max_jobs=5))
    async with asgi_broker(setting) as running:
        body = {"job": {**JOB, "batch": True}, "count": 5}
        jobs = await post(running, "ada", "/jobs/arrays", body, 201)
        assert [job["run_id"] for job in jobs] == [f"run-000001-{number}" for number in range(5)]
        assert {job["array"] for job in jobs} == {"run-000001"}
        assert [job["state"] for job in jobs] == ["starting"] * 3 + ["waiting"] * 2
        assert [job["id"] for job in await post(running, "ada", "/jobs/arrays", body, 201)] == [
            job["id"] for job in jobs
        ]
        (mine,) = await read(running, "ada", "/usage")
        assert mine["waiting"] == 1
        refused = await post(running, "ada", "/jobs", {**JOB, "run_id": "run-000002"}, 429)
        assert refused["code"] == "too-many-waiting"
        ended = await delete(running, "ada", f"/jobs/{jobs[0]['id']}")
        assert ended["state"] in {"stopping", "ended"}
        await wait_for_state(running, f"/jobs/{jobs[3]['id']}", "running")


async def test_large_arrays_count_by_their_size(setting: Setting) -> None:
    """Each hundred waiting jobs of an array, or part of that, is one waiting request; the refusal says so."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada",), max_waiting=4))
    async with asgi_broker(setting) as running:
        body = {"job": {**JOB, "batch": True}, "count": 253}
        jobs = await post(running, "ada", "/jobs/arrays", body, 201)
        assert (await read(running, "ada", "/usage"))[0]["waiting"] == 3
        more = {"job": {**JOB, "run_id": "run-000002"}, "count": 101}
        refused = await post(running, "ada", "/jobs/arrays", more, 429)
        assert (refused["code"], refused["detail"]) == (
            "too-many-waiting",
            "ada has 3 waiting requests, and an array of 101 jobs counts as 2; the limit is 4. Request fewer jobs, cancel a "
            "request, or wait until one is granted.",
        )
        assert len(await post(running, "ada", "/jobs/arrays", {**more, "count": 100}, 201)) == 100
        # The same array once more is no new request.
        again = await post(running, "ada", "/jobs/arrays", body, 201)
        assert [job["id"] for job in again] == [job["id"] for job in jobs]


async def test_arrays_of_two_members_count_apart(setting: Setting) -> None:
    """Arrays of the same name are two requests of their group."""
    group = GroupSettings(name="lab", members=("ada", "ben"), together=LimitSettings(max_waiting=2))
    setting.cluster = build_cluster(groups=(group,))
    async with asgi_broker(setting) as running:
        for name in ("ada", "ben"):
            await post(running, name, "/jobs/arrays", {"job": JOB, "count": 4}, 201)
        refused = await post(running, "ben", "/jobs", {**JOB, "run_id": "run-000003"}, 429)
        assert refused["detail"].startswith("the group lab has 2 waiting requests; the limit is 2")


async def test_the_number_of_jobs_is_limited_by_default(setting: Setting) -> None:
    """A user without limits in cluster.toml may have 1,000 jobs."""
    async with asgi_broker(setting) as running:
        await post(running, "ada", "/jobs/arrays", {"job": JOB, "count": 1000}, 201)
        refused = await post(running, "ada", "/jobs", {**JOB, "run_id": "run-000002"}, 429)
        assert refused["detail"].startswith("ada has 1000 jobs and requests 1 more; the limit is 1000")


async def test_creations_of_an_owner_are_rate_limited(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job of an array counts, and a notebook, whoever asks for it; what exists and other owners do not."""
    monkeypatch.setattr(submit, "CREATIONS", RateLimit(burst=10, per_second=0.1, what="leases and jobs created"))
    async with asgi_broker(setting) as running, running.client("spawner") as spawner:
        array = {"job": {**JOB, "batch": True}, "count": 9}
        await post(running, "ada", "/jobs/arrays", array, 201)
        await ask(running, "spawner", owner="ada", profile="any", key="1")
        body = {"owner": "ada", "profile": "any", "server": "other", "key": "2"}
        refused = await spawner.post("/api/v1/leases", json=body)
        assert (refused.status_code, refused.json()["code"]) == (429, "too-many-requests")
        assert refused.json()["detail"].startswith(
            "too many leases and jobs created: at most 0.1 per second are allowed"
        )
        assert 5 <= int(refused.headers["Retry-After"]) <= 10
        await post(running, "ada", "/jobs", {**JOB, "run_id": "run-000002"}, 429)
        # What it created stays in reach.
        await ask(running, "spawner", owner="ada", profile="any", key="1")
        await delete(running, "ada", "/jobs/" + (await read(running, "ada", "/jobs"))[0]["id"])
        await ask(running, "spawner", owner="ben", profile="any", key="1")


async def test_check_of_jobs_creates_nothing(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has the same refusals as the request, and leaves no job."""
    monkeypatch.setattr(submit, "CREATIONS", RateLimit(burst=300, per_second=0.001))
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada",), max_jobs=200))
    setting.hub.unknown_users.add("bne")
    async with asgi_broker(setting) as running:
        for _ in range(4):
            assert await post(running, "ada", "/jobs/check", {"job": JOB, "count": 200}, 204) is None
        await post(running, "ada", "/jobs/check", {"job": JOB}, 204)
        assert await read(running, "ada", "/jobs") == []
        wrong = (
            ({"job": {**JOB, "profile": "nosuch"}}, 422, "there is no profile 'nosuch'"),
            ({"job": {**JOB, "detached": True, "after": "run-nosuch"}}, 422, "after: you have no run run-nosuch"),
            ({"job": {**JOB, "detached": True, "port": 80, "port_users": ["bne"]}}, 404, "the hub has no user 'bne'"),
            ({"job": {**JOB, "detached": True, "port": 80}, "count": 2}, 422, "port: the jobs of an array have none"),
            ({"job": JOB, "count": 201}, 429, "ada has 0 jobs and requests 201 more"),
        )
        for body, status, detail in wrong:
            assert (await post(running, "ada", "/jobs/check", body, status))["detail"].startswith(detail)
        await post(running, "ada", "/jobs/arrays", {"job": JOB, "count": 200}, 201)


async def test_refused_arrays_count_little(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """They create nothing, and cost the broker some work each."""
    monkeypatch.setattr(submit, "CREATIONS", RateLimit(burst=300, per_second=0.001))
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada",), max_jobs=10))
    async with asgi_broker(setting) as running:
        for _ in range(4):
            refused = await post(running, "ada", "/jobs/arrays", {"job": JOB, "count": 200}, 429)
            assert refused["code"] == "too-many-jobs"
        await post(running, "ada", "/jobs/arrays", {"job": JOB, "count": 10}, 201)


async def test_array_is_accepted_as_a_whole_or_not_at_all(setting: Setting) -> None:
    """One more than one may have refuses all; so does a job of it for more than one GPU, or a run id too long."""
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada",), max_jobs=3))
    async with asgi_broker(setting) as running:
        refused = await post(running, "ada", "/jobs/arrays", {"job": JOB, "count": 4}, 429)
        assert refused["code"] == "too-many-jobs"
        refused = await post(running, "ada", "/jobs/arrays", {"job": {**JOB, "nnodes": 2}, "count": 2}, 422)
        assert refused["detail"].startswith("job: each job of an array is for one GPU")
        long = {**JOB, "run_id": "r" * 40}
        refused = await post(running, "ada", "/jobs/arrays", {"job": long, "count": 2}, 422)
        assert "is too long for a run id" in refused["detail"]
        assert await read(running, "root", "/jobs") == []


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"gpus": 2, "nnodes": 2}, "gpus: replaces nnodes"),
        ({"gpus": 2, "min_nnodes": 1}, "gpus: a job on any nodes cannot be elastic"),
        ({"nnodes": 1, "min_nnodes": 2}, "min_nnodes: 2 is more than nnodes, 1"),
    ],
)
async def test_contradictory_request_keys_are_refused(setting: Setting, parts: dict[str, Any], text: str) -> None:
    """With the keys that contradict each other."""
    async with asgi_broker(setting) as running:
        refused = await post(running, "ada", "/jobs", {**JOB, **parts}, 422)
        assert refused["detail"].startswith(text)


async def test_spread_request_uses_one_worker_per_node(setting: Setting) -> None:
    """A spread of three takes what there is, one worker a node."""
    async with asgi_broker(setting) as running:
        job = await post(running, "ada", "/jobs", {"run_id": "run-000001", "gpus": 3}, 201)
        ready = await wait_for_state(running, f"/jobs/{job['id']}", "running")
        assert sorted(worker["node"] for worker in ready["workers"]) == ["rig1", "rig2", "rig3"]
        assert (ready["gpus"], len(ready["lease"]["gpus"])) == (3, 3)


# -- parts of a GPU ---------------------------------------------------------------------------------------------------


async def test_gpu_shares_are_granted_to_several_users(setting: Setting) -> None:
    """Each with its cap; the whole GPU is given when the last part is back, and a part again before that."""
    half = ProfileSettings(name="half", title="Half", gpu_model="RTX 5090", gpu_share=2)
    whole = ProfileSettings(name="whole", title="Whole", gpu_model="RTX 5090")
    setting.cluster = build_cluster({"rig1": CLOSET["rig1"]}, profiles=[half, whole])
    async with asgi_broker(setting) as running:
        first = await ask(running, "ada", profile="half", key="1")
        second = await ask(running, "ben", profile="half", key="2")
        assert [(lease["gpus"][0]["share"], lease["gpus"][0]["memory_cap_mib"]) for lease in (first, second)] == [
            (2, 16303)
        ] * 2
        rows = running.core.ledger.snapshot.leases
        assert [rows[lease["id"]].gpus[0].part for lease in (first, second)] == [0, 1]
        await run_notebook(running, first)
        await run_notebook(running, second)
        third = await ask(running, "cleo", profile="half", key="3")
        assert third["state"] == "requested"
        await delete(running, "ada", f"/leases/{first['id']}")
        granted = await wait_for_state(running, f"/leases/{third['id']}", "granted")
        assert running.core.ledger.snapshot.leases[granted["id"]].gpus[0].part == 0
        await run_notebook(running, granted)
        fourth = await ask(running, "dora", profile="whole", key="4")
        for lease, owner in ((second, "ben"), (third, "cleo")):
            assert (await read(running, "dora", f"/leases/{fourth['id']}"))["state"] == "requested"
            await delete(running, owner, f"/leases/{lease['id']}")
        await wait_for_state(running, f"/leases/{fourth['id']}", "granted")
