"""A guest whose line breaks while jobs run there, over real WireGuard and SSH, with a real broker and the guest's Docker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi import FastAPI

from gpuhub.broker.app import create_app
from gpuhub.broker.db.store import Store
from gpuhub.broker_api.schemas import JobState
from gpuhub.config import settings
from gpuhub.config.settings import StorageSettings
from gpuhub.docker.containers import container_spec
from gpuhub.docker.containers.user_containers import start_worker
from gpuhub.nodes import agent_container
from gpuhub.ops.guests.invitation import remove_guest
from tests.support.broker.calls import post, read, wait_for_state
from tests.support.broker.in_process import JOB_SECRET, Running, Setting, Workers, asgi_broker, until
from tests.support.closet.ssh_machines import wait
from tests.support.docker.simulated_nodes import simulated_nodes
from tests.support.guests import (
    FriendsMachine,
    Head,
    Lines,
    MixedDaemons,
    friends_machine,
    head_node,
    lost_line,
    split_command,
)

UID = 5000
JOB = {"detached": True, "name": "train.py", "guests": True}
#: What the broker needs for its calls, and for attempts that are not over yet.
MAX_SSH_CLIENTS = 4
#: In place of the agent's script, which needs NVIDIA's library.
AGENT = """
import json, time
boot = open("/proc/sys/kernel/random/boot_id").read().strip()
for n in range(1, 100_000):
    gpus = [{"uuid": f"GPU-lent-{i}", "index": i, "name": "NVIDIA GeForce RTX 5090", "memory_total_mib": 32607, "error": None,
             "memory_used_mib": 4, "processes": []} for i in range(2)]
    print(json.dumps({"n": n, "boot_id": boot, "driver": "580.95.05", "error": None, "gpus": gpus}), flush=True)
    time.sleep(1)
"""
#: A job that ends well when its home has the file `enough`.
WORK = """
import os, pathlib, time
home = pathlib.Path.home()
(home / "work/begun.txt").write_text("begun")
while not (home / "enough").exists():
    time.sleep(0.2)
(home / "work/model.bin").write_bytes(bytes(1000))
"""


@dataclass(slots=True)
class GuestSetting(Setting):
    """A broker with a simulated node of the closet, and the friend's machine."""

    head: Head | None = None
    daemons: list[MixedDaemons] = field(default_factory=list)

    def build(self, store: Store, workers: Workers) -> FastAPI:
        """Build the application, which starts real containers on the guest."""
        assert self.head is not None
        daemons = MixedDaemons(self.cluster.nodes, self.nodes, self.head.paths.run)
        daemons.instance = self.head.paths.instance
        self.daemons.append(daemons)
        return create_app(
            cluster=self.cluster,
            store=store,
            daemons=daemons,
            hub=self.hub,
            start_worker=partial(start_worker, daemons, self.cluster, self.head.paths),
            start_courier=self.couriers,
            destination_key="key of the tests",
            job_secret=JOB_SECRET,
        )


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with head_node("ghlost", tmp_path_factory.mktemp("head")) as started:
        yield started


@pytest.fixture(scope="module")
def friend(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FriendsMachine]:
    """The machine, which has joined and has the images."""
    with friends_machine(tmp_path_factory.mktemp("friend") / "machine") as machine:
        machine.import_image("gpuhub/base:latest", "gpuhub/notebook:latest")
        machine.run(*split_command(head.invite()))
        yield machine


@pytest.fixture
def setting(
    head: Head, friend: FriendsMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GuestSetting]:
    """A broker's setting, with a GPU for two jobs."""
    monkeypatch.setattr(container_spec, "WORKER_COMMAND", ("python3", "-c", WORK))
    monkeypatch.setattr(agent_container, "agent_script", lambda: AGENT)
    cluster = settings.load(head.cluster_file)
    cluster = cluster.model_copy(
        update={
            "storage": StorageSettings(home=f"{tmp_path}/homes/{{username}}", home_create=None),
            "network": cluster.network.model_copy(update={"guard": False}),
            "scheduling": cluster.scheduling.model_copy(update={"quarantine_after": 2.0}),
        }
    )
    setting = GuestSetting(tmp_path, cluster=cluster, nodes=simulated_nodes({"rig1": []}), head=head)
    yield setting
    for daemons in setting.daemons:
        daemons.close()


async def start_job(running: Running, run_id: str, **more: Any) -> tuple[str, str]:
    """Submit a job of ada's, and return its id and that of its container when it runs."""
    home = running.setting.home("ada")
    run_folder = home / f".gpu_launch/jobs/{run_id}"
    for file, text in {
        run_folder / "job.json": json.dumps({"version": 1, "name": "train.py", "folder": "work"}),
        run_folder / "run.json": "{}",
        home / "work/train.py": "print(1)",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for path in (home, *home.rglob("*")):
        os.chown(path, UID, UID)
    job = await post(running, "ada", "/jobs", {**JOB, "run_id": run_id, **more}, 201)
    await until(lambda: running.core.ledger.snapshot.jobs[job["id"]].state == JobState.RUNNING, f"{run_id} runs", 90)
    return str(job["id"]), str(find_container(running, job["id"]))


def end_job(friend: FriendsMachine, container: str) -> None:
    """Let a job's program end."""
    friend.run("docker", "exec", container, "python3", "-c", "open('/home/ada/enough', 'w')")
    friend.run("docker", "wait", container)


def find_container(running: Running, job: str) -> str | None:
    """Return the container of a job's worker."""
    (worker,) = running.core.ledger.snapshot.jobs[job].workers
    return worker.container_id


def list_containers(friend: FriendsMachine) -> list[str]:
    """Return the ids of all containers of the guest."""
    return friend.run("docker", "ps", "--all", "--quiet", "--no-trunc").stdout.split()


def find_ssh_clients() -> int:
    """Return the number of this process's SSH clients, which connect with the guest."""
    return sum(child.name() == "ssh" for child in psutil.Process().children(recursive=True))


def is_up(running: Running) -> bool:
    """Return whether the broker reaches the guest."""
    return running.core.capacity.inventory.nodes["mia"].is_up


async def test_jobs_outlive_a_broken_line(setting: GuestSetting, friend: FriendsMachine) -> None:
    """One goes on in the same container; one that ends meanwhile has its exit code and its results; a GPU needs proof."""
    async with asgi_broker(setting) as running:
        (short, container), (long, kept) = (
            await start_job(running, "run-000001"),
            await start_job(running, "run-000002"),
        )
        with lost_line():
            await until(lambda: not is_up(running), "the guest is away", 60)
            end_job(friend, container)
            waiting = await post(running, "ben", "/jobs", {**JOB, "run_id": "run-000003", "max_retries": 1}, 201)
            why = await read(running, "ben", f"/leases/{waiting['lease']['id']}/why")
            assert "held by ada; currently not available: mia" in why["waits_for"]
            async with running.client("ada") as client:
                logs = await client.get(f"/api/v1/jobs/{short}/logs")
            assert (logs.status_code, logs.json()["code"]) == (503, "node-unreachable")
            assert {(await read(running, "ada", f"/jobs/{job}"))["state"] for job in (short, long)} == {"running"}
        await until(lambda: is_up(running), "the guest is back", 90)
        view = await wait_for_state(running, f"/jobs/{short}", "ended", "ada")
        assert (view["exit_code"], view["lease"]["state"]) == (0, "released")
        results = setting.home("ada") / "guest-results/run-000001"
        assert (results / "model.bin").stat().st_size == 1000
        view = await read(running, "ada", f"/jobs/{long}")
        assert (view["state"], view["retries"], find_container(running, long)) == ("running", 0, kept)
        assert find_ssh_clients() <= MAX_SSH_CLIENTS


async def test_job_of_a_guest_that_is_given_up(setting: GuestSetting, friend: FriendsMachine) -> None:
    """Neither a cancelled job nor time frees the GPU, an administrator does; a guest that returns is cleaned first."""
    async with asgi_broker(setting) as running:
        job, container = await start_job(running, "run-000004")
        with lost_line():
            await until(lambda: not is_up(running), "the guest is away", 60)
            async with running.client("ada") as client:
                assert (await client.delete(f"/api/v1/jobs/{job}")).json()["state"] == "stopping"
            lease = (await read(running, "ada", f"/jobs/{job}"))["lease"]["id"]
            view = await wait_for_state(running, f"/leases/{lease}", "quarantined", "ada")
            assert view["note"] == "quarantined: node mia does not answer, so what ran there may still run"
            assert (await read(running, "ada", f"/jobs/{job}"))["state"] == "stopping"
            await post(running, "root", f"/leases/{lease}/force", {})
            view = await wait_for_state(running, f"/jobs/{job}", "ended", "ada")
            assert view["lease"]["note"] == "freed without proof by root"
        await until(lambda: container not in list_containers(friend), "the old container is gone", 90)
        assert friend.run("docker", "volume", "ls", "--quiet").stdout == ""
        again, _ = await start_job(running, "run-000005")
        async with running.client("ada") as client:
            await client.delete(f"/api/v1/jobs/{again}")
        await wait_for_state(running, f"/jobs/{again}", "ended", "ada")


async def test_job_of_a_guest_that_is_removed(setting: GuestSetting, head: Head, friend: FriendsMachine) -> None:
    """With `--retry` it waits for another guest; without it, it ends with the reason. The old machine has no way in."""
    async with asgi_broker(setting) as running:
        jobs = [(await start_job(running, f"run-00001{retries}", max_retries=retries))[0] for retries in range(2)]
        with lost_line():
            await until(lambda: not is_up(running), "the guest is away", 60)
    with lost_line():
        remove_guest("mia", head.paths, head.cluster_file, Lines(), lambda: None)
        (rig1,) = (node for node in setting.cluster.nodes if node.name == "rig1")
        setting.cluster = setting.cluster.model_copy(update={"nodes": (rig1,)})
        async with asgi_broker(setting) as running:
            views = [await read(running, "ada", f"/jobs/{job}") for job in jobs]
    assert [(view["state"], view["retries"]) for view in views] == [("ended", 0), ("waiting", 1)]
    assert views[0]["reason"] == "node mia is no longer in cluster.toml"
    wait(lambda: not head.peers(), "the peer's removal")
