"""Users' load on the hub's REST API and the broker's API: notebooks that start and stop, and jobs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.hub.users import AWAY, Client


@dataclass(slots=True)
class UserLoad:
    """Threads that use the product until `over` is set; `calm` lets them finish their current action and wait."""

    clients: list[Client]
    seed: int
    profiles: tuple[str, ...]
    calm: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    done: dict[str, int] = field(default_factory=lambda: {"notebooks": 0, "jobs": 0})
    _busy: list[bool] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Start two threads for each user: one for servers, one for jobs."""
        for number, client in enumerate(self.clients):
            for action in (self._serve, self._launch):
                chance = random.Random(f"{self.seed}-{number}-{action.__name__}")
                self._busy.append(False)
                index = len(self._busy) - 1
                thread = threading.Thread(target=self._repeat, args=(index, action, client, chance))
                self._threads.append(thread)
                thread.start()

    def end(self) -> None:
        """Stop and join all threads."""
        self.over.set()
        for thread in self._threads:
            thread.join(180)

    def pause(self, deadline_s: float = 300.0) -> None:
        """Wait until no thread is in an action; none begins another before `calm` is cleared."""
        self.calm.set()
        end = time.monotonic() + deadline_s
        while any(self._busy):
            assert time.monotonic() < end, "a thread is still waiting for a server or a job"
            time.sleep(0.2)

    def _repeat(
        self, index: int, action: Callable[[Client, random.Random], None], client: Client, chance: random.Random
    ) -> None:
        while not self.over.is_set():
            if self.calm.is_set():
                time.sleep(0.2)
                continue
            self._busy[index] = True
            try:
                action(client, chance)
            except (AssertionError, KeyError, TypeError) as error:
                self.failures.append(f"{client.name}: {error!r}")
            finally:
                self._busy[index] = False
            self.over.wait(chance.uniform(0.5, 2.0))

    def _serve(self, client: Client, chance: random.Random) -> None:
        """Start a server, use it for a while, and stop it; a queued start may be cancelled."""
        client.start("passing", chance.choice(self.profiles))
        end = time.monotonic() + chance.uniform(5, 20)
        is_ready = False
        while time.monotonic() < end and not self.calm.is_set():
            is_ready = is_ready or client.is_ready("passing")
            time.sleep(0.5)
        self.done["notebooks"] += is_ready
        client.stop("passing")
        self._until_gone(client)

    def _until_gone(self, client: Client, deadline_s: float = 90.0) -> None:
        end = time.monotonic() + deadline_s
        while True:
            servers = client.servers()
            if servers is not None and "passing" not in servers and self._has_left(client):
                return
            if servers is not None and "passing" in servers and not servers["passing"].get("pending"):
                client.stop("passing")
            assert time.monotonic() < end, f"the hub still has {client.name}'s passing server: {servers}"
            time.sleep(1)

    def _has_left(self, client: Client) -> bool:
        """Return whether no request is left; delete those of a killed hub, which keep their index in the queue."""
        status, rows = client.ask(client.broker, "GET", "/leases")
        waits = [row for row in rows if row["subject"] == "passing"] if status == 200 else []
        for row in waits:
            client.ask(client.broker, "DELETE", f"/leases/{row['id']}")
        return status == 200 and not waits

    def _launch(self, client: Client, chance: random.Random) -> None:
        """Submit a job of one or two nodes, renew it for a while, and delete it."""
        body = {"run_id": f"run-{chance.randrange(16**10):010x}", "nnodes": chance.randint(1, 2), "nproc_per_node": 1}
        job = self._insist(client, "POST", "/jobs", body)
        end = time.monotonic() + chance.uniform(3, 12)
        while time.monotonic() < end and not self.calm.is_set():
            client.ask(client.broker, "POST", f"/jobs/{job['id']}/renew")
            time.sleep(1)
        self._insist(client, "DELETE", f"/jobs/{job['id']}")
        self.done["jobs"] += 1

    def _insist(self, client: Client, method: str, path: str, body: Any = None, deadline_s: float = 90.0) -> Any:
        end = time.monotonic() + deadline_s
        while True:
            status, answer = client.ask(client.broker, method, path, body)
            if status < 300:
                return answer
            assert status in AWAY and time.monotonic() < end, f"{method} {path}: {status} {answer}"
            time.sleep(0.5)
