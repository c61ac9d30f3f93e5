"""A node's Docker as the head node reaches real machines, over the node's network with mutual TLS; and its troubles.

`python -m tests.faults.wire ADDRESS PORT SOCKET FOLDER` runs in the node's network namespace, so that what is dropped
there is truly lost. FOLDER has `ca.pem`, `server.pem` and `server.key`; its file `trouble` is read at each request:
`{"on": "POST /containers/create", "do": "hold"}` where `on` is searched in method and path, and `do` is

- `hold`: the request goes on when the trouble is over;
- `deaf`: the daemon gets it and does it, and its answer is lost;
- `refuse`: the daemon never gets it, and `says` comes back with status 500;
- `delay`: it takes `seconds` longer.

Every request that meets its trouble is a line of the file `met`.
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
_LOOK_S = 0.05


class Wire:
    """One node's way in."""

    def __init__(self, daemon: Path, folder: Path) -> None:
        self._daemon = daemon
        self._folder = folder

    async def serve(self, address: str, port: int) -> None:
        """Serve until the process is ended."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder / "server.pem", self._folder / "server.key")
        context.load_verify_locations(self._folder / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        server = await asyncio.start_server(self._pass, address, port, ssl=context)
        (self._folder / "serves").touch()
        async with server:
            await server.serve_forever()

    def _trouble(self) -> dict[str, Any]:
        file = self._folder / "trouble"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    async def _pass(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        try:
            daemon, requests = await asyncio.open_unix_connection(self._daemon)
        except OSError:
            answers.close()
            return
        connection = _Connection(self, client, answers, daemon, requests)
        pumps = {asyncio.ensure_future(connection.up()), asyncio.ensure_future(connection.down())}
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            answers.close()
            requests.close()

    async def meet(self, request: bytes) -> dict[str, Any]:
        """The trouble of this request, after what it holds up is over; empty for none."""
        trouble = self._trouble()
        if not trouble or not re.search(trouble["on"], request.decode("ascii", "replace")):
            return {}
        with (self._folder / "met").open("a") as met:
            met.write(request.decode("ascii", "replace") + "\n")
        if trouble["do"] == "delay":
            await asyncio.sleep(trouble["seconds"])
        if trouble["do"] == "hold":
            await self.until_over(trouble)
        return trouble

    async def until_over(self, trouble: dict[str, Any]) -> None:
        """Return when the trouble was taken away."""
        while self._trouble() == trouble:  # noqa: ASYNC110 - a file tells nobody that it is gone
            await asyncio.sleep(_LOOK_S)


class _Connection:
    def __init__(
        self,
        wire: Wire,
        client: asyncio.StreamReader,
        answers: asyncio.StreamWriter,
        daemon: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
    ) -> None:
        self._wire = wire
        self._client, self._answers = client, answers
        self._daemon, self._requests = daemon, requests
        self._deaf: dict[str, Any] = {}

    async def up(self) -> None:
        """From the client to the daemon."""
        is_refused = False
        while chunk := await self._client.read(65536):
            request = _REQUEST.match(chunk)
            if request is not None:
                trouble = await self._wire.meet(b" ".join(request.groups()))
                is_refused = trouble.get("do") == "refuse"
                if is_refused:
                    self._refuse(trouble["says"])
                if self._client.at_eof():
                    return  # who asked has gone meanwhile
                if trouble.get("do") == "deaf":
                    self._deaf = trouble
            if not is_refused:
                self._requests.write(chunk)
                await self._requests.drain()

    async def down(self) -> None:
        """From the daemon to the client."""
        while chunk := await self._daemon.read(65536):
            if self._deaf:
                await self._wire.until_over(self._deaf)
                return
            self._answers.write(chunk)
            await self._answers.drain()

    def _refuse(self, says: str) -> None:
        body = json.dumps({"message": says}).encode()
        head = (
            f"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        self._answers.write(head.encode() + b"\r\n" + body)


if __name__ == "__main__":
    asyncio.run(Wire(Path(sys.argv[3]), Path(sys.argv[4])).serve(sys.argv[1], int(sys.argv[2])))
