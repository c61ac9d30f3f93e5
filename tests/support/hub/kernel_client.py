"""A client of kernels in a user's notebook server, through the hub's proxy as JupyterLab uses it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import websocket

from tests.support.hub.users import Client

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Kernel:
    """A kernel that runs cells one after the other."""

    def __init__(self, url: str, token: dict[str, str]) -> None:
        """Connect to the kernel at this address, with a token as a header."""
        self._url, self._token = url, token
        self._socket = self._connect()
        #: Whether a cell has ended with an error.
        self.has_failed = False

    def reconnect(self) -> None:
        """Connect again, after the proxy has been away."""
        self.close()
        self._socket = self._connect()

    def close(self) -> None:
        """Close the connection; the kernel runs on."""
        self._socket.close()

    def _connect(self) -> websocket.WebSocket:
        return websocket.create_connection(self._url, header=self._token, timeout=60)

    def begin(self, code: str) -> str:
        """Start a cell and return its message id."""
        number = uuid.uuid4().hex
        header = {"msg_id": number, "msg_type": "execute_request", "username": "", "session": "tests", "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self._socket.send(json.dumps(message))
        return number

    def messages(self, number: str, timeout_s: float = 180.0) -> Iterator[str]:
        """Yield the output of a cell until it has ended."""
        self._socket.settimeout(timeout_s)
        while True:
            message = json.loads(self._socket.recv())
            if message["parent_header"].get("msg_id") != number:
                continue
            content = message["content"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                return
            self.has_failed |= message["msg_type"] == "error"
            yield _COLOURS.sub("", _text(message["msg_type"], content))

    def run(self, code: str, timeout_s: float = 180.0) -> str:
        """Run a cell and return its output, tracebacks included."""
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
def open_kernel(address: str, user: Client, server: str, *, notebook: str = "") -> Iterator[Kernel]:
    """Start a kernel in the user's home, or in the folder of a notebook file there.

    Args:
        address: The browsers' one, such as `127.0.0.1:8000`.
        user: The server's owner.
        server: The server's name.
        notebook: The notebook file's path in the home.
    """
    url = f"{address}/user/{user.name}/{server}/api/kernels"
    token = {"Authorization": f"token {user.token}"}
    with httpx.Client(headers=token, trust_env=False, timeout=60) as web:
        created = web.post(f"http://{url}", json={"name": "python3", "path": notebook})
        created.raise_for_status()
        kernel_url = f"{url}/{created.json()['id']}"
        kernel = Kernel(f"ws://{kernel_url}/channels", token)
        try:
            yield kernel
        finally:
            kernel.close()
            web.delete(f"http://{kernel_url}")
