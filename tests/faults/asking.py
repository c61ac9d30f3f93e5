"""What users do on the running product, and what it says: over the hub's and the broker's own APIs."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx

from gpuhub.head.supervisor import Supervisor
from tests.faults.ways import Ways
from tests.support.observer import Observer, Seen
from tests.support.product import wait_for
from tests.support.users import Client


@dataclass(slots=True, kw_only=True)
class Asking(Ways):
    """The running product as its users see it, and the daemons past it."""

    observer: Observer
    supervisor: Supervisor
    address: str = ""
    clients: dict[str, Client] = field(default_factory=dict)
    everybody: Client | None = None

    @property
    def all(self) -> Client:
        """Somebody who sees every lease."""
        assert self.everybody is not None
        return self.everybody

    def is_live(self) -> bool:
        """Whether hub and broker answer."""
        try:
            hub = httpx.get(f"{self.address}/hub/api/", trust_env=False, timeout=5)
            broker = httpx.get(f"{self.address}/services/broker/health", trust_env=False, timeout=5)
        except httpx.TransportError:
            return False
        return hub.status_code == broker.status_code == 200

    def cluster(self) -> dict[str, Any]:
        """What everybody sees; nothing while the broker does not tell."""
        status, found = self.all.ask(self.all.broker, "GET", "/cluster")
        return found if status == 200 else {"nodes": [], "profiles": [], "queue": []}

    def node(self, name: str) -> dict[str, Any]:
        """One node as everybody sees it; empty while the broker does not tell."""
        return next((node for node in self.cluster()["nodes"] if node["name"] == name), {})

    def gpu(self, node: str) -> dict[str, Any]:
        """The first GPU of a node as everybody sees it."""
        found: dict[str, Any] = next(iter(self.node(node).get("gpus", ())), {})
        return found

    def are_all_free(self) -> bool:
        """Whether every node is up and every GPU free."""
        nodes = self.cluster()["nodes"]
        return bool(nodes) and all(
            node["state"] == "up" and node["gpus"] and all(gpu["state"] == "free" for gpu in node["gpus"])
            for node in nodes
        )

    def describe(self) -> str:
        """Why not everything is free."""
        status, found = self.all.ask(self.all.broker, "GET", "/cluster")
        if status != 200:
            return f"the broker says {status}: {found}"
        lines = [
            f"{node['name']} is {node['state']} ({node['message']}), its GPUs "
            + ", ".join(f"{gpu['state']} ({gpu['message']})" for gpu in node["gpus"])
            for node in found["nodes"]
        ]
        return "all GPUs are free: " + "; ".join(lines)

    def leases(self) -> list[dict[str, Any]] | None:
        """Every lease that has not ended; None while the broker does not tell."""
        status, rows = self.all.ask(self.all.broker, "GET", "/leases")
        return rows if status == 200 else None

    def lease_of(self, name: str, server: str) -> dict[str, Any]:
        """The newest lease of a user's server, as soon as the broker tells; empty where there is none."""
        rows = wait_for(
            lambda: (found,) if (found := self.leases()) is not None else None, "the broker tells of leases"
        )
        return next((row for row in reversed(rows[0]) if row["owner"] == name and row["subject"] == server), {})

    def events(self, *kinds: str, after: int = 0) -> list[dict[str, Any]]:
        """What the broker did since that number."""
        status, rows = self.all.ask(self.all.broker, "GET", f"/events?after={after}&limit=1000")
        assert status == 200, rows
        return [row for row in rows if not kinds or row["kind"] in kinds]

    def last_event(self) -> int:
        """The number of the newest event."""
        _, rows = self.all.ask(self.all.broker, "GET", "/events?limit=1")
        return rows[-1]["seq"] if rows else 0

    # -- users' doings --------------------------------------------------------------------------------------------

    def start(self, name: str, server: str, profile: str = "light", deadline_s: float = 60) -> Seen:
        """A server that is ready; its container."""
        self.ask_start(name, server, profile)
        return self.wait_ready(name, server, deadline_s)

    def ask_start(self, name: str, server: str, profile: str = "light") -> None:
        """Ask for a server."""
        self.clients[name].start(server, profile)

    def wait_ready(self, name: str, server: str, deadline_s: float = 60) -> Seen:
        """Its container, as soon as the hub calls the server ready."""
        client = self.clients[name]
        wait_for(
            lambda: client.is_ready(server), f"{name}'s {server} is ready: {self.last_word(name, server)}", deadline_s
        )
        return wait_for(lambda: self.container(name, server), f"{name}'s {server} has a container")

    def container(self, name: str, server: str) -> Seen | None:
        """The running container of a user's server."""
        lease = self.lease_of(name, server)
        return next((seen for seen in self.observer.running() if seen.lease == lease.get("id")), None)

    def stop(self, name: str, server: str) -> None:
        """Stop a server and wait until it is gone."""
        self.clients[name].stop(server)
        wait_for(lambda: self.is_gone(name, server), f"{name}'s {server} is gone", 60)

    def is_gone(self, name: str, server: str) -> bool:
        """Whether the hub has no such server of the user."""
        servers = self.clients[name].servers()
        return servers is not None and server not in servers

    def last_word(self, name: str, server: str) -> str:
        """What the user was told last about a start."""
        said = self.words(name, server)
        return said[-1] if said else ""

    def words(self, name: str, server: str) -> list[str]:
        """What the user is told about a start, while it goes on or since it failed."""
        path = f"/users/{name}/servers/{server}/progress"
        said: list[str] = []
        end = time.monotonic() + 3
        try:
            with self.clients[name].hub.stream("GET", path, timeout=3) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data:"):
                        said.append(json.loads(line.removeprefix("data:")).get("message", ""))
                    if time.monotonic() > end:
                        break
        except httpx.TransportError:
            return said
        return said

    def refusal(self, name: str, server: str, profile: str) -> str:
        """What the user is told of a start that fails, at once or later."""
        client = self.clients[name]
        status, said = client.ask(client.hub, "POST", f"/users/{name}/servers/{server}", {"profile": profile})
        return said["message"] if status >= 400 else self.failure(name, server)

    def failure(self, name: str, server: str, deadline_s: float = 60) -> str:
        """What the user is told when the start has failed; waits until it has."""
        client = self.clients[name]
        said: list[str] = []

        def failed() -> bool:
            servers = client.servers()
            found = (servers or {}).get(server) or {}
            if servers is None or found.get("pending") or found.get("ready"):
                return False
            # Only now: what was told while it went on is no failure.
            said[:] = self.words(name, server)
            return bool(said)

        wait_for(failed, f"the start of {name}'s {server} fails", deadline_s)
        return said[-1]

    def job(self, name: str, nodes: int) -> dict[str, Any]:
        """A detached job with a worker of one GPU on so many nodes, when all run."""
        body = {"run_id": f"run-{uuid.uuid4().hex[:10]}", "nnodes": nodes, "detached": True, "profile": "light"}
        client = self.clients[name]
        status, job = client.ask(client.broker, "POST", "/jobs", body)
        assert status == 201, job

        def runs() -> dict[str, Any] | None:
            found = self.job_now(name, job["id"])
            return found if found.get("state") == "running" else None

        return wait_for(runs, f"job {job['id']} runs", 60)

    def job_now(self, name: str, job: str) -> dict[str, Any]:
        """The job as it is."""
        status, found = self.clients[name].ask(self.clients[name].broker, "GET", f"/jobs/{job}")
        return found if status == 200 else {}

    def execute(self, seen: Seen, *command: str) -> tuple[int, str]:
        """Run something in a container as its user; exit status and output."""
        with closing(self.client_of(seen.node)) as client:
            made = client.exec_create(seen.id, list(command))
            output = client.exec_start(made["Id"])
            return int(client.exec_inspect(made["Id"])["ExitCode"]), output.decode("utf-8", "replace")
