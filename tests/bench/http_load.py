"""Five hundred clients at once on the broker's HTTP API: requests a second, times to the answer, and no error.

The broker is a process of its own with uvicorn, as in production, on simulated nodes. Each client is a user with one
kept connection who comes back without a pause to: ask for a GPU, look at the cluster, long-poll for the grant, ask why
it waits, release, wait for the end. The time of a long poll is not a time to an answer, so those are counted, and not
timed. The clients run beside the broker on the same machine and take a core of it.
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

from tests.bench.product import tell
from tests.support.brokers import API
from tests.support.lean_http import Connection
from tests.support.serve_simulated import PROFILE, Served, serving

CLIENTS = 500
NODES = 50
GPUS = 8
WARM_UP_S = 5.0
SECONDS = 30.0
#: A long poll's wait, seconds.
POLL_S = 2
#: A lease is kept for so many looks at the cluster: 500 clients on 400 GPUs wait for each other.
LOOKS = 2


@dataclass(slots=True)
class Tally:
    """What the clients saw; kept from `begin` on."""

    begin: float
    end: float
    answers: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def note(self, what: str, began: float, status: int, expected: frozenset[int], *, is_timed: bool) -> None:
        """One answer."""
        now = time.monotonic()
        if status not in expected:
            self.errors[f"{what}: {status}"] += 1
        if not self.begin <= now < self.end:
            return
        self.answers[what] += 1
        if is_timed:
            self.seconds.append(now - began)

    def percentile_ms(self, percent: float) -> float:
        """Of the timed answers."""
        return 1000 * sorted(self.seconds)[int(len(self.seconds) * percent / 100)]


@dataclass(slots=True)
class User:
    """One client."""

    name: str
    connection: Connection
    tally: Tally

    async def live(self) -> None:
        """Lease after lease, until the end."""
        number = 0
        while time.monotonic() < self.tally.end:
            number += 1
            lease = await self._send("POST", "/leases", {"profile": PROFILE, "key": f"k{number}"}, {201})
            path = f"/leases/{lease['id']}"
            lease = await self._wait(path, lease, {"granted"})
            for _ in range(LOOKS):
                await self._send("GET", "/cluster")
            await self._send("DELETE", path)
            await self._wait(path, lease, {"released"})

    async def _wait(self, path: str, lease: dict[str, Any], states: set[str]) -> dict[str, Any]:
        """Poll until the lease is in one of the states, asking why while it waits; or until the end."""
        while lease["state"] not in states and time.monotonic() < self.tally.end:
            if lease["state"] == "requested":
                # Granted meanwhile: a lease that does not wait has no why.
                await self._send("GET", f"{path}/why", None, {200, 409})
            lease = await self._send("GET", f"{path}?wait_s={POLL_S}&version={lease['version']}", is_poll=True)
        return lease

    async def _send(
        self, method: str, path: str, body: Any = None, expected: set[int] | None = None, *, is_poll: bool = False
    ) -> Any:
        what = f"{method} {path.split('?')[0].split('/')[1]}{' why' if path.endswith('why') else ''}"
        began = time.monotonic()
        status, answer = await self.connection.send(method, path, body)
        name = f"{what} (poll)" if is_poll else what
        self.tally.note(name, began, status, frozenset(expected or {200}), is_timed=not is_poll)
        return answer


def measure() -> Iterator[tuple[str, float, str]]:
    """The figures `broker.api_…`; any error fails the benchmark."""
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-http-") as folder,
        serving(Path(folder), nodes=NODES, gpus=GPUS) as served,
    ):
        tally = asyncio.run(_load(served))
    tell(f"answers: {dict(tally.answers)}; errors: {dict(tally.errors)}")
    if tally.errors:
        raise AssertionError(f"the API answered with errors: {dict(tally.errors)}")
    yield "broker.api_clients", CLIENTS, "clients"
    yield "broker.api_requests_per_s", tally.answers.total() / SECONDS, "1/s"
    yield "broker.api_p50_ms", tally.percentile_ms(50), "ms"
    yield "broker.api_p99_ms", tally.percentile_ms(99), "ms"
    yield "broker.api_errors", tally.errors.total(), "answers"


async def _load(served: Served) -> Tally:
    names = [f"user{number}" for number in range(CLIENTS)]
    connections = [await Connection.open(served.host, served.port, prefix=API, token=name) for name in names]
    begin = time.monotonic() + WARM_UP_S
    tally = Tally(begin=begin, end=begin + SECONDS)
    users = [User(name=name, connection=c, tally=tally) for name, c in zip(names, connections, strict=True)]
    await asyncio.gather(*(user.live() for user in users))
    await asyncio.gather(*(connection.close() for connection in connections))
    return tally
