"""Jobs on guests: where they are placed, what is sent with them, what comes back, and pauses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuhub.config.containers.services import ServiceSettings
from gpuhub.config.settings import GuestSettings
from gpuhub.nodes.guest_readings import REFUSED
from tests.support.broker.calls import ask, post, read, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.docker.simulated_nodes import build_cluster

JOB = {"run_id": "run-000001", "detached": True, "name": "train.py", "guests": True}


@pytest.fixture
def lent(setting: Setting) -> Setting:
    """rig3 is a guest."""
    cluster = build_cluster()
    *own, rig3 = cluster.nodes
    rig3 = rig3.model_copy(update={"guest": True, "docker": "ssh://gpuhub-guest@10.213.77.2:8022"})
    guests = GuestSettings(endpoint="home.example.org:51820")
    setting.cluster = cluster.model_copy(update={"nodes": (*own, rig3), "guests": guests})
    setting.nodes["rig3"].guest_homes = setting.folder / "guest"
    return setting


def write_job(setting: Setting, **manifest: Any) -> Path:
    """Write the files of ada's job and return her home."""
    home = setting.home("ada")
    run = home / ".gpu_launch/jobs/run-000001"
    run.mkdir(parents=True, exist_ok=True)
    words = {"version": 1, "name": "train.py", "words": ["train.py"], "folder": "work", **manifest}
    (run / "job.json").write_text(json.dumps(words))
    (run / "run.json").write_text("{}")
    (home / "work").mkdir(exist_ok=True)
    (home / "work/train.py").write_text("print(1)")
    (home / "secret").write_text("not for friends")
    return home


def find_worker(running: Running) -> tuple[str, Path]:
    """Return the container of the worker on the guest, and its home."""
    node = running.setting.nodes["rig3"]
    [worker] = node.of_kind("worker")
    assert node.guest_homes is not None
    return worker["Id"], node.guest_homes / worker["Id"]


async def test_a_job_goes_with_its_folder_and_its_results_come_back(lent: Setting) -> None:
    """The guest sees the folder alone; what it changes of it, or slips in elsewhere, replaces nothing in the home."""
    home = write_job(lent)
    async with asgi_broker(lent) as running:
        job = await post(running, "ada", "/jobs", JOB, 201)
        view = await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        assert [worker["node"] for worker in view["workers"]] == ["rig3"]
        container, there = find_worker(running)
        files = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
        run = ".gpu_launch/jobs/run-000001"
        assert files == {"work/train.py", f"{run}/job.json", f"{run}/run.json"}
        (there / "work/train.py").write_text("import os; os.system('evil')")
        (there / "work/model.pt").write_text("weights")
        (there / run / "output.log").write_text("epoch 1\n")
        (there / run / "job.json").write_text("{}")
        (there / ".bashrc").write_text("evil")
        # While it runs, its output is read there.
        async with running.client("ada") as client:
            assert (await client.get(f"/api/v1/jobs/{job['id']}/logs")).text == "epoch 1\n"
        lent.nodes["rig3"].end_container(container)
        view = await wait_for_state(running, f"/jobs/{job['id']}", "ended", "ada")
        assert view["exit_code"] == 0
    assert (home / "work/train.py").read_text() == "print(1)"
    assert not (home / "work/model.pt").exists()
    assert (home / "guest-results/run-000001/model.pt").read_text() == "weights"
    assert "evil" in (home / "guest-results/run-000001/train.py").read_text()
    assert (home / run / "output.log").read_text() == "epoch 1\n"
    assert json.loads((home / run / "job.json").read_text())["folder"] == "work"
    assert not (home / ".bashrc").exists()


async def test_a_guest_learns_of_no_service(lent: Setting) -> None:
    """Its owner could use them in the user's name; a job on the lab's own nodes does."""
    write_job(lent)
    notes = ServiceSettings(name="notes", image="notes:1", port=80, variables=("NOTES={url}",))
    lent.cluster = lent.cluster.model_copy(update={"services": (notes,)})
    async with asgi_broker(lent) as running:
        for given in (JOB, {**JOB, "run_id": "run-000002", "guests": False}):
            job = await post(running, "ada", "/jobs", given, 201)
            await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        assert [[one.name for one in spec.services] for spec in running.workers.specs] == [[], ["notes"]]


async def test_only_who_said_guests_lands_there(lent: Setting) -> None:
    """Without guests, neither a notebook nor a job gets the guest's GPU, and a job with guests gets no other."""
    write_job(lent)
    async with asgi_broker(lent) as running:
        await ask(running, "ada", profile="rtx5060", status=403)
        refused = await post(running, "ben", "/jobs", {**JOB, "guests": False, "models": ["RTX 5060"]}, 403)
        assert refused["detail"].endswith("only for jobs with --guests: rig3")
        await post(running, "ada", "/jobs", {**JOB, "models": ["RTX 5090"]}, 422)
        assert (await read(running, "ada", "/cluster"))["nodes"][2]["takes_guests"] is True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"detached": False}, "only detached jobs run on guests"),
        ({"nnodes": 2}, "guests do not reach each other"),
        ({"stage": ["datasets/imagenet"]}, "guests get no datasets"),
    ],
)
async def test_what_guests_cannot_do_is_refused_at_once(lent: Setting, change: dict[str, Any], reason: str) -> None:
    """With a sentence, before anything waits."""
    async with asgi_broker(lent) as running:
        assert reason in (await post(running, "ada", "/jobs", {**JOB, **change}, 422))["detail"]


async def test_a_pause_lets_the_job_write_a_checkpoint_and_wait_again(lent: Setting) -> None:
    """SIGTERM at once, then it waits; on a guest again, it finds what it had written before."""
    write_job(lent)
    async with asgi_broker(lent) as running:
        job = await post(running, "ada", "/jobs", JOB, 201)
        await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        container, there = find_worker(running)
        await post(
            running, "root", "/nodes/rig3/drain", {"reason": "its owner uses it", "grace_s": 60, "requeue": True}
        )
        await until(lambda: (container, "SIGTERM") in lent.nodes["rig3"].signals, "SIGTERM")
        (there / "work/checkpoint.pt").write_text("step 7")
        lent.nodes["rig3"].end_container(container, code=143)
        view = await wait_for_state(running, f"/jobs/{job['id']}", "waiting", "ada")
        assert view["preemptions"] == 1
        await post(running, "root", "/nodes/rig3/undrain", {})
        await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        _, again = find_worker(running)
        assert (again / "work/checkpoint.pt").read_text() == "step 7"
        assert (again / "work/train.py").read_text() == "print(1)"


async def test_a_job_waits_again_when_the_guest_vanishes_before_it_begins(lent: Setting) -> None:
    """With its age and without a try; the guest's GPU stays blocked until the guest proves that nothing runs there."""
    write_job(lent)
    async with asgi_broker(lent) as running:
        lent.nodes["rig3"].is_reachable = False
        job = await post(running, "ada", "/jobs", JOB, 201)
        await until(lambda: running.core.ledger.snapshot.jobs[job["id"]].lease_id != job["lease"]["id"], "a new lease")
        view = await read(running, "ada", f"/jobs/{job['id']}")
        assert (view["state"], view["retries"], view["preemptions"]) == ("waiting", 0, 0)
        assert view["reason"] == "node rig3: its Docker daemon does not answer in time"
        assert view["lease"]["created_at"] == job["lease"]["created_at"]
        assert (await read(running, "ada", f"/leases/{job['lease']['id']}"))["state"] == "releasing"
        lent.nodes["rig3"].is_reachable = True
        view = await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        assert (view["reason"], view["retries"], view["preemptions"]) == (None, 0, 0)
        assert (await read(running, "ada", f"/leases/{job['lease']['id']}"))["state"] == "released"


async def test_a_job_in_the_home_itself_is_not_sent(lent: Setting) -> None:
    """Its folder would be everything that its owner has."""
    write_job(lent, folder="")
    async with asgi_broker(lent) as running:
        job = await post(running, "ada", "/jobs", JOB, 201)
        view = await wait_for_state(running, f"/jobs/{job['id']}", "ended", "ada")
        assert "the whole home or outside of it" in view["reason"]
        assert lent.nodes["rig3"].guest_homes is not None
        assert not any(path.is_file() for path in lent.nodes["rig3"].guest_homes.rglob("*"))


async def test_a_guest_claims_no_gpu_of_another_node(lent: Setting) -> None:
    """A UUID that another node reports is not listed; a report that makes no sense counts for nothing."""
    async with asgi_broker(lent) as running:
        inventory = running.core.capacity.inventory
        own = inventory.nodes["rig1"].gpus[0].uuid
        lent.nodes["rig3"].mig[0] = []
        await until(lambda: running.core.capacity.inventory.nodes["rig3"].gpus, "its GPU")
        assert running.core.capacity.inventory.list_foreign_uuids("rig3") >= {own}
        lent.nodes["rig3"].driver = "<script>"
        await until(lambda: running.core.capacity.inventory.nodes["rig3"].gpu_error == REFUSED, "the refusal")
        assert running.core.capacity.inventory.nodes["rig3"].gpus == ()
        assert running.core.capacity.inventory.nodes["rig1"].gpus[0].uuid == own


async def test_couriers_are_never_on_guests(lent: Setting) -> None:
    """A home is mounted on the closet's own nodes alone."""
    write_job(lent)
    for node in ("rig1", "rig2"):
        lent.nodes[node].is_reachable = False
    async with asgi_broker(lent, wait=False) as running, running.client("ada") as client:
        await until(lambda: running.core.capacity.inventory.nodes["rig3"].is_up, "the guest")
        assert (await client.get("/api/v1/files", params={"path": "secret"})).status_code == 503
    assert lent.couriers.specs == []
