"""SSH to others' containers, and what a public key may contain."""

from __future__ import annotations

import httpx
import pytest

from tests.hostile.scene import SERVER, Scene
from tests.support.hub.users import UPGRADE

KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'x' * 43}"
PATH = f"/user/ada/{SERVER}/gpu-launch/ssh"


def ask(url: str, headers: dict[str, str], key: str = KEY, cookies: httpx.Cookies | None = None) -> int:
    """Request a WebSocket and return the status."""
    params, headers = {"key": key}, headers | UPGRADE
    return httpx.get(url, params=params, headers=headers, cookies=cookies, trust_env=False, timeout=30).status_code


def list_sshds(scene: Scene, owner: str) -> list[str]:
    """Return the programs of SSH in a user's notebook."""
    _, shown = scene.shell("cat /proc/[0-9]*/comm", seen=scene.notebooks[owner])
    return [line for line in shown.splitlines() if line.startswith("sshd")]


def test_another_users_notebook(scene: Scene) -> None:
    """Neither ben's token nor his notebook's opens ada's server, and no token opens none."""
    url = f"{scene.product.address}{PATH}"
    own = scene.shell("echo $JUPYTERHUB_API_TOKEN")[1].strip()
    for token in (scene.ben.token, own, "0" * 32):
        assert ask(url, {"Authorization": f"token {token}"}) == 403
        assert ask(f"{url}?token={token}", {}) == 403
    assert ask(url, {}) == 403
    assert list_sshds(scene, "ada") == []


def test_cookie_is_not_enough(scene: Scene) -> None:
    """A page that has ada's cookie, such as a notebook on the same site, cannot open SSH."""
    base = scene.product.address
    with httpx.Client(base_url=base, follow_redirects=True, trust_env=False, timeout=60) as web:
        web.get("/hub/login")
        xsrf = next(cookie.value or "" for cookie in web.cookies.jar if cookie.name == "_xsrf")
        web.post("/hub/login", data={"username": "ada", "password": scene.product.password, "_xsrf": xsrf})
        web.get(f"/user/ada/{SERVER}/lab").raise_for_status()
        assert web.get(f"/user/ada/{SERVER}/api/status").status_code == 200
        # A connection each: the proxy closes one whose upgrade was refused.
        for headers in ({}, {"Authorization": "none"}, {"Origin": base}):
            assert ask(f"{base}{PATH}", headers, cookies=web.cookies) == 403
    assert list_sshds(scene, "ada") == []


def test_another_users_job(scene: Scene) -> None:
    """The broker hides ada's job from ben, and refuses a caller without a token."""
    url = f"{scene.product.address}/services/broker/api/v1/jobs/{scene.job['id']}/ssh"
    assert ask(url, {"Authorization": f"token {scene.ben.token}"}) == 404
    assert ask(url, {}) == 401


def test_another_users_instances(scene: Scene) -> None:
    """Ben's token neither lists, starts, stops nor removes what `gpu-launch instance` uses of ada's."""
    calls: list[tuple[str, str, object]] = [
        ("GET", "/users/ada?include_stopped_servers=1", None),
        ("POST", "/users/ada/servers/more", {"profile": "cpu"}),
        ("DELETE", f"/users/ada/servers/{SERVER}", {"remove": True}),
        ("GET", f"/users/ada/servers/{SERVER}/progress", None),
    ]
    assert {scene.ben.ask(scene.ben.hub, *call)[0] for call in calls} == {404}
    lease = next(row for row in scene.ada.ask(scene.ada.broker, "GET", "/leases")[1] if row["subject"] == SERVER)
    extended = scene.ben.ask(scene.ben.broker, "POST", f"/leases/{lease['id']}/extend", {"time_limit_s": 3600})
    assert extended[0] == 404


@pytest.mark.parametrize(
    "key",
    [
        "",
        f"{KEY}\nssh-ed25519 AAAA",
        f'command="id" {KEY}',
        f"{KEY} x",
        "ssh-rsa AAAA",
        "--help",
        "x" * 30_000,
        "\0",
    ],
    ids=["none", "lines", "options", "comment", "type", "flag", "long", "nul"],
)
def test_odd_keys_start_nothing(scene: Scene, key: str) -> None:
    """The user's own server and job take one form of keys alone."""
    headers = {"Authorization": f"token {scene.ada.token}"}
    notebook = ask(f"{scene.product.address}{PATH}", headers, key)
    job = ask(f"{scene.product.address}/services/broker/api/v1/jobs/{scene.job['id']}/ssh", headers, key)
    assert notebook in {400, 414, 422, 431}
    assert job in {400, 403, 414, 422, 431}
    assert list_sshds(scene, "ada") == []
