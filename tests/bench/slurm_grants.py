"""Grants a second: the broker beside a real slurmctld, at the same number of nodes of one GPU, in turn on one machine.

What a grant is on either side, from the submission of all to the end of the last:

- Slurm: a job of one array runs `true` with one GPU. slurmctld places it, its slurmd (a real one a node, on this
  machine) starts a step daemon that runs it, and the end is reported back. One command submits the whole array. Nothing
  is written for accounting; GPUs are `/dev/null`.
- The broker: a notebook's lease is asked for over HTTP (each by a client of its own), granted, long-polled, activated,
  released and proven gone by a listing of its node's containers, and each of these steps is committed to a SQLite file
  with its content on the disk. The nodes are simulated in the broker's process: nothing starts a container.

So Slurm also starts processes, and the broker also answers some five requests for each lease and waits for its disk.
Neither is what a container's start costs, which follows on a real node and takes far longer than both.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.product import paired_ratio, tell
from tests.support.brokers import API
from tests.support.lean_http import Connection
from tests.support.serve_simulated import PROFILE, Served, serving
from tests.support.slurm_site import SlurmSite, slurm_site, wait

#: As many slurmds as fit on two cores without a wait for the machine itself; the broker gets as many nodes.
NODES = 100
#: Jobs, and leases, in one repeat.
COUNT = 500
PAIRS = 5
#: slurmctld's; the nodes have the next ones.
PORT = 27000
#: As long as the API lets a long poll wait, seconds.
POLL_S = 25


def measure() -> Iterator[tuple[str, float, str]]:
    """The figures `broker.grants_over_slurmctld` (higher is better) and what it is made of."""
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-grants-") as folder,
        slurm_site(port=PORT, nodes=[("",)] * NODES, users={}, cpus=1, memory_mib=1000, min_job_age_s=2) as slurm,
        serving(Path(folder), nodes=NODES, gpus=1) as served,
    ):
        pairs = [_pair(slurm, served, number) for number in range(PAIRS + 1)]
    ours, theirs = zip(*pairs[1:], strict=True)
    yield "broker.grants_per_s", statistics.median(ours), "1/s"
    yield "slurm.grants_per_s", statistics.median(theirs), "1/s"
    yield "slurm.nodes", NODES, "nodes"
    yield "broker.grants_over_slurmctld", paired_ratio(ours, theirs), "ratio"


def _pair(slurm: SlurmSite, served: Served, number: int) -> tuple[float, float]:
    theirs = COUNT / _run_jobs(slurm)
    ours = COUNT / asyncio.run(_lease_all(served, number))
    tell(f"grants a second: broker {ours:.1f}, slurmctld {theirs:.1f}{' (warm-up)' if not number else ''}")
    return ours, theirs


def _run_jobs(slurm: SlurmSite) -> float:
    """Seconds for all jobs, from their submission until none waits, runs or completes."""
    began = time.monotonic()
    slurm.submit(None, f"--array=0-{COUNT - 1}", "--gres=gpu:1", "-e", "/dev/null", script="exec true")
    wait(lambda: not slurm.ask("squeue", "--noheader", "--array", "--format=%i").strip(), f"{COUNT} jobs are done", 300)
    return time.monotonic() - began


async def _lease_all(served: Served, repeat: int) -> float:
    """Seconds for all leases, from the first request to the last proof; clients are connected before."""
    opening = (Connection.open(served.host, served.port, prefix=API, token="spawner") for _ in range(COUNT))
    clients = [await connection for connection in opening]
    began = time.monotonic()
    await asyncio.gather(*(_lease(client, f"user{n}", f"r{repeat}-{n}") for n, client in enumerate(clients)))
    took_s = time.monotonic() - began
    await asyncio.gather(*(client.close() for client in clients))
    return took_s


async def _lease(client: Connection, owner: str, key: str) -> None:
    """One lease, from the request to the proof that its GPU is free again."""
    status, lease = await client.send("POST", "/leases", {"profile": PROFILE, "key": key, "owner": owner})
    assert status == 201, lease
    path = f"/leases/{lease['id']}"
    lease = await _until(client, lease, "granted")
    status, answer = await client.send("POST", f"{path}/activate", {"container_id": "c" * 64})
    assert status == 200, answer
    status, lease = await client.send("DELETE", path)
    assert status == 200, lease
    await _until(client, lease, "released")


async def _until(client: Connection, lease: dict[str, object], state: str) -> dict[str, object]:
    while lease["state"] != state:
        query = f"?wait_s={POLL_S}&version={lease['version']}"
        status, lease = await client.send("GET", f"/leases/{lease['id']}{query}")
        assert status == 200, lease
    return lease
