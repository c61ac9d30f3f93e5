"""Many requests and starts at once, and many leases one after the other."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from gpuhub.broker.db import tables
from gpuhub.broker.db.retention import MAX_OWNER_EVENTS
from gpuhub.broker.state.broker_state import LEASES_KEPT_S
from tests.faults.testbed.testbed import USERS, FaultTestbed
from tests.support.broker.in_process import Running, Setting, asgi_broker
from tests.support.clocks import AheadClock
from tests.support.product import wait_for

Figure = Callable[[str, float], None]

CYCLES = int(os.environ.get("GPUHUB_FAULTS_CYCLES", "10000"))
#: Number of cycles that run concurrently.
AT_ONCE = 50
OWNERS = 50


@pytest.mark.case("L1")
def test_a_hundred_requests_at_once(testbed: FaultTestbed, figure: Figure) -> None:
    """Three GPUs are granted once each, the other requests wait, and a user's excess gets 429 with Retry-After."""

    def ask(number: int) -> tuple[int, str | None]:
        client = testbed.clients[USERS[number % len(USERS)]]
        body = f'{{"profile": "anygpu", "server": "n{number}", "key": "many-{time.time_ns()}-{number}"}}'
        answer = client.broker.post("/leases", content=body)
        return answer.status_code, answer.headers.get("Retry-After")

    began = time.monotonic()
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(ask, range(100)))
    figure("answered_s", time.monotonic() - began)
    counts = Counter(status for status, _ in answers)
    assert set(counts) <= {201, 429}, counts
    assert all(after for status, after in answers if status == 429)
    wait_for(lambda: _granted(testbed) == 3, "three are granted", 30)
    rows = testbed.leases() or []
    assert len({gpu["uuid"] for row in rows for gpu in row["gpus"]}) == 3
    waiting = Counter(row["owner"] for row in rows if row["state"] == "requested")
    assert max(waiting.values()) <= 16
    assert counts[201] == len(rows)
    for row in rows:
        testbed.all.ask(testbed.all.broker, "DELETE", f"/leases/{row['id']}")


def _granted(testbed: FaultTestbed) -> int:
    return sum(row["state"] in {"granted", "active"} for row in testbed.leases() or ())


@pytest.mark.case("L1")
def test_ten_starts_at_once(testbed: FaultTestbed, figure: Figure) -> None:
    """Of ten starts through the hub three run, and the others run when those have ended."""
    wanted = [(name, f"n{number}") for number in range(2) for name in USERS]
    began = time.monotonic()
    for name, server in wanted:
        testbed.ask_start(name, server, "anygpu")
    wait_for(lambda: len(_ready(testbed, wanted)) == 3, "three are ready", 120)
    figure("three_ready_s", time.monotonic() - began)
    waiting = wanted
    while waiting:
        ready = wait_for(partial(_ready, testbed, waiting), "the next is ready", 120, every_s=0.5)
        for name, server in ready:
            testbed.stop(name, server)
        waiting = [one for one in waiting if one not in ready]
    figure("all_served_s", time.monotonic() - began)


def _ready(testbed: FaultTestbed, wanted: list[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(name, server) for name, server in wanted if testbed.clients[name].is_ready(server)}


@pytest.mark.case("L3")
async def test_ten_thousand_leases(tmp_path: Path, figure: Figure) -> None:
    """After 10,000 leases at a real broker on simulated nodes no open row, file or container is left; in time no row is."""
    setting = Setting(tmp_path)
    setting.clock = clock = AheadClock()
    async with asgi_broker(setting) as running, AsyncExitStack() as stack:
        # One user's requests would exceed the rate limits.
        clients = [await stack.enter_async_context(running.client(f"user{number}")) for number in range(OWNERS)]

        async def cycle(number: int) -> None:
            client = clients[number % OWNERS]
            body = {"profile": "any" if number % 4 else "cpu", "server": f"s{number % 8}", "key": f"k{number}"}
            answer = await client.post("/api/v1/leases", json=body)
            assert answer.status_code == 201, answer.text
            answer = await client.delete(f"/api/v1/leases/{answer.json()['id']}")
            assert answer.status_code == 200, answer.text

        async def cycles(numbers: range) -> None:
            for first in numbers[::AT_ONCE]:
                await asyncio.gather(*(cycle(number) for number in range(first, first + AT_ONCE)))

        # As many at once as later, so that the store has opened its connections.
        await cycles(range(200))
        gc.collect()
        before = _count_resources(setting)
        began = time.monotonic()
        await cycles(range(200, 200 + CYCLES))
        figure("cycles", CYCLES)
        figure("cycles_per_s", CYCLES / (time.monotonic() - began))
        async with asyncio.timeout(60):
            while running.core.ledger.snapshot.leases:  # noqa: ASYNC110 - the keeper gives no sign of its own
                await asyncio.sleep(0.1)
        gc.collect()
        after = _count_resources(setting)
        rows = _count_rows(running)
        opened = sum(map(len, running.store.load_open()))
        clock.ahead_s = max(setting.cluster.jobs.remember, LEASES_KEPT_S) + 3600.0
        await running.core.forget_ended()
        later = _count_rows(running)
    assert opened == 0
    assert rows["held_gpus"] == rows["gpu_modes"] == 0
    # Each lease is a row for some time, which is how much the store grows.
    assert rows["leases"] == 200 + CYCLES
    assert rows["events"] <= MAX_OWNER_EVENTS * OWNERS
    # What is left is a row for the usage of each owner, day and card, and one for each owner and node.
    assert later["leases"] == later["lease_gpus"] == 0
    assert later["usage_days"] <= OWNERS * 3 * 2
    assert later["lease_ends"] <= OWNERS * 3
    # The store may have a few more connections of three files each; a leak would have thousands.
    assert after["files"] <= before["files"] + 30
    assert after["containers"] == before["containers"]
    assert after["tasks"] <= before["tasks"] + 5


def _count_rows(running: Running) -> dict[str, int]:
    with running.store._engine.connect() as connection:
        return {
            table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in tables.metadata.sorted_tables
        }


def _count_resources(setting: Setting) -> dict[str, int]:
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "containers": sum(len(node.containers) for node in setting.nodes.values()),
        "tasks": len(asyncio.all_tasks()),
    }
