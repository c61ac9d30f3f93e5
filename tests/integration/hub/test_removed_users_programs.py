"""What a user who is taken out of cluster.toml has open and running: the real hub and broker, on simulated nodes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import websocket

from gpuhub.common import names
from tests.support.hub.port_server import served_port
from tests.support.hub.sessions import log_in
from tests.support.hub.simulated_hub import SimulatedHub, simulated_hub
from tests.support.product import wait_for

#: What docs/rights.md promises, seconds.
LIMIT_S = 60.0
#: A public key without a private one: sshd waits for the login for two minutes.
KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'x' * 43}"


@pytest.fixture
def sshd_folder() -> None:
    """Make the folder that root's sshd needs, as its service does; couriers of simulated nodes run as the tests do."""
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SimulatedHub]:
    """A running hub with three nodes."""
    with simulated_hub("ghgonep", tmp_path, 18470) as started:
        started.make_tokens("ada", "ben", "root1")
        yield started


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what the test opens."""
    with ExitStack() as opened:
        yield opened


def run_job(hub: SimulatedHub, owner: str, run: str, state: str, **more: Any) -> str:
    """Submit a job, and return its id when it has this state."""
    body = {"run_id": run, "detached": True} | more
    job = str(hub.send("POST", "/jobs", owner, 201, json=body)["id"])
    wait_for(lambda: hub.send("GET", f"/jobs/{job}", owner)["state"] == state, f"{run} is {state}", 30)
    return job


def follow(read: Callable[[], Any]) -> threading.Event:
    """Read a connection in a thread, and return an event that is set at its end."""
    ended = threading.Event()

    def run() -> None:
        with suppress(httpx.HTTPError, websocket.WebSocketException, OSError, StopIteration):
            while read():
                pass
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    return ended


def open_websocket(hub: SimulatedHub, stack: ExitStack, owner: str, path: str, **query: str) -> websocket.WebSocket:
    """Connect with the broker as a program of a user."""
    url = f"{hub.running.url.replace('http', 'ws', 1)}{path}?{urlencode(query)}"
    opened = websocket.create_connection(
        url, header=[f"Authorization: token {hub.token(owner)}"], suppress_origin=True, timeout=2 * LIMIT_S
    )
    stack.callback(opened.shutdown)
    return opened


def open_ssh(hub: SimulatedHub, stack: ExitStack, owner: str, job: str) -> Callable[[], Any]:
    """Connect with sshd in a job, and return how its next bytes are read."""
    opened = open_websocket(hub, stack, owner, f"/api/v1/jobs/{job}/ssh", key=KEY)
    assert b'"host_key": "ssh-ed25519 ' in opened.recv()
    return opened.recv


def open_stream(stack: ExitStack, client: httpx.Client, url: str) -> Callable[[], Any]:
    """Open a response without an end, and return how its next part is read."""
    response = stack.enter_context(client.stream("GET", url, timeout=2 * LIMIT_S))
    assert response.status_code == 200
    parts = response.iter_raw()
    return lambda: next(parts)


def test_all_that_a_removed_user_has_ends_within_a_minute(
    hub: SimulatedHub, stack: ExitStack, sshd_folder: None
) -> None:
    """A notebook, a running and a waiting job, a terminal, SSH, a log, pages and another user's server; ada keeps hers."""
    server = stack.enter_context(served_port())
    work = {"models": ["RTX 5090"]}
    hub.request_notebook("ben", "any")
    jobs = {"ben": run_job(hub, "ben", "run-000001", "running", **work)}
    waiting = run_job(hub, "ben", "run-000002", "waiting", **work)
    jobs["ada"] = run_job(hub, "ada", "run-000003", "running", port=server.port, port_users=["ben"])
    ends: dict[str, dict[str, threading.Event]] = {"ada": {}, "ben": {}}
    browsers = {}
    for owner, job in jobs.items():
        browsers[owner] = stack.enter_context(closing(log_in(hub.served, owner)))
        program = stack.enter_context(httpx.Client(headers={"Authorization": f"token {hub.token(owner)}"}))
        logs = f"{hub.running.url}/api/v1/jobs/{job}/logs?follow=true"
        folder = (
            hub.running.setting.home(owner) / ".gpu_launch" / "jobs" / hub.send("GET", f"/jobs/{job}", owner)["run_id"]
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "output.log").write_text("begun\n")
        opened = {
            "terminal": open_websocket(hub, stack, owner, f"/api/v1/jobs/{job}/shell", command="sleep 1000").recv,
            "ssh": open_ssh(hub, stack, owner, job),
            "port": open_websocket(hub, stack, owner, f"/ports/{jobs['ada']}/socket").recv,
            "log": open_stream(stack, program, logs),
            "page": open_stream(stack, browsers[owner], "/hub/gpuhub/stream"),
        }
        ends[owner] = {name: follow(read) for name, read in opened.items()}
    time.sleep(2)
    assert not [(owner, name) for owner in ends for name, ended in ends[owner].items() if ended.is_set()]

    hub.served.end("hub")
    file = hub.served.cluster_file
    file.write_text(file.read_text().replace('["ada", "ben"]', '["ada"]'))
    hub.served.begin("hub")
    hub.served.wait_ready()
    began = time.monotonic()
    for name, ended in ends["ben"].items():
        assert ended.wait(LIMIT_S - (time.monotonic() - began)), name
    wait_for(lambda: find_owners(hub) == {"ada"}, "ben's leases end", LIMIT_S - (time.monotonic() - began))
    assert {hub.send("GET", f"/jobs/{job}", "root1")["state"] for job in (jobs["ben"], waiting)} == {"ended"}
    assert hub.running.send("GET", "/api/v1/leases", hub.token("ben")).status_code == 401
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        open_websocket(hub, stack, "ben", f"/api/v1/jobs/{jobs['ben']}/ssh", key=KEY)
    assert refused.value.status_code == 401
    assert browsers["ben"].get("/hub/api/user").status_code == 403
    assert browsers["ben"].get("/hub/gpuhub/cluster").status_code == 403
    # An idle courier, which has no network, stays a minute longer.
    kinds = [
        container["Labels"]["gpuhub.kind"]
        for node in hub.running.setting.nodes.values()
        for container in node.containers.values()
        if container["Labels"].get("gpuhub.owner") == "ben" and container["State"] == "running"
    ]
    assert set(kinds) <= {names.KIND_COURIER}
    # The restart of the hub ended the page.
    assert not [name for name, ended in ends["ada"].items() if ended.is_set() and name != "page"]


def find_owners(hub: SimulatedHub) -> set[str]:
    """Return the owners of leases that have not ended."""
    return {lease["owner"] for lease in hub.send("GET", "/leases", "root1")}
