"""Two hundred concurrent requests for three GPUs, over HTTP, with a store on disk."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import LeaseRequest, LeaseState, LeaseView
from gpuhub.common import names
from tests.support.broker.in_process import Running, Setting, served_broker
from tests.support.docker.simulated_nodes import build_cluster, simulated_nodes

REQUESTS = 200
SAME = {name: [("NVIDIA GeForce RTX 5090", 32607)] for name in ("rig1", "rig2", "rig3")}


async def _serve_one(
    running: Running, client: AsyncBrokerClient, number: int, held: Counter[str], order: list[str]
) -> None:
    """Act as a spawner and its user: request, wait, start, work, stop, wait for the end."""
    owner = f"user{number}"
    request = LeaseRequest(profile="rtx5090", key=f"k{number}", owner=owner)
    lease = await client.request_lease(request)
    while lease.state is LeaseState.REQUESTED:
        lease = await client.get_lease(lease.id, wait_s=25, version=lease.version)
    (gpu,) = lease.gpus
    held[gpu.uuid] += 1
    assert held[gpu.uuid] == 1, f"{gpu.uuid} is held twice"
    order.append(lease.id)
    _start(running, lease)
    await client.activate(lease.id, "c" * 64)
    held[gpu.uuid] -= 1
    lease = await client.release(lease.id)
    while lease.state is not LeaseState.RELEASED:
        lease = await client.get_lease(lease.id, wait_s=25, version=lease.version)


def _start(running: Running, lease: LeaseView) -> None:
    node = running.setting.nodes[lease.nodes[0]]
    alive = [c for c in node.of_kind(names.KIND_NOTEBOOK) if c["State"] == "running"]
    assert not alive, "a container of an earlier lease still runs on the GPU"
    node.run_container(
        {
            names.LABEL_KIND: names.KIND_NOTEBOOK,
            names.LABEL_LEASE: lease.id,
            names.LABEL_EPOCH: str(lease.epoch),
            names.LABEL_OWNER: lease.owner,
        }
    )


def _overlaps(running: Running) -> list[tuple[str, str, str]]:
    """Return pairs of leases whose times on one GPU overlap, by the store's record."""
    query = """
        SELECT a.gpu_uuid, a.lease_id, b.lease_id FROM lease_gpus a JOIN lease_gpus b
        ON a.gpu_uuid = b.gpu_uuid AND a.lease_id < b.lease_id
        JOIN leases la ON la.id = a.lease_id JOIN leases lb ON lb.id = b.lease_id
        WHERE la.granted_at < b.released_at AND lb.granted_at < a.released_at
    """
    with closing(sqlite3.connect(running.setting.folder / "broker.sqlite")) as raw:
        return raw.execute(query).fetchall()


def test_two_hundred_concurrent_clients(tmp_path: Path) -> None:
    """No GPU has two active leases, and requests are granted in their order."""
    setting = Setting(tmp_path)
    setting.cluster, setting.nodes = build_cluster(SAME), simulated_nodes(SAME)
    held: Counter[str] = Counter()
    order: list[str] = []
    with served_broker(setting) as running:

        async def serve_all() -> float:
            client = AsyncBrokerClient(running.url, "spawner")
            began = time.monotonic()
            await asyncio.gather(*(_serve_one(running, client, n, held, order) for n in range(REQUESTS)))
            await client.close()
            return time.monotonic() - began

        took_s = asyncio.run(serve_all())
        with closing(sqlite3.connect(setting.folder / "broker.sqlite")) as raw:
            asked = [r[0] for r in raw.execute("SELECT id FROM leases ORDER BY seq")]
            by_grant = [r[0] for r in raw.execute("SELECT id FROM leases ORDER BY granted_at, seq")]
        assert _overlaps(running) == []
        assert running.core.ledger.snapshot.leases == {}
    print(f"{REQUESTS / took_s:.1f} leases per second, from request to release, through {took_s:.1f} s")
    assert len(asked) == REQUESTS
    assert by_grant == asked
    assert sorted(order) == sorted(asked)
