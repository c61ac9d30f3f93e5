"""Servers in others' notebooks and jobs."""

from __future__ import annotations

import httpx

from tests.hostile.scene import SERVER, Scene
from tests.support.hub.users import UPGRADE


def get(url: str, token: str | None = None, **headers: str) -> httpx.Response:
    own = {} if token is None else {"Authorization": f"token {token}"}
    return httpx.get(url, headers=own | headers, trust_env=False, timeout=30)


def test_another_users_notebook(scene: Scene) -> None:
    """Neither ben's token nor his notebook's reaches a port of ada's notebook."""
    own = scene.shell("echo $JUPYTERHUB_API_TOKEN")[1].strip()
    for path in ("proxy/8888/", "proxy/absolute/22/", "proxy/rig1:2376/"):
        url = f"{scene.product.address}/user/ada/{SERVER}/{path}"
        for token in (scene.ben.token, own):
            assert get(url, token).status_code == 403
            assert get(url, token, **UPGRADE).status_code == 403
        # An unknown token is nobody's: the server sends to the login of the hub.
        unknown = get(url, "0" * 32)
        assert unknown.status_code == 302
        assert unknown.headers["location"].startswith("/hub/api/oauth2/authorize?")


def test_own_notebook_reaches_its_own_container_alone(scene: Scene) -> None:
    """The proxy of a notebook's server is no way to other machines."""
    base = f"{scene.product.address}/user/ben/{SERVER}/proxy"
    for host in ("10.0.0.1", "169.254.169.254", "rig1"):
        assert get(f"{base}/{host}:80/", scene.ben.token).status_code == 403


def test_another_users_job(scene: Scene) -> None:
    """The broker hides ada's job from ben, by token, without one, and with keys of visits that he makes up."""
    base = f"{scene.product.address}/services/broker"
    job = scene.job["id"]
    assert get(f"{base}/ports/{job}/", scene.ben.token).status_code == 404
    assert get(f"{base}/ports/{job}/", scene.ada.token).status_code == 409
    assert get(f"{base}/ports/{job}/").status_code == 401
    assert scene.ben.ask(scene.ben.broker, "POST", f"/jobs/{job}/visits")[0] == 404
    for path in (f"visits/{job}/{'k' * 43}/", f"visits/{job}/..%2f..%2fapi/v1/jobs", f"visits/{job}/{'k' * 20000}/"):
        assert get(f"{base}/{path}").status_code in {401, 404, 414, 431}


def test_hub_opens_no_visit_for_others(scene: Scene) -> None:
    """Its page needs a session, and shows ben no more than the broker does."""
    url = f"{scene.product.address}/hub/gpuhub/ports/{scene.job['id']}"
    assert get(url).status_code == 302
    assert get(url, scene.ada.token).status_code in {302, 403}
    with httpx.Client(base_url=scene.product.address, follow_redirects=True, trust_env=False, timeout=60) as web:
        web.get("/hub/login")
        xsrf = next(cookie.value or "" for cookie in web.cookies.jar if cookie.name == "_xsrf")
        web.post("/hub/login", data={"username": "ben", "password": scene.product.password, "_xsrf": xsrf})
        for target in ("", "?to=//evil.lan/", "?to=%0d%0aSet-Cookie:x", "?to=" + "x" * 4000):
            assert web.get(url + target).status_code == 404


def test_services_of_others(scene: Scene) -> None:
    """Names and keys that ben makes up lead nowhere, and no path leads from a service's address into the broker."""
    base = f"{scene.product.address}/services"
    # Where no service has the name, the proxy asks the hub, which leads to its own pages.
    for path in ("none/", "broker/service-visits/none/", "none/..%2fbroker/api/v1/jobs"):
        answer = get(f"{base}/{path}", scene.ben.token)
        assert answer.status_code in {401, 404} or answer.headers["location"].startswith("/hub/"), answer.headers
    for key in ("k" * 43, "..%2f..%2fapi", "k" * 20000):
        assert get(f"{base}/broker/service-visits/none/{key}/").status_code in {401, 404, 414, 431}
    for action in ("restart", "logs", "visits"):
        method = "GET" if action == "logs" else "POST"
        assert scene.ben.ask(scene.ben.broker, method, f"/services/none/{action}")[0] in {403, 404}
