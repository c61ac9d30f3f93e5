"""Users of a running product, each with a token of the hub, on the hub's and the broker's API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

#: Statuses of a hub or broker that has just been killed, or of the proxy in its place.
AWAY = frozenset({500, 502, 503, 504})
#: Headers of a request for a WebSocket; the answer is 101, or the status of the refusal.
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw==",
}


@dataclass(slots=True)
class Client:
    """One user's token, used on the hub's and the broker's API."""

    name: str
    token: str
    hub: httpx.Client
    broker: httpx.Client

    def ask(self, web: httpx.Client, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and body; 503 if there is no response."""
        try:
            answer = web.request(method, path, content=None if body is None else json.dumps(body))
        except httpx.TransportError:
            return 503, None
        is_json = answer.headers.get("content-type", "").startswith(("application/json", "application/problem"))
        return answer.status_code, answer.json() if is_json else answer.text

    def servers(self) -> dict[str, dict[str, Any]] | None:
        """Return the user's servers by name; None while the hub does not answer."""
        status, found = self.ask(self.hub, "GET", f"/users/{self.name}")
        return found["servers"] if status == 200 else None

    def start(self, server: str, profile: str, **options: str) -> None:
        """Request a server until the hub accepts it; `options` are further ones of the spawn form."""
        path, body = f"/users/{self.name}/servers/{server}", {"profile": profile, **options}
        self._retry_while_unreachable(lambda: self.ask(self.hub, "POST", path, body))

    def stop(self, server: str) -> None:
        """Request that the server stops until the hub accepts it; its name no longer counts."""
        path = f"/users/{self.name}/servers/{server}"
        self._retry_while_unreachable(lambda: self.ask(self.hub, "DELETE", path, {"remove": True}))

    def stopped(self) -> list[str]:
        """Return stopped servers, whose names count towards the user's limit."""
        status, found = self.ask(self.hub, "GET", f"/users/{self.name}?include_stopped_servers=1")
        return [name for name, server in found["servers"].items() if server["stopped"]] if status == 200 else []

    def is_ready(self, server: str) -> bool:
        """Return whether the hub reports it as ready."""
        return bool(((self.servers() or {}).get(server) or {}).get("ready"))

    def gpus(self) -> list[dict[str, Any]]:
        """Return all GPUs of the cluster as the broker shows them."""
        status, view = self.ask(self.broker, "GET", "/cluster")
        assert status == 200, view
        return [gpu for node in view["nodes"] for gpu in node["gpus"]]

    def close(self) -> None:
        """Close the connections."""
        self.hub.close()
        self.broker.close()

    def _retry_while_unreachable(self, ask: Callable[[], tuple[int, Any]], deadline_s: float = 120.0) -> None:
        end = time.monotonic() + deadline_s
        while ask()[0] in AWAY:
            assert time.monotonic() < end, f"the hub did not answer {self.name} for {deadline_s:.0f} s"
            time.sleep(1)


def log_in(address: str, name: str, password: str) -> Client:
    """Return a client with the user's own token, which has all rights of the user; `address` is the browsers' one."""
    with httpx.Client(base_url=address, follow_redirects=True, trust_env=False, timeout=60) as web:
        web.get("/hub/login")
        form = {"username": name, "password": password, "_xsrf": _xsrf(web)}
        web.post("/hub/login", data=form).raise_for_status()
        answer = web.post(f"/hub/api/users/{name}/tokens", json={}, headers={"X-XSRFToken": _xsrf(web)})
        answer.raise_for_status()
        return with_token(address, name, answer.json()["token"])


def with_token(address: str, name: str, token: str) -> Client:
    """Return a client that sends this token to hub and broker."""
    headers = {"Authorization": f"token {token}", "Content-Type": "application/json"}

    def web(path: str) -> httpx.Client:
        return httpx.Client(base_url=f"{address}{path}", headers=headers, trust_env=False, timeout=30)

    return Client(name=name, token=token, hub=web("/hub/api"), broker=web("/services/broker/api/v1"))


def _xsrf(web: httpx.Client) -> str:
    return next(cookie.value or "" for cookie in web.cookies.jar if cookie.name == "_xsrf" and cookie.path == "/hub/")
