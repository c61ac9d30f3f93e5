"""Calls of the broker's API, as its clients make them."""

from __future__ import annotations

import itertools
from typing import Any
from urllib.parse import urlsplit

from gpuhub.broker.api.dependencies import PREFIX
from gpuhub.common import names
from tests.support.broker.in_process import Running, until


async def open_socket(running: Running, path: str, token: str | None) -> int:
    """Return the status with which a WebSocket is refused; 101 for one that opens."""
    # A service has an address beside that of the broker.
    url = urlsplit(path if path.startswith("/services/") else f"{PREFIX}{path}")
    headers = [(b"host", b"broker"), *([(b"authorization", f"token {token}".encode())] if token else [])]
    scope = {
        "type": "websocket", "path": url.path, "raw_path": url.path.encode(), "query_string": url.query.encode(), "headers": headers,
        "scheme": "ws", "root_path": "", "subprotocols": [], "client": ("127.0.0.1", 1), "server": ("broker", 80),
        "extensions": {"websocket.http.response": {}},
    }  # fmt: skip
    sent: list[Any] = []
    came = iter([{"type": "websocket.connect"}])

    async def receive() -> Any:
        return next(came, {"type": "websocket.disconnect", "code": 1000})

    async def send(message: Any) -> None:
        sent.append(message)

    await running.app(scope, receive, send)
    return 101 if sent[0]["type"] == "websocket.accept" else int(sent[0].get("status", 403))


NOTEBOOK = {"profile": "rtx5090", "server": ""}


_keys = itertools.count(1)


def _path(tail: str) -> str:
    return f"/api/v1{tail}"


async def ask(running: Running, token: str, *, status: int = 201, **body: Any) -> Any:
    async with running.client(token) as client:
        answer = await client.post(_path("/leases"), json={**NOTEBOOK, "key": f"k{next(_keys)}", **body})
    assert answer.status_code == status, answer.text
    return answer.json()


async def read(running: Running, token: str, path: str, status: int = 200, **params: Any) -> Any:
    async with running.client(token) as client:
        answer = await client.get(_path(path), params=params)
    assert answer.status_code == status, answer.text
    return answer.json()


async def delete(running: Running, token: str, path: str) -> Any:
    async with running.client(token) as client:
        answer = await client.delete(_path(path))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def post(running: Running, token: str, path: str, body: Any = None, status: int = 200) -> Any:
    async with running.client(token) as client:
        answer = await client.post(_path(path), json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


async def run_notebook(running: Running, lease: Any) -> str:
    """Create, activate and start the notebook of a granted lease, as the spawner does."""
    node = running.setting.nodes[lease["nodes"][0]]
    container = node.run_container(
        {
            names.LABEL_KIND: names.KIND_NOTEBOOK,
            names.LABEL_LEASE: lease["id"],
            names.LABEL_EPOCH: str(lease["epoch"]),
            names.LABEL_OWNER: lease["owner"],
        },
        state="created",
    )
    await post(running, "spawner", f"/leases/{lease['id']}/activate", {"container_id": container})
    node.containers[container]["State"] = "running"
    return container


async def wait_for_state(running: Running, path: str, state: str, token: str = "root") -> Any:
    async def look() -> Any:
        found = await read(running, token, path)
        return found if found["state"] == state else None

    return await until(look, f"{path} is {state}")
