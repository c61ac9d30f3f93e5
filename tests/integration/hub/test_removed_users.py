"""Users who are taken out of cluster.toml, or ended by an administrator, in a real hub and broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import httpx
import pytest
from click.testing import CliRunner

from gpuhub.cli.main import cli
from gpuhub.cli.options import BrokerRunner
from tests.support.hub.served_hub import ServedHub
from tests.support.hub.sessions import call_broker, find_states, log_in
from tests.support.product import wait_for


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A running hub with its proxy and broker."""
    served = ServedHub("ghgone", tmp_path_factory.mktemp("hub"), "", 18460)
    try:
        served.start()
        # As `gpuhub up` leaves it.
        served.paths.used_cluster_file.write_text(served.cluster_file.read_text())
        yield served
    finally:
        served.stop()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what the test opens."""
    with ExitStack() as opened:
        yield opened


def test_removed_users_lose_everything(hub: ServedHub, stack: ExitStack) -> None:
    """Leases, tokens and sessions end within a minute of a restart without ben, and those of ada by command."""
    sessions = {name: stack.enter_context(closing(log_in(hub, name))) for name in ("ada", "ben")}
    tokens = {name: browser.post(f"/hub/api/users/{name}/tokens").json()["token"] for name, browser in sessions.items()}
    for token in tokens.values():
        assert call_broker(hub, "POST", "/leases", token, json={"profile": "cpu", "key": "k"}).status_code == 201
    assert find_states(hub) == {"ada": "requested", "ben": "requested"}
    job = call_broker(hub, "POST", "/jobs", tokens["ada"], json={"run_id": "run-000001", "detached": True}).json()["id"]
    shared = f"/jobs/{job}/shares/ben"
    assert call_broker(hub, "PUT", "/jobs/j0/shares/ben", tokens["ada"], json={}).status_code == 404
    assert call_broker(hub, "PUT", f"{shared}x", tokens["ada"], json={}).status_code == 404
    assert call_broker(hub, "PUT", shared, tokens["ada"], json={}).status_code == 200
    assert len(call_broker(hub, "GET", "/shares", tokens["ben"]).json()) == 1
    hub.end("hub")
    hub.cluster_file.write_text(hub.cluster_file.read_text().replace('["ada", "ben"]', '["ada"]'))
    hub.begin("hub")
    hub.wait_ready()
    wait_for(lambda: "ben" not in find_states(hub), f"ben's lease ends\n{hub.log('hub')}", 70)
    assert call_broker(hub, "GET", "/leases", tokens["ben"]).status_code == 401
    assert sessions["ben"].get("/hub/api/user").status_code == 403
    assert find_states(hub) == {"ada": "requested"}
    assert call_broker(hub, "GET", "/leases", tokens["ada"]).status_code == 200
    assert call_broker(hub, "GET", "/shares", tokens["ada"]).json() == []

    done = CliRunner().invoke(
        cli, ["user", "end", "ada", "--yes", "--instance", "ghgone"], obj=BrokerRunner(), catch_exceptions=False
    )
    assert "ada: 2 leases and" in done.output
    assert find_states(hub) == {}
    assert sessions["ada"].get("/hub/api/user").status_code == 403
    with httpx.Client(headers={"Authorization": f"token {tokens['ada']}"}, trust_env=False) as client:
        assert client.get(f"http://127.0.0.1:{hub.port}/hub/api/user").status_code == 403
        revoke = f"http://127.0.0.1:{hub.port}/hub/api/gpuhub/users/ben/revoke"
        assert client.post(revoke).status_code == 403
    other = stack.enter_context(closing(log_in(hub, "ada"))).post("/hub/api/users/ada/tokens").json()["token"]
    with httpx.Client(headers={"Authorization": f"token {other}"}, trust_env=False) as client:
        assert client.post(revoke).status_code == 403
