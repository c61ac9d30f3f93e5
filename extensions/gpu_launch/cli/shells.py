"""A terminal in a job's worker, over a WebSocket."""

from __future__ import annotations

import json
import ssl
import sys
import threading
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

from gpu_launch.broker import parse_problem
from gpu_launch.cli import terminals
from gpu_launch.cli.connection import build_tls, reason
from gpu_launch.cli.hubs import Hub
from gpu_launch.errors import BrokerError

_CONNECT_S = 30.0
#: Keeps proxies from ending a terminal in which nothing happens, seconds.
_PING_S = 25.0


def build_url(hub: Hub, job_id: str, *, worker: int, columns: int, rows: int, command: str) -> str:
    """The shell's address; `command` empty for a login shell."""
    wanted = {"worker": worker, "cols": columns, "rows": rows} | ({"command": command} if command else {})
    base = "ws" + hub.broker_url.removeprefix("http")
    return f"{base}/api/v1/jobs/{urllib.parse.quote(job_id, safe='')}/shell?{urllib.parse.urlencode(wanted)}"


@dataclass
class Shell:
    """One terminal, from its beginning to its end."""

    socket: Any
    exit_code: int | None = None
    #: Why it ended without an exit status; empty for no reason told.
    trouble: str = ""
    _is_over: threading.Event = field(default_factory=threading.Event)
    _size: tuple[int, int] = field(default_factory=terminals.size)

    def run(self) -> int:
        """Show it until it ends: its exit status. Raises BrokerError when it broke off."""
        with terminals.raw():
            threading.Thread(target=self._show, daemon=True).start()
            threading.Thread(target=self._ping, daemon=True).start()
            try:
                terminals.read_keys(self._send, self._look_at_size, self._is_over)
                self._is_over.wait()
            finally:
                self._is_over.set()
                self.socket.shutdown()
        if self.exit_code is None:
            raise BrokerError(f"The terminal broke off{f': {self.trouble}' if self.trouble else ''}.")
        return self.exit_code

    def _send(self, data: bytes) -> None:
        import websocket

        try:
            self.socket.send_binary(data)
        except (websocket.WebSocketException, OSError) as error:
            self.trouble = self.trouble or reason(error)
            self._is_over.set()

    def _look_at_size(self) -> None:
        found = terminals.size()
        if found != self._size:
            self._size = found
            self._say({"resize": list(found)})

    def _say(self, value: dict[str, Any]) -> None:
        import websocket

        try:
            self.socket.send(json.dumps(value))
        except (websocket.WebSocketException, OSError):
            self._is_over.set()

    def _ping(self) -> None:
        import websocket

        while not self._is_over.wait(_PING_S):
            try:
                self.socket.ping()
            except (websocket.WebSocketException, OSError):
                return

    def _show(self) -> None:
        import websocket

        try:
            while True:
                kind, data = self.socket.recv_data()
                if kind == websocket.ABNF.OPCODE_BINARY:
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
                elif kind == websocket.ABNF.OPCODE_TEXT:
                    self._hear(data)
                elif kind == websocket.ABNF.OPCODE_CLOSE:
                    self.trouble = data[2:].decode("utf-8", "replace")
                    return
        except (websocket.WebSocketException, OSError) as error:
            self.trouble = self.trouble or reason(error)
        finally:
            self._is_over.set()

    def _hear(self, data: bytes) -> None:
        try:
            said = json.loads(data)
        except ValueError:
            return
        if isinstance(said, dict) and said.get("error"):
            self.trouble = str(said["error"])
        elif isinstance(said, dict) and isinstance(said.get("exit"), int):
            self.exit_code = said["exit"]


def open_shell(hub: Hub, job_id: str, *, worker: int, command: str) -> Shell:
    """A terminal in a worker. Raises BrokerError where there is none to be had."""
    import websocket

    columns, rows = terminals.size()
    url = build_url(hub, job_id, worker=worker, columns=columns, rows=rows, command=command)
    tls: ssl.SSLContext | None = build_tls(hub)
    try:
        found = websocket.create_connection(
            url,
            timeout=_CONNECT_S,
            header=[f"Authorization: token {hub.token}"],
            sslopt={} if tls is None else {"context": tls},
            # A proxy set for the internet is not the way to the hub, as for everything else.
            http_no_proxy=["*"],
            enable_multithread=True,
            redirect_limit=0,
            suppress_origin=True,
        )
    except websocket.WebSocketBadStatusException as error:
        body = error.resp_body if isinstance(error.resp_body, bytes) else b""
        raise BrokerError(parse_problem(error.status_code, body), status=error.status_code) from None
    except (websocket.WebSocketException, OSError) as error:
        raise BrokerError(f"{hub.url or hub.broker_url} cannot be reached: {reason(error)}.") from None
    found.settimeout(None)
    return Shell(socket=found)
