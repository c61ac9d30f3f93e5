"""`python -m tests.support.broker.process FOLDER NODES GPUS [ADDRESS]`: the broker as a separate process, on simulated
nodes; users may have notifications sent to the address.

Everything except nodes and hub is as in production: uvicorn, the HTTP API, a SQLite file with durable commits. The
first line on standard output is the address; SIGTERM ends the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import uvicorn

from gpuhub.broker.api.server import build_server_config
from gpuhub.broker.db.store import Store
from gpuhub.config.notifications import NotificationSettings
from tests.support.broker.in_process import API, Setting, Workers
from tests.support.docker.simulated_nodes import build_cluster, simulated_nodes

ROOT = Path(__file__).parents[3]
CARD = ("NVIDIA GeForce RTX 5090", 32607)
#: The profile with one of these GPUs.
PROFILE = "rtx5090"
#: Connections that may wait to be accepted: every client of a load test connects at once.
BACKLOG = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A broker's process."""

    host: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        """The base URL of its API."""
        return f"http://{self.host}:{self.port}{API}"


@contextmanager
def serving(
    folder: Path, *, nodes: int, gpus: int, deadline_s: float = 60.0, notifies: str = "", is_killed: bool = False
) -> Iterator[Served]:
    """Run the broker in a separate process with every GPU read and free; end it with the block.

    Args:
        notifies: An address to which users may have notifications sent.
        is_killed: The block kills the process.
    """
    command = [sys.executable, "-m", "tests.support.broker.process", str(folder), str(nodes), str(gpus)]
    command += [notifies] if notifies else []
    with (folder / "broker.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            host, port = process.stdout.readline().split() or ("", "0")
            served = Served(host=host, port=int(port), pid=process.pid)
            _wait_free(served, nodes * gpus, deadline_s, folder / "broker.log")
            yield served
        finally:
            if not is_killed:
                process.send_signal(signal.SIGTERM)
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


def _wait_free(served: Served, gpus: int, deadline_s: float, log: Path) -> None:
    end = time.monotonic() + deadline_s
    with httpx.Client(trust_env=False, headers={"Authorization": "token root"}, timeout=deadline_s) as client:
        while time.monotonic() < end and served.port:
            nodes = client.get(f"{served.url}/cluster").json()["nodes"]
            if sum(gpu["state"] == "free" for node in nodes for gpu in node["gpus"]) == gpus:
                return
            time.sleep(0.1)
    raise TimeoutError(f"the broker's {gpus} GPUs are not free in time:\n{log.read_text(errors='replace')[-2000:]}")


def serve(folder: Path, nodes: int, gpus: int, *notified: str) -> None:
    """Serve until SIGTERM."""
    cards = {f"node{number}": [CARD] * gpus for number in range(1, nodes + 1)}
    setting = Setting(folder)
    notifications = NotificationSettings(allowed_addresses=notified)
    setting.cluster, setting.nodes = build_cluster(cards, notifications=notifications), simulated_nodes(cards)
    store = Store.open_file(folder / "broker.sqlite")
    app = setting.build(store, Workers(setting.nodes))
    config = build_server_config(app, backlog=BACKLOG)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(BACKLOG)
        os.write(1, f"127.0.0.1 {listening.getsockname()[1]}\n".encode())
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            store.close()


class Connection:
    """A client of the broker for load tests: one kept-alive connection with little overhead, JSON in and out.

    Like other HTTP clients, it connects again when the broker has closed the connection because nothing came for some
    seconds, and repeats a request that met the closed connection: all requests of the load tests may be repeated.
    """

    def __init__(self, host: str, port: int, prefix: str, token: str) -> None:
        self._address = (host, port)
        self._prefix = prefix
        self._head = f" HTTP/1.1\r\nHost: broker\r\nAuthorization: token {token}\r\n"

    @classmethod
    async def open(cls, host: str, port: int, *, prefix: str, token: str) -> Self:
        """Connect to the broker."""
        connection = cls(host, port, prefix, token)
        await connection._connect()
        return connection

    async def send(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send one request; return its status and the JSON of the response, None for an empty one."""
        text = b"" if body is None else json.dumps(body).encode()
        kind = "Content-Type: application/json\r\n" if text else ""
        head = f"{method} {self._prefix}{path}{self._head}{kind}Content-Length: {len(text)}\r\n\r\n"
        try:
            return await self._exchange(head.encode() + text)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if isinstance(error, asyncio.IncompleteReadError) and error.partial:
                raise
        self._writer.close()
        await self._connect()
        return await self._exchange(head.encode() + text)

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        await self._writer.wait_closed()

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address, limit=1 << 24)

    async def _exchange(self, request: bytes) -> tuple[int, Any]:
        self._writer.write(request)
        await self._writer.drain()
        return await self._read()

    async def _read(self) -> tuple[int, Any]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines)
        text = await self._reader.readexactly(int(fields.get("content-length", "0")))
        return int(first.split(" ", 2)[1]), json.loads(text) if text else None


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
