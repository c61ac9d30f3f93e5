"""GPU-hours by Slurm's accounting and by the broker's store: slurmctld, slurmdbd and MariaDB; nodes without Docker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuhub.backends.slurm.backend import SlurmBackend
from gpuhub.common import names
from gpuhub.config.containers.profiles import ProfileSettings
from gpuhub.config.settings import ClusterSettings
from gpuhub.slurm_client.factory import make_client
from gpuhub.slurm_client.interface import SlurmClient
from gpuhub.slurm_client.models import Submitter
from tests.support.broker.in_process import Running, Setting, asgi_broker
from tests.support.docker.simulated_nodes import build_cluster, simulated_nodes
from tests.support.slurm.site import SlurmSite, slurm_site

pytestmark = [pytest.mark.slurm, pytest.mark.root]

PORT = 27600
MIB = 32607
CARDS = {"rig1": [("NVIDIA GeForce RTX 5090", MIB)] * 2, "rig2": [("NVIDIA GeForce RTX 5070", MIB)]}
TYPES = (("rtx5090", "rtx5090"), ("rtx5070",))
PAIR = ProfileSettings(name="pair", title="Two", gpu_model="RTX 5090", gpu_count=2, cpus=1, memory="1G")
SINGLE = ProfileSettings(name="single", title="One", gpu_model="RTX 5070", cpus=1, memory="1G", account="course")
POLL_S = 1
#: The broker sees a start one poll later than Slurm, and Slurm sees an end one poll later than the broker. Slurm's
#: times are whole seconds, and it needs a moment to kill a job.
GRAIN_S = 2 * POLL_S + 3
HELD_S = 12.0


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    with slurm_site(port=PORT, nodes=TYPES, has_accounts=True, has_rest=True) as running:
        running.add_account("course", *running.users)
        yield running


def cluster_of(site: SlurmSite, profiles: tuple[ProfileSettings, ...]) -> ClusterSettings:
    cluster = build_cluster(CARDS, profiles, engine="slurm", slurm=site.table(poll=f"{POLL_S}s"))
    theirs = {"rig1": "sx1", "rig2": "sx2"}
    nodes = tuple(node.model_copy(update={"slurm": theirs[node.name]}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


@asynccontextmanager
async def run_broker(site: SlurmSite, folder: Path, profiles: tuple[ProfileSettings, ...]) -> AsyncIterator[Running]:
    """Run a broker with this Slurm as its backend."""

    async def find_submitter(owner: str) -> Submitter:
        return site.submitter(owner)

    cluster = cluster_of(site, profiles)

    def build_backend(cluster: ClusterSettings) -> SlurmBackend:
        return SlurmBackend(cluster, make_client(cluster.slurm), instance="ghtest", find_submitter=find_submitter)

    setting = Setting(folder, cluster, simulated_nodes(CARDS), build_backend=build_backend)
    async with asgi_broker(setting) as running:
        yield running


@asynccontextmanager
async def asking(site: SlurmSite, way: str = "cli") -> AsyncIterator[SlurmClient]:
    api = make_client(site.table(api=way))
    try:
        yield api
    finally:
        await api.close()


async def read_gpu_seconds(api: SlurmClient, since: float) -> dict[tuple[str, str], float]:
    """Return GPU-seconds since that time, by user and account."""
    return {(row.user, row.account): row.gpu_seconds for row in await api.read_gpu_time(since, time.time())}


async def are_recorded(site: SlurmSite) -> bool:
    """Return whether all jobs have ended and slurmdbd has their ends, which slurmctld sends seconds later."""
    output = await asyncio.to_thread(site.ask, "sacct", "-X", "-a", "-n", "-P", "-o", "jobid,state%20")
    queued = await asyncio.to_thread(site.ask, "squeue", "-h", "-t", "all", "-o", "%i")
    states = dict(line.split("|") for line in output.splitlines())
    return states.keys() >= set(queued.split()) and not {"RUNNING", "PENDING"} & set(states.values())


async def is_empty(site: SlurmSite) -> bool:
    """Return whether Slurm has no job that waits or runs."""
    return not await asyncio.to_thread(site.ask, "squeue", "-h", "-o", "%i")


async def read(running: Running, token: str) -> dict[str, dict[str, Any]]:
    """Return `/usage` by owner."""
    async with running.client(token) as client:
        answer = await client.get("/api/v1/usage")
    assert answer.status_code == httpx.codes.OK, answer.text
    return {row["owner"]: row for row in answer.json()}


async def start_lease(running: Running, owner: str, profile: str) -> str:
    """Request a notebook's lease, start its container, and return the lease's path."""
    body = {"profile": profile, "key": f"key-{owner}", "owner": owner}
    async with running.client("spawner") as client:
        created = await client.post("/api/v1/leases", json=body)
        assert created.status_code == httpx.codes.CREATED, created.text
        path = f"/api/v1/leases/{created.json()['id']}"
        lease = await wait_for_lease_state(client, path, "granted")
        labels = {
            names.LABEL_KIND: names.KIND_NOTEBOOK,
            names.LABEL_LEASE: lease["id"],
            names.LABEL_EPOCH: str(lease["epoch"]),
            names.LABEL_OWNER: owner,
        }
        container = running.setting.nodes[lease["nodes"][0]].run_container(labels)
        activated = await client.post(f"{path}/activate", json={"container_id": container})
        assert activated.status_code == httpx.codes.OK, activated.text
    return path


async def end_lease(running: Running, path: str) -> None:
    """End a lease and wait until its GPUs are proven free."""
    async with running.client("spawner") as client:
        assert (await client.delete(path)).status_code == httpx.codes.OK
        await wait_for_lease_state(client, path, "released")


async def wait_for_lease_state(client: httpx.AsyncClient, path: str, state: str) -> dict[str, Any]:
    """Return a lease once it has reached a state."""
    lease: dict[str, Any] = {}

    async def is_there() -> bool:
        lease.update((await client.get(path)).json())
        return lease["state"] == state

    await until(is_there, lambda: f"{path} is {state}, but {lease}")
    return lease


async def until(is_true: Callable[[], Awaitable[bool]], describe: Callable[[], str], deadline_s: float = 60.0) -> None:
    """Poll until the condition holds, with pauses that leave the processor idle."""
    end = time.monotonic() + deadline_s
    while not await is_true():
        assert time.monotonic() < end, f"not within {deadline_s} s: {describe()}"
        await asyncio.sleep(0.2)


async def test_usage_of_slurm_and_of_the_broker_agree(site: SlurmSite, tmp_path: Path):
    """For leases of two users and accounts, and plain sbatch jobs, both counts agree within the polling interval, and
    `/usage` shows Slurm's.
    """
    began = time.time()
    async with (
        run_broker(site, tmp_path, (PAIR, SINGLE)) as running,
        asking(site) as api,
    ):
        paths = [await start_lease(running, "ada", "pair"), await start_lease(running, "ben", "single")]
        # The leases last longer than the difference between both counts, so that one GPU and two are distinguishable.
        await asyncio.sleep(HELD_S)
        live = await read_gpu_seconds(api, began)
        assert 2 * HELD_S <= live["ada", "lab"] <= 2 * (time.time() - began)
        ending_at = time.time()
        for path in paths:
            await end_lease(running, path)
        await until(lambda: is_empty(site), lambda: "the jobs have ended")
        # Until then Slurm counts the GPU as used; on a busy machine this takes a while.
        late_s = GRAIN_S + time.time() - ending_at
        await until(lambda: are_recorded(site), lambda: "slurmdbd knows that the jobs have ended")
        own = {
            owner: 3600 * usage.gpu_hours_week
            for owner, usage in running.core.scheduler.report_usage(running.core.clock.now()).items()
        }
        theirs = await read_gpu_seconds(api, began)
        assert theirs.keys() == {("ada", "lab"), ("ben", "course")}
        assert own["ada"] >= 2 * HELD_S
        # A job that lasted 12.9 s is 12 s to Slurm if it began early in a second: one second for each GPU.
        assert own["ada"] - 2 <= theirs["ada", "lab"] <= own["ada"] + 2 * late_s
        assert own["ben"] - 1 <= theirs["ben", "course"] <= own["ben"] + late_s

        submitted_at = time.time()
        plain = site.submit("ben", "--gres=gpu:rtx5070:1", "-A", "lab", script="exec sleep 3")
        await asyncio.to_thread(site.wait_for_state, plain, "COMPLETED")
        # On a busy machine Slurm needs a while to start and to end a job.
        plain_s = time.time() - submitted_at
        await until(lambda: are_recorded(site), lambda: "slurmdbd knows that the job has ended")
        theirs = await read_gpu_seconds(api, began)
        async with asking(site, "rest") as other:
            assert await read_gpu_seconds(other, began) == theirs
        usage = await read(running, "root")
    assert 3 <= theirs["ben", "lab"] <= plain_s + 1
    for owner, accounts in {"ada": ["lab"], "ben": ["course", "lab"]}.items():
        hours = {account: round(theirs[owner, account] / 3600, 3) for account in accounts}
        assert usage[owner]["counted_by"] == "slurm"
        assert usage[owner]["accounts"] == [{"account": name, "gpu_hours_week": each} for name, each in hours.items()]


async def test_without_slurmdbd_the_broker_counts(tmp_path: Path):
    """`/usage` shows the hours of the broker's own store and names it as the source."""
    with slurm_site(port=PORT + 10, nodes=TYPES) as site:
        async with run_broker(site, tmp_path, (PAIR,)) as running:
            path = await start_lease(running, "ada", "pair")
            await asyncio.sleep(3)
            await end_lease(running, path)
            usage = await read(running, "root")
            own = running.core.scheduler.report_usage(running.core.clock.now())["ada"].gpu_hours_week
    assert 3600 * own >= 6
    assert usage["ada"]["counted_by"] == "broker"
    assert usage["ada"]["gpu_hours_week"] == pytest.approx(own, abs=0.001)
    assert usage["ada"]["accounts"] == []
