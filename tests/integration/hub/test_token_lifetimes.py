"""How long tokens are valid, in a real hub and broker: those of notebooks, and those that users make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import psutil
import pytest

from tests.support.hub.served_hub import NOTEBOOK, ServedHub
from tests.support.hub.sessions import call_broker, log_in
from tests.support.product import wait_for

PORT = 18480
#: Longest validity in cluster.toml, seconds; and for which the broker accepts a token that has ended, docs/rights.md.
LONGEST_S, KEPT_S = 3600, 10.0


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A running hub with its proxy and broker."""
    served = ServedHub("ghtoken", tmp_path_factory.mktemp("hub"), f'longest_token = "{LONGEST_S // 60}m"', PORT)
    try:
        served.start()
        yield served
    finally:
        served.stop()


@pytest.fixture
def browser(hub: ServedHub) -> Iterator[httpx.Client]:
    """A session of ada's."""
    with closing(log_in(hub, "ada")) as session:
        yield session


def read_status(hub: ServedHub, token: str) -> tuple[int, int]:
    """Return how hub and broker answer requests with a token."""
    url = f"http://127.0.0.1:{hub.port}/hub/api/user"
    answer = httpx.get(url, headers={"Authorization": f"token {token}"}, trust_env=False, timeout=30)
    return answer.status_code, call_broker(hub, "GET", "/leases", token, timeout=30).status_code


def find_notebook_token() -> str | None:
    """Return the token of the notebook that this hub started, as its programs have it."""
    for process in psutil.process_iter(["cmdline"]):
        if NOTEBOOK in (process.info["cmdline"] or ()):
            environ = process.environ()
            if environ.get("JUPYTERHUB_API_URL", "").endswith(f":{PORT + 1}/hub/api"):
                return environ.get("JUPYTERHUB_API_TOKEN")
    return None


def is_ready(browser: httpx.Client) -> bool:
    servers: dict[str, Any] = browser.get("/hub/api/users/ada").json()["servers"]
    return bool(servers.get("", {}).get("ready"))


def test_notebooks_token_ends_with_the_notebook(hub: ServedHub, browser: httpx.Client) -> None:
    """It has no other end; the next notebook has another one; and it makes no token that would outlive it."""
    tokens: list[str] = []
    for _ in range(2):
        assert browser.post("/hub/api/users/ada/server", json={"profile": "cpu"}).status_code in {201, 202}
        wait_for(lambda: is_ready(browser), f"the notebook runs\n{hub.log('hub')}", 60)
        token = find_notebook_token()
        assert token is not None
        assert token not in tokens
        tokens.append(token)
        assert read_status(hub, token) == (200, 200)
        made = httpx.post(
            f"http://127.0.0.1:{PORT}/hub/api/users/ada/tokens",
            headers={"Authorization": f"token {token}"}, trust_env=False, timeout=30,
        )  # fmt: skip
        assert made.status_code == 403
        assert browser.delete("/hub/api/users/ada/server").status_code in {202, 204}
        wait_for(lambda: read_status(hub, tokens[-1])[0] == 403, "the hub refuses the token", 30)
        wait_for(lambda: read_status(hub, tokens[-1])[1] == 401, "the broker refuses the token", KEPT_S + 5)


def test_users_tokens_end_as_they_were_asked_for(hub: ServedHub, browser: httpx.Client) -> None:
    """After the time of cluster.toml at the latest, which is also the default."""
    made = browser.post("/hub/api/users/ada/tokens", json={}).json()
    left = datetime.fromisoformat(made["expires_at"]) - datetime.now(UTC)
    assert timedelta(seconds=LONGEST_S - 60) < left <= timedelta(seconds=LONGEST_S)
    for longer in (LONGEST_S + 1, 10**9):
        refused = browser.post("/hub/api/users/ada/tokens", json={"expires_in": longer})
        assert (refused.status_code, f"must not exceed {LONGEST_S}" in refused.text) == (400, True)
    short = browser.post("/hub/api/users/ada/tokens", json={"expires_in": 4}).json()["token"]
    assert read_status(hub, short) == (200, 200)
    wait_for(lambda: read_status(hub, short) == (403, 401), "hub and broker refuse the token", 4 + KEPT_S + 5)
    assert read_status(hub, made["token"]) == (200, 200)
