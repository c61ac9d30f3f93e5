"""Sessions of users at a served hub, as browsers have them, and calls of its broker with a token."""

from __future__ import annotations

from typing import Any

import httpx

from gpuhub.common import secrets
from tests.support.hub.served_hub import ServedHub


def log_in(hub: ServedHub, name: str) -> httpx.Client:
    """Log in and return a client that sends the session's XSRF token with every request."""
    kind = secrets.ADMIN_PASSWORD if name == "root1" else secrets.USER_PASSWORD
    browser = httpx.Client(base_url=f"http://127.0.0.1:{hub.port}", timeout=30, trust_env=False, follow_redirects=True)
    browser.get("/hub/login")
    form = {"username": name, "password": secrets.read_secret(hub.paths, kind), "_xsrf": browser.cookies["_xsrf"]}
    assert browser.post("/hub/login", data=form, follow_redirects=False).status_code == 302
    browser.get("/hub/home")
    browser.headers["X-XSRFToken"] = find_xsrf(browser)
    return browser


def find_xsrf(browser: httpx.Client) -> str:
    """Return the session's XSRF token for the hub."""
    return next(
        cookie.value or "" for cookie in browser.cookies.jar if cookie.name == "_xsrf" and "/hub" in cookie.path
    )


def call_broker(hub: ServedHub, method: str, path: str, token: str, **arguments: Any) -> httpx.Response:
    """Send a request to the broker."""
    url = f"http://127.0.0.1:{hub.cluster.hub.broker_port}/services/broker/api/v1{path}"
    return httpx.request(method, url, headers={"Authorization": f"token {token}"}, trust_env=False, **arguments)


def find_states(hub: ServedHub) -> dict[str, str]:
    """Return the state of each user's lease that has not ended."""
    token = secrets.read_secret(hub.paths, secrets.BROKER_TOKEN)
    return {lease["owner"]: lease["state"] for lease in call_broker(hub, "GET", "/leases", token).json()}
