"""Grants a second of the broker and of a real slurmctld, with as many nodes of one GPU, in turn on one machine.

A grant lasts from the submission of all to the end of the last:

- Slurm: a job of one array runs `true` with one GPU. slurmctld places it, its slurmd (a real one for each node, on this
  machine) starts a step daemon that runs it and reports the end. One command submits the whole array. There is no
  accounting; GPUs are `/dev/null`.
- The broker: a notebook's lease is requested over HTTP by a separate client, granted, activated, released
  and proven gone by a listing of its node's containers, and each of these steps is committed durably to a SQLite file.
  The nodes are simulated in the broker's process, and no container starts.

So Slurm also starts processes, and the broker also answers three requests for each lease and waits for its disk.
Neither includes a container's start, which follows on a real node and takes far longer than both.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.product import paired_ratio, print_progress
from tests.support.broker.in_process import API
from tests.support.broker.process import PROFILE, Connection, Served, serving
from tests.support.slurm.site import SlurmSite, slurm_site, wait

#: As many slurmds as two cores can run; the broker gets as many nodes.
NODES = 100
#: Jobs, and leases, in one repeat.
COUNT = 500
PAIRS = 5
#: The port of slurmctld; the nodes have the next ones.
PORT = 27000
#: The longest long poll that the API allows, seconds.
POLL_S = 25


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures `broker.grants_over_slurmctld` (higher is better) and its two parts."""
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
    print_progress(f"grants a second: broker {ours:.1f}, slurmctld {theirs:.1f}{' (warm-up)' if not number else ''}")
    return ours, theirs


def _run_jobs(slurm: SlurmSite) -> float:
    """Return the seconds for all jobs, from their submission until none waits, runs or completes."""
    began = time.monotonic()
    slurm.submit(None, f"--array=0-{COUNT - 1}", "--gres=gpu:1", "-e", "/dev/null", script="exec true")
    wait(lambda: not slurm.ask("squeue", "--noheader", "--array", "--format=%i").strip(), f"{COUNT} jobs are done", 300)
    return time.monotonic() - began


async def _lease_all(served: Served, repeat: int) -> float:
    """Return the seconds for all leases, from the first request to the last proof; clients are connected before."""
    opening = (Connection.open(served.host, served.port, prefix=API, token="spawner") for _ in range(COUNT))
    clients = [await connection for connection in opening]
    began = time.monotonic()
    await asyncio.gather(*(_lease(client, f"user{n}", f"r{repeat}-{n}") for n, client in enumerate(clients)))
    took_s = time.monotonic() - began
    await asyncio.gather(*(client.close() for client in clients))
    return took_s


async def _lease(client: Connection, owner: str, key: str) -> None:
    """Take one lease from its request to the proof that its GPU is free again."""
    request = {"profile": PROFILE, "key": key, "owner": owner}
    status, lease = await client.send("POST", f"/leases?wait_s={POLL_S}", request)
    assert status == 201, lease
    path = f"/leases/{lease['id']}"
    lease = await _until(client, lease, "granted")
    status, answer = await client.send("POST", f"{path}/activate", {"container_id": "c" * 64})
    assert status == 200, answer
    status, lease = await client.send("DELETE", f"{path}?wait_s={POLL_S}")
    assert status == 200, lease
    await _until(client, lease, "released")


async def _until(client: Connection, lease: dict[str, object], state: str) -> dict[str, object]:
    while lease["state"] != state:
        query = f"?wait_s={POLL_S}&version={lease['version']}"
        status, lease = await client.send("GET", f"/leases/{lease['id']}{query}")
        assert status == 200, lease
    return lease
