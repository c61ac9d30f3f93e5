"""The requests of VS Code's JupyterHub extension (`src/jupyterHubApi.ts` of microsoft/vscode-jupyter-hub, October 2026)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from gpuhub.common import secrets
from tests.support.hub.simulated_hub import SimulatedHub, simulated_hub

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHub]:
    """A hub without notebooks."""
    with simulated_hub("ghvscode", tmp_path_factory.mktemp("hub"), 18960) as started:
        yield started


def test_extension_logs_in_and_starts_servers(hub: SimulatedHub) -> None:
    """It finds the hub, gets a token for name and password, lists servers, starts two, and deletes its token."""
    password = secrets.read_secret(hub.served.paths, secrets.USER_PASSWORD)
    with httpx.Client(base_url=f"{hub.url}/hub/api", trust_env=False, timeout=30) as web:
        assert web.get("").json()["version"]
        # Neither a cookie nor an XSRF token: the extension is no page.
        login = {
            "auth": {"username": "ada", "password": password},
            "note": "Requested by JupyterHub extension in VSCode",
        }
        made = web.post("/users/ada/tokens", content=json.dumps(login))
        assert made.status_code == httpx.codes.CREATED, made.text
        headers = {"Authorization": f"token {made.json()['token']}"}
        assert web.get("/users/ada?include_stopped_servers", headers=headers).json()["servers"].keys() == {""}
        for path in ("server", "servers/big"):
            assert web.post(f"/users/ada/{path}", headers=headers).status_code in {201, 202}
        assert web.get("/users/ada", headers=headers).json()["servers"].keys() == {"", "big"}
        assert (
            web.delete(f"/users/ada/tokens/{made.json()['id']}", headers=headers).status_code == httpx.codes.NO_CONTENT
        )
        assert web.get("/users/ada", headers=headers).status_code == httpx.codes.FORBIDDEN
        wrong = {**login, "auth": {"username": "ada", "password": "no"}}
        assert web.post("/users/ada/tokens", content=json.dumps(wrong)).status_code == httpx.codes.FORBIDDEN
