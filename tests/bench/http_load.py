"""The load of 500 clients on the broker's HTTP API: requests a second, latencies and errors.

The broker is a separate process with uvicorn, as in production, on simulated nodes. Each client is a user with one
kept-alive connection that repeats without a pause: request a GPU, read the cluster, long-poll for the grant, read why
the request waits, release the lease, wait for its end. Long polls are counted but not timed: they last as long as the
lease does not change. The clients run on the broker's machine and take one core of it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.product import print_progress
from tests.support.broker.in_process import API
from tests.support.broker.process import PROFILE, Connection, Served, serving

CLIENTS = 500
NODES = 50
GPUS = 8
WARM_UP_S = 5.0
SECONDS = 30.0
#: A long poll's wait, seconds.
POLL_S = 2
#: Reads of the cluster before a client releases its lease: 500 clients on 400 GPUs wait for each other.
CLUSTER_READS = 2


@dataclass(slots=True)
class Tally:
    """The responses that the clients received between `begin` and `end`, in monotonic seconds."""

    begin: float
    end: float
    answers: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def count(self, request: str, began: float, *, is_timed: bool) -> None:
        """Count a response to the named request."""
        now = time.monotonic()
        if not self.begin <= now < self.end:
            return
        self.answers[request] += 1
        if is_timed:
            self.seconds.append(now - began)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the timed responses, in milliseconds."""
        return 1000 * sorted(self.seconds)[int(len(self.seconds) * percent / 100)]


@dataclass(slots=True)
class User:
    """A user of the broker with one connection."""

    name: str
    connection: Connection
    tally: Tally

    async def cycle_leases(self) -> None:
        """Request and release one lease after the other until the end."""
        number = 0
        while time.monotonic() < self.tally.end:
            number += 1
            lease = await self._send("POST", "/leases", {"profile": PROFILE, "key": f"k{number}"}, {201})
            path = f"/leases/{lease['id']}"
            lease = await self._wait(path, lease, {"granted"})
            for _ in range(CLUSTER_READS):
                await self._send("GET", "/cluster")
            await self._send("DELETE", path)
            await self._wait(path, lease, {"released"})

    async def _wait(self, path: str, lease: dict[str, Any], states: set[str]) -> dict[str, Any]:
        """Poll until the lease is in one of the states or the measurement ends; read the reason while it waits."""
        while lease["state"] not in states and time.monotonic() < self.tally.end:
            if lease["state"] == "requested":
                # 409: the lease was granted in the meantime and has no reason to wait any more.
                await self._send("GET", f"{path}/why", None, {200, 409})
            lease = await self._send("GET", f"{path}?wait_s={POLL_S}&version={lease['version']}", is_poll=True)
        return lease

    async def _send(
        self, method: str, path: str, body: Any = None, expected: set[int] | None = None, *, is_poll: bool = False
    ) -> Any:
        request = f"{method} {path.split('?')[0].split('/')[1]}{' why' if path.endswith('why') else ''}"
        began = time.monotonic()
        status, answer = await self.connection.send(method, path, body)
        name = f"{request} (poll)" if is_poll else request
        self.tally.count(name, began, is_timed=not is_poll)
        if status not in (expected or {200}):
            raise AssertionError(f"{self.name}: the API answered {name} with {status}: {answer}")
        return answer


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures `broker.api_…`.

    Raises:
        AssertionError: The API responded with an error, which it names.
    """
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-http-") as folder,
        serving(Path(folder), nodes=NODES, gpus=GPUS) as served,
    ):
        tally = asyncio.run(_load(served))
    print_progress(f"answers: {dict(tally.answers)}")
    yield "broker.api_clients", CLIENTS, "clients"
    yield "broker.api_requests_per_s", tally.answers.total() / SECONDS, "1/s"
    yield "broker.api_p50_ms", tally.percentile_ms(50), "ms"
    yield "broker.api_p99_ms", tally.percentile_ms(99), "ms"


async def _load(served: Served) -> Tally:
    names = [f"user{number}" for number in range(CLIENTS)]
    connections = [await Connection.open(served.host, served.port, prefix=API, token=name) for name in names]
    begin = time.monotonic() + WARM_UP_S
    tally = Tally(begin=begin, end=begin + SECONDS)
    users = [User(name=name, connection=c, tally=tally) for name, c in zip(names, connections, strict=True)]
    await asyncio.gather(*(user.cycle_leases() for user in users))
    await asyncio.gather(*(connection.close() for connection in connections))
    return tally
