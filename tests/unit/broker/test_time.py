"""What time alone brings about."""

from __future__ import annotations

import pytest

from gpuhub.broker import reconcile, reviver
from gpuhub.settings import Jobs, Profile, Users
from tests.support.brokers import Setting, asgi_broker, until
from tests.support.simulated import build_cluster
from tests.unit.broker.test_api import ask, post, reaches, read, run_notebook


async def test_a_job_that_nobody_renews_ends(setting: Setting) -> None:
    """A notebook that stops reporting loses its workers; one that reports keeps them."""
    setting.cluster = build_cluster(jobs=Jobs(renew_within="1s"))
    async with asgi_broker(setting) as running:
        jobs = [
            await post(running, "ada", "/jobs", {"run_id": f"run-00000{n}", "nnodes": 1, "nproc_per_node": 1}, 201)
            for n in range(2)
        ]

        async def one_ended() -> bool:
            await post(running, "ada", f"/jobs/{jobs[0]['id']}/renew", status=204)
            return bool((await read(running, "ada", f"/jobs/{jobs[1]['id']}"))["state"] == "ended")

        await until(one_ended, "the job without renewals ends")
        assert (await read(running, "ada", f"/jobs/{jobs[1]['id']}"))["reason"] == "the notebook stopped reporting"
        assert (await read(running, "ada", f"/jobs/{jobs[0]['id']}"))["state"] == "running"
        assert (await read(running, "ada", f"/jobs/{jobs[0]['id']}"))["renew_within_s"] == 1.0
        refused = await post(running, "ada", f"/jobs/{jobs[1]['id']}/renew", status=409)
        assert "has ended: the notebook stopped reporting" in refused["detail"]


async def test_an_overdue_notebook_is_stopped_by_the_hub_first(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is asked to stop it; when it does not, the container goes all the same, with the reason."""
    monkeypatch.setattr(reconcile, "HUB_GRACE_S", 1.0)
    monkeypatch.setattr(reviver, "PERIOD_S", 0.05)
    setting.cluster = build_cluster(profiles=[Profile(name="short", title="Short", time_limit="1s")])
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", profile="short")
        assert lease["expires_at"] is not None
        await run_notebook(running, lease)
        await until(lambda: setting.hub.stopped == [("ada", "")], "the hub is asked to stop it")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"
        ended = await reaches(running, f"/leases/{lease['id']}", "released")
        assert ended["reason"] == "its time limit of 1 s was reached"


async def test_an_overdue_job_ends(setting: Setting) -> None:
    """A job's time limit counts from its grant."""
    setting.cluster = build_cluster(jobs=Jobs(time_limit="1s"))
    async with asgi_broker(setting) as running:
        job = await post(running, "ada", "/jobs", {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1}, 201)
        ended = await reaches(running, f"/jobs/{job['id']}", "ended")
        assert ended["reason"] == "its time limit of 1 s was reached"


async def test_a_request_does_not_wait_for_ever(setting: Setting) -> None:
    """After the queue limit it ends, and says so; as does one whose profile is no longer offered."""
    setting.cluster = build_cluster(users=Users(allowed=("ada",), queue_limit="1s"))
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        waiting = await ask(running, "ben")
        ended = await reaches(running, f"/leases/{waiting['id']}", "released")
        assert ended["reason"] == "it waited longer than 1 s"
    setting.cluster = build_cluster()
    async with asgi_broker(setting) as running:
        waiting = await ask(running, "ben")
        assert waiting["state"] == "waiting"
    setting.cluster = build_cluster(profiles=[Profile(name="other", title="Other")])
    async with asgi_broker(setting) as running:
        ended = await reaches(running, f"/leases/{waiting['id']}", "released")
        assert ended["reason"] == "the profile 'rtx5090' is no longer offered"


async def test_nobody_has_more_waiting_requests_than_allowed(setting: Setting) -> None:
    """The request beyond the limit is refused with 429, the limit, and when to come back."""
    setting.cluster = build_cluster(users=Users(allowed=("ada",), max_waiting=1))
    async with asgi_broker(setting) as running:
        await ask(running, "ada")
        await ask(running, "ben", server="a")
        refused = await ask(running, "ben", server="b", status=429)
        assert refused["detail"].startswith("ben has 1 waiting requests, and 1 is the most one may have")


async def test_a_notebook_and_its_job_count_together(setting: Setting) -> None:
    """A job that could never run beside its own notebook, by the owner's limit, is refused at once."""
    setting.cluster = build_cluster(users=Users(allowed=("ada",), max_gpus=2))
    async with asgi_broker(setting) as running:
        await run_notebook(running, await ask(running, "ada"))
        body = {"run_id": "run-000001", "nnodes": 2, "nproc_per_node": 1}
        refused = await post(running, "ada", "/jobs", body, 422)
        assert refused["detail"] == "2 GPUs were asked for besides the notebook's 1; one user may hold at most 2"
        job = await post(running, "ada", "/jobs", {**body, "nnodes": 1}, 201)
        assert job["state"] == "starting"
