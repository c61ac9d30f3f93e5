"""A kernel of a user's notebook server, asked as JupyterLab asks it: through the hub's proxy."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import websocket

from tests.support.users import Client

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Kernel:
    """Runs cells, one after the other."""

    def __init__(self, socket: websocket.WebSocket) -> None:
        self._socket = socket

    def begin(self, code: str) -> str:
        """Start a cell; what its messages are known by."""
        number = uuid.uuid4().hex
        header = {"msg_id": number, "msg_type": "execute_request", "username": "", "session": "tests", "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self._socket.send(json.dumps(message))
        return number

    def messages(self, number: str, timeout_s: float = 180.0) -> Iterator[str]:
        """What a cell shows, piece by piece, until it has ended."""
        self._socket.settimeout(timeout_s)
        while True:
            message = json.loads(self._socket.recv())
            if message["parent_header"].get("msg_id") != number:
                continue
            content = message["content"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                return
            yield _COLOURS.sub("", _text(message["msg_type"], content))

    def run(self, code: str, timeout_s: float = 180.0) -> str:
        """All that a cell shows, its error's traceback too."""
        return "".join(self.messages(self.begin(code), timeout_s))


def _text(kind: str, content: dict[str, Any]) -> str:
    match kind:
        case "stream":
            return str(content["text"])
        case "error":
            return "\n".join([*content["traceback"], ""])
        case "display_data" | "execute_result" | "update_display_data":
            return f"{content['data'].get('text/plain', '')}\n"
    return ""


@contextmanager
def kernel(address: str, user: Client, server: str) -> Iterator[Kernel]:
    """A new kernel in the user's home; `address` is where browsers go, such as `127.0.0.1:8000`."""
    url = f"{address}/user/{user.name}/{server}/api/kernels"
    token = {"Authorization": f"token {user.token}"}
    with httpx.Client(headers=token, trust_env=False, timeout=60) as web:
        made = web.post(f"http://{url}", json={"name": "python3"})
        made.raise_for_status()
        one = f"{url}/{made.json()['id']}"
        socket = websocket.create_connection(f"ws://{one}/channels", header=token, timeout=60)
        try:
            yield Kernel(socket)
        finally:
            socket.close()
            web.delete(f"http://{one}")
