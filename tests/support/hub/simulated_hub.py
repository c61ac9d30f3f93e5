"""The real proxy and hub, and a real broker on simulated nodes that knows the hub's tokens: pages with GPUs, no Docker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gpuhub.broker.controllers.hub_client import HubClient
from gpuhub.common import names, secrets
from tests.support.broker.in_process import Running, Setting, served_broker
from tests.support.docker.simulated_nodes import CLOSET, simulated_nodes
from tests.support.hub.served_hub import HUB_CONFIG, ServedHub

_NODE = """
[[nodes]]
name = "{name}"
address = "127.0.1.{number}"
docker = "unix:///nowhere/{name}.sock"
"""
SETTINGS = """
{nodes}
[[profiles]]
name = "rtx5090"
title = "RTX 5090"
gpu_model = "RTX 5090"
time_limit = "4h"
[[profiles]]
name = "any"
title = "Any GPU"
time_limit = "8h"
[[profiles]]
name = "cpu"
title = "No GPU"
gpu_count = 0
[users]
login = "password"
allowed = ["ada", "ben"]
admins = ["root1"]
uid_first = 20000
longest_lease = "24h"
[storage]
home = "{homes}/{{{{username}}}}"
{tables}
"""


_keys = itertools.count(1)


@dataclass
class SimulatedHub:
    """A running hub with GPUs."""

    served: ServedHub
    running: Running

    @property
    def url(self) -> str:
        """The address for browsers."""
        return f"http://127.0.0.1:{self.served.port}"

    def send(self, method: str, path: str, owner: str = "ada", status: int = 200, **arguments: Any) -> Any:
        """Call the broker for a user, and return its answer."""
        answer = self.running.send(method, f"/api/v1{path}", self._tokens[owner], **arguments)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def token(self, owner: str) -> str:
        """Return the token of a user."""
        return self._tokens[owner]

    def request_notebook(self, owner: str, profile: str, server: str = "") -> Any:
        """Request a lease as the hub's spawner does, and start the notebook where it was granted."""
        body = {"profile": profile, "server": server, "key": f"test-{next(_keys)}", "owner": owner}
        token = secrets.read_secret(self.served.paths, secrets.SPAWNER_TOKEN)
        answer = self.running.send("POST", "/api/v1/leases", token, json=body)
        assert answer.status_code == 201, answer.text
        lease = answer.json()
        if lease["state"] == "granted":
            labels = {
                names.LABEL_KIND: names.KIND_NOTEBOOK,
                names.LABEL_LEASE: lease["id"],
                names.LABEL_EPOCH: str(lease["epoch"]),
                names.LABEL_OWNER: owner,
            }
            node = self.running.setting.nodes[lease["nodes"][0]]
            container = node.run_container(labels, state="created")
            path = f"/api/v1/leases/{lease['id']}/activate"
            assert self.running.send("POST", path, token, json={"container_id": container}).status_code == 200
            node.containers[container]["State"] = "running"
        return lease

    def make_tokens(self, *users: str) -> None:
        """Log users in, and keep a token of each."""
        self._tokens = {name: self._make_token(name) for name in users}

    def _make_token(self, name: str) -> str:
        with httpx.Client(base_url=f"{self.url}/hub", timeout=20, trust_env=False) as browser:
            browser.get("/login")
            kind = secrets.ADMIN_PASSWORD if name == "root1" else secrets.USER_PASSWORD
            form = {
                "username": name,
                "password": secrets.read_secret(self.served.paths, kind),
                "_xsrf": browser.cookies["_xsrf"],
            }
            assert browser.post("/login", data=form).status_code == 302
            browser.get("/home")
            browser.headers["X-XSRFToken"] = next(c.value or "" for c in browser.cookies.jar if c.name == "_xsrf")
            answer = browser.post(f"/api/users/{name}/tokens", json={"note": "test"})
            return str(answer.json()["token"])


@contextmanager
def simulated_hub(
    instance: str,
    folder: Path,
    first_port: int,
    cards: dict[str, list[tuple[str, int]]] = CLOSET,
    keys: Mapping[str, str] | None = None,
    tables: str = "",
    config: str = HUB_CONFIG,
) -> Iterator[SimulatedHub]:
    """Start proxy, hub and broker, and end them with the block.

    Args:
        keys: Further lines of the tables of some nodes, by node.
        tables: Further tables of cluster.toml, without braces.
        config: The hub's configuration, as that of a `ServedHub`.
    """
    nodes = "".join(
        # The served hub formats the text once more.
        _NODE.format(name=name, number=number) + (keys or {}).get(name, "").replace("{", "{{").replace("}", "}}")
        for number, name in enumerate(cards, 1)
    )
    settings = SETTINGS.format(nodes=nodes, homes=folder / "homes", tables=tables)
    served = ServedHub(instance, folder, "internal_tls = false", first_port, settings=settings, config=config)
    try:
        served.start("proxy", "hub")
        token = secrets.read_secret(served.paths, secrets.BROKER_TOKEN)
        setting = Setting(folder, cluster=served.cluster, nodes=simulated_nodes(cards))
        setting.own_token = token
        setting.spawner_token = secrets.read_secret(served.paths, secrets.SPAWNER_TOKEN)
        api_port = served.cluster.hub.api_port
        setting.hub = HubClient(f"http://127.0.0.1:{api_port}/hub/api", token, tls=None)  # type: ignore[assignment]
        with served_broker(setting, port=served.cluster.hub.broker_port) as running:
            yield SimulatedHub(served, running)
    finally:
        served.stop()
