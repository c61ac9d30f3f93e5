"""The service for guests and a real broker: a pause reaches the jobs, and the end of it the queue."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from gpuhub.common import secrets
from gpuhub.config import settings
from gpuhub.ops.guests.registry import Guest, GuestRegistry
from gpuhub.ops.guests.service import GuestService
from gpuhub.ops.guests.wireguard import HeadInterface
from tests.support.broker.in_process import Setting, served_broker
from tests.support.docker.simulated_nodes import wait_until
from tests.support.paths import FolderPaths

SETTINGS = """\
[[nodes]]
name = "rig1"
address = "127.0.1.1"
docker = "unix:///nowhere/rig1.sock"

[[nodes]]
name = "rig3"
address = "10.213.77.2"
docker = "ssh://gpuhub-guest@10.213.77.2:8022"
guest = true

[[profiles]]
name = "any"
title = "Any"

[users]
login = "password"
allowed = ["ada"]
uid_first = 5000

[guests]
endpoint = "home.example.org:51820"

[hub]
address = "127.0.0.1"
broker_port = {port}
internal_tls = false
"""


class Peers(HeadInterface):
    """An interface that only records who may use it."""

    names: tuple[str, ...] = ()

    def set_peers(self, guests) -> None:
        self.names = tuple(guest.name for guest in guests)


async def test_a_pause_preempts_jobs_and_its_end_lets_them_start_again(tmp_path: Path) -> None:
    """SIGTERM to the job, which waits; the guest takes it again when its owner resumes. A stranger is refused."""
    file = tmp_path / "cluster.toml"
    file.write_text(SETTINGS.format(port=8010))
    cluster = settings.load(file)
    setting = Setting(tmp_path / "broker", cluster=cluster)
    setting.folder.mkdir()
    setting.nodes["rig3"].guest_homes = tmp_path / "guest"
    home = setting.home("ada")
    run = home / ".gpu_launch/jobs/run-000001"
    run.mkdir(parents=True)
    (run / "job.json").write_text(json.dumps({"version": 1, "name": "train.py", "folder": "work"}))
    (run / "run.json").write_text("{}")
    (home / "work").mkdir()
    paths = FolderPaths(folder=tmp_path)
    secrets.ensure_secrets(paths)
    (paths.secrets / secrets.BROKER_TOKEN).write_text(setting.own_token)
    with served_broker(setting) as running:
        used = paths.used_cluster_file
        used.parent.mkdir(parents=True, exist_ok=True)
        used.write_text(SETTINGS.format(port=int(running.url.split(":")[2].split("/")[0])))
        peers = Peers(paths, cluster.guests)
        service = GuestService(paths, file, cluster, interface=peers)
        registry = GuestRegistry(paths)
        registry.put(Guest(name="rig3", address="10.213.77.2", public_key="key", expires_at=None, mtu=1412))
        job = running.send("POST", "/api/v1/jobs", json={"run_id": "run-000001", "detached": True, "guests": True})
        assert job.status_code == 201, job.text
        path = f"/api/v1/jobs/{job.json()['id']}"

        async def report(*, available: bool, address: str = "10.213.77.2") -> int:
            transport = httpx.ASGITransport(service.app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://head") as client:
                answer = await client.post("/state", json={"available": available})
            await service.sync()
            return answer.status_code

        wait_until(lambda: running.send("GET", path).json()["state"] == "running", "the job runs")
        assert await report(available=False, address="10.213.77.3") == 403
        assert await report(available=False) == 200
        assert (peers.names, registry.read()["rig3"].is_paused) == (("rig3",), True)
        node = setting.nodes["rig3"]
        wait_until(lambda: [one for one in node.signals if one[1] == "SIGTERM"], "SIGTERM")
        [worker] = node.of_kind("worker")
        node.end_container(worker["Id"], code=143)
        wait_until(lambda: running.send("GET", path).json()["state"] == "waiting", "the job waits again")
        assert await report(available=True) == 200
        wait_until(lambda: running.send("GET", path).json()["state"] == "running", "the job runs again")
        assert not registry.read()["rig3"].is_paused
