"""Rights of administrators in a real hub with a real notebook server: administration, but no user's notebook or token."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator

import httpx
import pytest

from gpuhub.broker.api.auth import ADMIN_SCOPE
from gpuhub.login.rules import ADMINISTRATOR_SCOPES
from tests.support.hub.served_hub import ServedHub
from tests.support.hub.sessions import find_xsrf, log_in
from tests.support.product import wait_for

#: Scopes of JupyterHub's own role that ours must not have, in the form in which a token lists them.
FORBIDDEN = {"access:servers", "tokens", "admin:users", "users", "proxy", "shutdown", "admin:servers"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A running hub with its proxy and broker; notebooks are processes."""
    served = ServedHub("ghadmin", tmp_path_factory.mktemp("hub"), "", 18440)
    try:
        served.start()
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def sessions(hub: ServedHub) -> Iterator[dict[str, httpx.Client]]:
    """Sessions of ada, whose notebook runs, and of the administrator."""
    browsers = {name: log_in(hub, name) for name in ("ada", "root1")}
    start_notebook(browsers["ada"])
    yield browsers
    for browser in browsers.values():
        browser.close()


def start_notebook(browser: httpx.Client) -> None:
    assert browser.post("/hub/api/users/ada/server").status_code in {201, 202}
    wait_for(lambda: browser.get("/hub/api/users/ada").json()["servers"].get("", {}).get("ready"), "ada's notebook", 60)


def test_administrators_do_not_reach_users_notebooks(sessions: dict[str, httpx.Client]) -> None:
    """The owner's session opens the notebook; the administrator's gets 403, on pages and at its API."""
    path = "/user/ada/api/contents"
    assert sessions["ada"].get(path).status_code == 200
    for refused in ("/user/ada/", path, "/user/ada/lab"):
        assert sessions["root1"].get(refused).status_code == 403, refused


REFUSED = {
    "POST /users/ada/tokens": {"note": "mine"},
    "POST /users": {"usernames": ["eve"]},
    "POST /users/eve": None,
    "PATCH /users/ada": {"name": "eve"},
    "PATCH /users/root1": {"name": "ada"},
    "POST /users/ada/activity": {"last_activity": "2026-11-22T00:00:00Z"},
    "PATCH /proxy": {"auth_token": "x", "api_url": "http://evil"},
    "POST /shutdown": {},
}


@pytest.mark.parametrize("route", REFUSED)
def test_rights_that_administrators_do_not_have(sessions: dict[str, httpx.Client], route: str) -> None:
    """Nothing that would give them a user's identity, or the hub's; 404 hides whether a user exists."""
    method, path = route.split()
    assert sessions["root1"].request(method, f"/hub/api{path}", json=REFUSED[route]).status_code in {403, 404}


def test_tokens_of_others_are_not_listed(sessions: dict[str, httpx.Client]) -> None:
    """Neither their notes nor their ids, with which they could be revoked."""
    assert sessions["root1"].get("/hub/api/users/ada/tokens").status_code in {403, 404}
    assert sessions["ada"].get("/hub/api/users/ada/tokens").status_code == 200


def test_administration_works(hub: ServedHub, sessions: dict[str, httpx.Client]) -> None:
    """The admin page, its list of users, stopping and starting servers, deleting users, and the broker."""
    root = sessions["root1"]
    assert root.get("/hub/admin").status_code == 200
    users = {user["name"]: user for user in root.get("/hub/api/users", params={"include_stopped_servers": ""}).json()}
    assert set(users) == {"ada", "ben", "root1"}
    assert users["ada"]["servers"][""]["ready"]
    assert root.delete("/hub/api/users/ada/server").status_code in {202, 204}
    wait_for(lambda: not root.get("/hub/api/users/ada").json()["servers"], "ada's notebook is stopped", 60)
    start_notebook(root)
    assert root.delete("/hub/api/users/ben").status_code == 204
    broker = f"http://127.0.0.1:{hub.cluster.hub.broker_port}/services/broker/api/v1"
    statuses = {}
    for name, browser in sessions.items():
        token = browser.post(f"/hub/api/users/{name}/tokens", json={"note": "test"}).json()["token"]
        header = {"Authorization": f"token {token}"}
        for change in ("cordon", "undrain"):
            answer = httpx.post(f"{broker}/nodes/rig1/{change}", json={}, headers=header, trust_env=False)
            statuses[name, change] = answer.status_code
    assert statuses == {
        ("ada", "cordon"): 403, ("ada", "undrain"): 403, ("root1", "cordon"): 200, ("root1", "undrain"): 200,
    }  # fmt: skip
    xsrf = {"X-XSRFToken": find_xsrf(root)}
    assert root.post("/hub/gpuhub/act", json={"do": "cordon", "node": "rig1"}, headers=xsrf).status_code == 204
    assert root.post("/hub/gpuhub/act", json={"do": "undrain", "node": "rig1"}, headers=xsrf).status_code == 204


def test_an_older_database_loses_the_rights(hub: ServedHub, sessions: dict[str, httpx.Client]) -> None:
    """After an upgrade, sessions and tokens from before have the new rights, since the role itself changes."""
    token = sessions["root1"].post("/hub/api/users/root1/tokens", json={"note": "old"}).json()["token"]
    hub.end("hub")
    with sqlite3.connect(hub.paths.state / "jupyterhub.sqlite") as database:
        old = ["admin-ui", "admin:users", "admin:servers", "tokens", "access:servers", "proxy", "shutdown"]
        database.execute("UPDATE roles SET scopes = ? WHERE name = 'admin'", [json.dumps(old)])
    database.close()
    hub.begin("hub")
    hub.wait_ready()
    header = {"Authorization": f"token {token}"}
    answer = httpx.get(f"http://127.0.0.1:{hub.port}/hub/api/user", headers=header, trust_env=False).json()
    assert answer["admin"] is True
    scopes = set(answer["scopes"])
    assert not FORBIDDEN & scopes
    assert {ADMIN_SCOPE, "servers", "delete:users"} <= scopes
    assert not FORBIDDEN & set(ADMINISTRATOR_SCOPES)
    assert sessions["root1"].post("/hub/api/users/ada/tokens", json={}).status_code == 403
