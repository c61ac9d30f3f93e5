"""A relay to a node's Docker over the node's network with mutual TLS, as real machines are reached, with faults.

`python -m tests.faults.testbed.relay ADDRESS PORT SOCKET FOLDER` runs in the node's network namespace, so that packets dropped
there are really lost. FOLDER has `ca.pem`, `server.pem` and `server.key`. Its file `fault` is read at each request:
`{"on": "POST /containers/create", "do": "hold"}` where `on` is a pattern for method and path, and `do` is

- `hold`: the request continues when the fault is over;
- `drop_response`: the daemon handles the request, and its response is lost;
- `refuse`: the daemon does not get the request, and the client gets `message` with status 500;
- `delay`: the request takes `seconds` longer.

The file `matched` has a line for every request that matched the fault.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import sys
from pathlib import Path
from typing import Any

_REQUEST = re.compile(rb"(GET|POST|PUT|DELETE|HEAD) (?:/v[0-9.]+)?(/\S*) HTTP/1")
_POLL_S = 0.05


class Relay:
    """A TLS server in front of one node's Docker."""

    def __init__(self, daemon: Path, folder: Path) -> None:
        self._daemon = daemon
        self._folder = folder

    async def serve(self, address: str, port: int) -> None:
        """Serve until the process is ended."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder / "server.pem", self._folder / "server.key")
        context.load_verify_locations(self._folder / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        server = await asyncio.start_server(self._serve_connection, address, port, ssl=context)
        (self._folder / "serves").touch()
        async with server:
            await server.serve_forever()

    def _read_fault(self) -> dict[str, Any]:
        file = self._folder / "fault"
        fault: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return fault

    async def _serve_connection(self, client: asyncio.StreamReader, responses: asyncio.StreamWriter) -> None:
        try:
            daemon, requests = await asyncio.open_unix_connection(self._daemon)
        except OSError:
            responses.close()
            return
        connection = _Connection(self, client, responses, daemon, requests)
        pumps = {asyncio.ensure_future(connection.up()), asyncio.ensure_future(connection.down())}
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            responses.close()
            requests.close()

    async def apply_fault(self, request: bytes) -> dict[str, Any]:
        """Return the fault that matches the request, after its delay; empty for none."""
        fault = self._read_fault()
        if not fault or not re.search(fault["on"], request.decode("ascii", "replace")):
            return {}
        with (self._folder / "matched").open("a") as matched:
            matched.write(request.decode("ascii", "replace") + "\n")
        if fault["do"] == "delay":
            await asyncio.sleep(fault["seconds"])
        if fault["do"] == "hold":
            await self.wait_over(fault)
        return fault

    async def wait_over(self, fault: dict[str, Any]) -> None:
        """Return when the fault was removed."""
        while self._read_fault() == fault:  # noqa: ASYNC110 - a file gives no notice when it is removed
            await asyncio.sleep(_POLL_S)


class _Connection:
    def __init__(
        self,
        relay: Relay,
        client: asyncio.StreamReader,
        responses: asyncio.StreamWriter,
        daemon: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
    ) -> None:
        self._relay = relay
        self._client, self._responses = client, responses
        self._daemon, self._requests = daemon, requests
        self._dropping: dict[str, Any] = {}

    async def up(self) -> None:
        """Copy from the client to the daemon."""
        is_refused = False
        while chunk := await self._client.read(65536):
            request = _REQUEST.match(chunk)
            if request is not None:
                fault = await self._relay.apply_fault(b" ".join(request.groups()))
                is_refused = fault.get("do") == "refuse"
                if is_refused:
                    self._refuse(fault["message"])
                if self._client.at_eof():
                    return  # the client has disconnected in the meantime
                if fault.get("do") == "drop_response":
                    self._dropping = fault
            if not is_refused:
                self._requests.write(chunk)
                await self._requests.drain()

    async def down(self) -> None:
        """Copy from the daemon to the client."""
        while chunk := await self._daemon.read(65536):
            if self._dropping:
                await self._relay.wait_over(self._dropping)
                return
            self._responses.write(chunk)
            await self._responses.drain()

    def _refuse(self, message: str) -> None:
        body = json.dumps({"message": message}).encode()
        head = (
            f"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        self._responses.write(head.encode() + b"\r\n" + body)


if __name__ == "__main__":
    asyncio.run(Relay(Path(sys.argv[3]), Path(sys.argv[4])).serve(sys.argv[1], int(sys.argv[2])))
