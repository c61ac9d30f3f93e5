"""GPU-hours by Slurm's accounting and by the broker's own store: a real slurmctld, slurmdbd and MariaDB; nodes without
Docker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuhub import names
from gpuhub.broker.slurm_submitting import SlurmSide
from gpuhub.settings import Cluster
from gpuhub.slurm.api import SlurmApi
from gpuhub.slurm.make import make_api
from gpuhub.slurm.values import Submitter
from gpuhub.tables import Profile
from tests.support.brokers import Running, Setting, asgi_broker
from tests.support.simulated import build_cluster, simulated_nodes
from tests.support.slurm_site import SlurmSite, slurm_site

PORT = 27600
MIB = 32607
CARDS = {"rig1": [("NVIDIA GeForce RTX 5090", MIB)] * 2, "rig2": [("NVIDIA GeForce RTX 5070", MIB)]}
TYPES = (("rtx5090", "rtx5090"), ("rtx5070",))
PAIR = Profile(name="pair", title="Two", gpu_model="RTX 5090", gpu_count=2, cpus=1, memory="1G")
SINGLE = Profile(name="single", title="One", gpu_model="RTX 5070", cpus=1, memory="1G", account="course")
POLL_S = 1
#: The broker finds a start one look later than Slurm, and Slurm an end one look later than the broker; Slurm's times are
#: whole seconds, and killing a job takes it a moment.
GRAIN_S = 2 * POLL_S + 3
HELD_S = 12.0


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    with slurm_site(port=PORT, nodes=TYPES, has_accounts=True, has_rest=True) as running:
        running.add_account("course", *running.users)
        yield running


def cluster_of(site: SlurmSite, profiles: tuple[Profile, ...]) -> Cluster:
    cluster = build_cluster(CARDS, profiles, engine="slurm", slurm=site.table(poll=f"{POLL_S}s"))
    theirs = {"rig1": "sx1", "rig2": "sx2"}
    nodes = tuple(node.model_copy(update={"slurm": theirs[node.name]}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


@asynccontextmanager
async def broker_on(site: SlurmSite, folder: Path, profiles: tuple[Profile, ...]) -> AsyncIterator[Running]:
    """A broker whose engine is this Slurm."""

    async def find_submitter(owner: str) -> Submitter:
        return site.submitter(owner)

    cluster = cluster_of(site, profiles)
    side = SlurmSide(api=make_api(cluster.slurm), find_submitter=find_submitter)
    async with asgi_broker(Setting(folder, cluster, simulated_nodes(CARDS), slurm=side)) as running:
        yield running


@asynccontextmanager
async def asking(site: SlurmSite, way: str = "cli") -> AsyncIterator[SlurmApi]:
    api = make_api(site.table(api=way))
    try:
        yield api
    finally:
        await api.close()


async def counted(api: SlurmApi, since: float) -> dict[tuple[str, str], float]:
    """GPU-seconds from then on, by user and account."""
    return {(one.user, one.account): one.gpu_seconds for one in await api.gpu_time(since, time.time())}


async def are_recorded(site: SlurmSite) -> bool:
    """No job goes on, and slurmdbd has heard of all and of their ends: slurmctld tells it some seconds later."""
    told = await asyncio.to_thread(site.ask, "sacct", "-X", "-a", "-n", "-P", "-o", "jobid,state%20")
    there = await asyncio.to_thread(site.ask, "squeue", "-h", "-t", "all", "-o", "%i")
    states = dict(line.split("|") for line in told.splitlines())
    return states.keys() >= set(there.split()) and not {"RUNNING", "PENDING"} & set(states.values())


async def is_empty(site: SlurmSite) -> bool:
    """Slurm has no job that goes on."""
    return not await asyncio.to_thread(site.ask, "squeue", "-h", "-o", "%i")


async def read(running: Running, token: str) -> dict[str, dict[str, Any]]:
    """`/usage` by owner."""
    async with running.client(token) as client:
        answer = await client.get("/api/v1/usage")
    assert answer.status_code == httpx.codes.OK, answer.text
    return {one["owner"]: one for one in answer.json()}


async def take(running: Running, owner: str, profile: str) -> str:
    """A notebook's lease with its GPUs and a container; its address."""
    body = {"profile": profile, "key": f"key-{owner}", "owner": owner}
    async with running.client("spawner") as client:
        made = await client.post("/api/v1/leases", json=body)
        assert made.status_code == httpx.codes.CREATED, made.text
        path = f"/api/v1/leases/{made.json()['id']}"
        lease = await reach(client, path, "granted")
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


async def give_back(running: Running, path: str) -> None:
    """End a lease; its GPUs are proven free."""
    async with running.client("spawner") as client:
        assert (await client.delete(path)).status_code == httpx.codes.OK
        await reach(client, path, "released")


async def reach(client: httpx.AsyncClient, path: str, state: str) -> dict[str, Any]:
    """A lease once it is in a state."""
    lease: dict[str, Any] = {}

    async def is_there() -> bool:
        lease.update((await client.get(path)).json())
        return lease["state"] == state

    await until(is_there, lambda: f"{path} is {state}, but {lease}")
    return lease


async def until(is_true: Callable[[], Awaitable[bool]], what: Callable[[], str], deadline_s: float = 60.0) -> None:
    """Ask again and again, without keeping the machine busy."""
    end = time.monotonic() + deadline_s
    while not await is_true():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what()}"
        await asyncio.sleep(0.2)


async def test_slurms_count_and_the_brokers_agree(site: SlurmSite, tmp_path: Path):
    """Two users with leases of different sizes and accounts, and one of them also with plain sbatch: seconds agree within
    the grain of looking, and `/usage` shows Slurm's.
    """
    began = time.time()
    async with (
        broker_on(site, tmp_path, (PAIR, SINGLE)) as running,
        asking(site) as api,
    ):
        paths = [await take(running, "ada", "pair"), await take(running, "ben", "single")]
        # They are held for as long as tells two GPUs from one, beyond what the two counts may differ by.
        await asyncio.sleep(HELD_S)
        live = await counted(api, began)
        assert 2 * HELD_S <= live["ada", "lab"] <= 2 * (time.time() - began)
        ending_at = time.time()
        for path in paths:
            await give_back(running, path)
        await until(lambda: is_empty(site), lambda: "the jobs are over")
        # Until then a GPU is not free to Slurm; on a busy machine that takes a while.
        late_s = GRAIN_S + time.time() - ending_at
        await until(lambda: are_recorded(site), lambda: "slurmdbd has heard that the jobs are over")
        own = {owner: 3600 * usage.gpu_hours_week for owner, usage in running.core.usage().items()}
        theirs = await counted(api, began)
        assert theirs.keys() == {("ada", "lab"), ("ben", "course")}
        assert own["ada"] >= 2 * HELD_S
        assert own["ada"] - 1 <= theirs["ada", "lab"] <= own["ada"] + 2 * late_s
        assert own["ben"] - 1 <= theirs["ben", "course"] <= own["ben"] + late_s

        plain = site.submit("ben", "--gres=gpu:rtx5070:1", "-A", "lab", script="exec sleep 3")
        await asyncio.to_thread(site.wait_for_state, plain, "COMPLETED")
        await until(lambda: are_recorded(site), lambda: "slurmdbd has heard that it is over")
        theirs = await counted(api, began)
        async with asking(site, "rest") as other:
            assert await counted(other, began) == theirs
        usage = await read(running, "root")
    assert 3 <= theirs["ben", "lab"] <= 3 + GRAIN_S
    for owner, accounts in {"ada": ["lab"], "ben": ["course", "lab"]}.items():
        hours = {account: round(theirs[owner, account] / 3600, 3) for account in accounts}
        assert usage[owner]["counted_by"] == "slurm"
        assert usage[owner]["accounts"] == [{"account": name, "gpu_hours_week": each} for name, each in hours.items()]


async def test_without_slurmdbd_the_broker_counts(tmp_path: Path):
    """Its own store has the hours, and says so."""
    with slurm_site(port=PORT + 10, nodes=TYPES) as site:
        async with broker_on(site, tmp_path, (PAIR,)) as running:
            path = await take(running, "ada", "pair")
            await asyncio.sleep(3)
            await give_back(running, path)
            usage = await read(running, "root")
            own = running.core.usage()["ada"].gpu_hours_week
    assert 3600 * own >= 6
    assert usage["ada"]["counted_by"] == "broker"
    assert usage["ada"]["gpu_hours_week"] == pytest.approx(own, abs=0.001)
    assert usage["ada"]["accounts"] == []
