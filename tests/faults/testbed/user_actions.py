"""Users' actions on the running product and its responses, over the APIs of hub and broker."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx

from gpuhub.ops.deploy.programs import Supervisor
from tests.faults.testbed.node_access import NodeAccess
from tests.support.closet.observer import Observer, SeenContainer
from tests.support.hub.users import Client
from tests.support.product import wait_for


@dataclass(slots=True, kw_only=True)
class UserActions(NodeAccess):
    """The running product as its users see it, and its daemons directly."""

    observer: Observer
    supervisor: Supervisor
    address: str = ""
    clients: dict[str, Client] = field(default_factory=dict)
    all_owners: Client | None = None

    @property
    def all(self) -> Client:
        """A client that sees every lease."""
        assert self.all_owners is not None
        return self.all_owners

    def is_live(self, timeout_s: float = 5) -> bool:
        """Return whether hub and broker answer, each within the timeout."""
        try:
            hub = httpx.get(f"{self.address}/hub/api/", trust_env=False, timeout=timeout_s)
            broker = httpx.get(f"{self.address}/services/broker/health", trust_env=False, timeout=timeout_s)
        except httpx.TransportError:
            return False
        return hub.status_code == broker.status_code == 200

    def cluster(self) -> dict[str, Any]:
        """Return the cluster as all users see it; empty while the broker does not answer."""
        status, answer = self.all.ask(self.all.broker, "GET", "/cluster")
        return answer if status == 200 else {"nodes": [], "profiles": [], "queue": []}

    def node(self, name: str) -> dict[str, Any]:
        """Return a node as all users see it; empty while the broker does not answer."""
        return next((node for node in self.cluster()["nodes"] if node["name"] == name), {})

    def gpu(self, node: str) -> dict[str, Any]:
        """Return the first GPU of a node as all users see it."""
        row: dict[str, Any] = next(iter(self.node(node).get("gpus", ())), {})
        return row

    def are_all_free(self) -> bool:
        """Return whether every node is up and every GPU free."""
        nodes = self.cluster()["nodes"]
        return bool(nodes) and all(
            node["state"] == "up" and node["gpus"] and all(gpu["state"] == "free" for gpu in node["gpus"])
            for node in nodes
        )

    def describe(self) -> str:
        """Explain which GPUs are not free."""
        status, answer = self.all.ask(self.all.broker, "GET", "/cluster")
        if status != 200:
            return f"the broker answers {status}: {answer}"
        lines = [
            f"{node['name']} is {node['state']} ({node['message']}), its GPUs "
            + ", ".join(f"{gpu['state']} ({gpu['message']})" for gpu in node["gpus"])
            for node in answer["nodes"]
        ]
        return "all GPUs are free: " + "; ".join(lines)

    def leases(self) -> list[dict[str, Any]] | None:
        """Return every lease that has not ended; None while the broker does not answer."""
        status, rows = self.all.ask(self.all.broker, "GET", "/leases")
        return rows if status == 200 else None

    def lease_of(self, name: str, server: str) -> dict[str, Any]:
        """Return the newest lease of a user's server once the broker answers; empty for none."""
        rows = wait_for(lambda: (leases,) if (leases := self.leases()) is not None else None, "the broker lists leases")
        return next((row for row in reversed(rows[0]) if row["owner"] == name and row["subject"] == server), {})

    def events(self, *kinds: str, after: int = 0) -> list[dict[str, Any]]:
        """Return the broker's events after that number."""
        status, rows = self.all.ask(self.all.broker, "GET", f"/events?after={after}&limit=1000")
        assert status == 200, rows
        return [row for row in rows if not kinds or row["kind"] in kinds]

    def last_event(self) -> int:
        """Return the newest event's number."""
        _, rows = self.all.ask(self.all.broker, "GET", "/events?limit=1")
        return rows[-1]["seq"] if rows else 0

    # -- users' doings --------------------------------------------------------------------------------------------

    def start(self, name: str, server: str, profile: str = "light", deadline_s: float = 60) -> SeenContainer:
        """Start a server and return its container when it is ready."""
        self.ask_start(name, server, profile)
        return self.wait_ready(name, server, deadline_s)

    def start_beside(self, name: str, other: SeenContainer) -> SeenContainer:
        """Start servers without a GPU until one is on the node of that container, and return it."""
        for number in range(8):
            seen = self.start(name, f"s{number}", "light")
            if seen.node == other.node:
                return seen
        raise AssertionError(f"none of {name}'s 8 servers is on {other.node}")

    def ask_start(self, name: str, server: str, profile: str = "light", **options: str) -> None:
        """Request a server; `options` are further ones of the spawn form."""
        self.clients[name].start(server, profile, **options)

    def wait_ready(self, name: str, server: str, deadline_s: float = 60) -> SeenContainer:
        """Return a server's container when the hub calls the server ready."""
        client = self.clients[name]
        wait_for(
            lambda: client.is_ready(server),
            lambda: f"{name}'s {server} is ready: {self.last_message(name, server)}",
            deadline_s,
        )
        return wait_for(lambda: self.container(name, server), f"{name}'s {server} has a container")

    def container(self, name: str, server: str) -> SeenContainer | None:
        """Return the running container of a user's server."""
        lease = self.lease_of(name, server)
        return next((seen for seen in self.observer.running() if seen.lease == lease.get("id")), None)

    def stop(self, name: str, server: str) -> None:
        """Stop a server and wait until it is gone."""
        self.clients[name].stop(server)
        wait_for(lambda: self.is_gone(name, server), f"{name}'s {server} is gone", 60)

    def is_gone(self, name: str, server: str) -> bool:
        """Return whether the hub has no such server of the user."""
        servers = self.clients[name].servers()
        return servers is not None and server not in servers

    def last_message(self, name: str, server: str) -> str:
        """Return the last message of a start."""
        messages = self.messages_of_start(name, server)
        return messages[-1] if messages else ""

    def messages_of_start(self, name: str, server: str) -> list[str]:
        """Return the messages of a start, while it runs or after it failed."""
        path = f"/users/{name}/servers/{server}/progress"
        messages: list[str] = []
        end = time.monotonic() + 3
        try:
            with self.clients[name].hub.stream("GET", path, timeout=3) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data:"):
                        messages.append(json.loads(line.removeprefix("data:")).get("message", ""))
                    if time.monotonic() > end:
                        break
        except httpx.TransportError:
            return messages
        return messages

    def find_refusal(self, name: str, server: str, profile: str) -> str:
        """Return the error of a start that fails, at once or later."""
        client = self.clients[name]
        status, answer = client.ask(client.hub, "POST", f"/users/{name}/servers/{server}", {"profile": profile})
        return answer["message"] if status >= 400 else self.wait_failed(name, server)

    def wait_failed(self, name: str, server: str, deadline_s: float = 60) -> str:
        """Wait until the start has failed and return its error."""
        client = self.clients[name]
        messages: list[str] = []

        def failed() -> bool:
            servers = client.servers()
            row = (servers or {}).get(server) or {}
            if servers is None or row.get("pending") or row.get("ready"):
                return False
            # Messages of a start that is still running are not errors.
            messages[:] = self.messages_of_start(name, server)
            return bool(messages)

        wait_for(failed, f"the start of {name}'s {server} fails", deadline_s)
        return messages[-1]

    def submit_job(self, name: str, nodes: int) -> dict[str, Any]:
        """Submit a detached job with a worker of one GPU on each node, and return it when all run."""
        body = {"run_id": f"run-{uuid.uuid4().hex[:10]}", "nnodes": nodes, "detached": True, "profile": "light"}
        client = self.clients[name]
        status, job = client.ask(client.broker, "POST", "/jobs", body)
        assert status == 201, job

        def runs() -> dict[str, Any] | None:
            current = self.find_job(name, job["id"])
            return current if current.get("state") == "running" else None

        return wait_for(runs, f"job {job['id']} runs", 60)

    def find_job(self, name: str, job: str) -> dict[str, Any]:
        """Return the job's current state."""
        status, answer = self.clients[name].ask(self.clients[name].broker, "GET", f"/jobs/{job}")
        return answer if status == 200 else {}

    def execute(self, seen: SeenContainer, *command: str) -> tuple[int, str]:
        """Run a command in a container as its user; return exit status and output."""
        with closing(self.client_of(seen.node)) as client:
            created = client.exec_create(seen.id, list(command))
            output = client.exec_start(created["Id"])
            return int(client.exec_inspect(created["Id"])["ExitCode"]), output.decode("utf-8", "replace")
