"""The product's own hub, on a node that has no Docker: what JupyterHub gives a notebook is written down instead.

`RECORDED` names the folder. Everything but the container is real: the settings, roles and scopes, the spawner's checks of
what a user sent, JupyterHub's own token for the server, and a server that answers.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyterhub import __version__

from gpuhub import hubconfig
from gpuhub.containers.spawner import GpuDockerSpawner
from gpuhub.errors import NodeUnreachable

if TYPE_CHECKING:

    def get_config() -> Any: ...
    def load_subconfig(name: str, path: str) -> None: ...


ANSWER = f"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-JupyterHub-Version: {__version__}\r\nConnection: close\r\n\r\n{{}}"


class Recording(GpuDockerSpawner):
    """A server in the hub's own process in place of a container."""

    _answering: asyncio.Server | None = None

    async def _start(self) -> tuple[str, int]:
        try:
            return await super()._start()
        except NodeUnreachable:
            self._answering = await asyncio.start_server(answer, "127.0.0.1", 0)
        file = Path(os.environ["RECORDED"]) / f"{self.user.name}-{self.name}.json"
        file.write_text(json.dumps(self.get_env()), encoding="utf-8")
        host, port = self._answering.sockets[0].getsockname()
        return host, port

    async def poll(self) -> int | None:
        """Whether it answers."""
        return 0 if self._answering is None else None

    async def stop(self, now: bool = False) -> None:
        """End it."""
        await super().stop(now)
        if self._answering is not None:
            self._answering.close()
            self._answering = None


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a notebook does, in few words."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(ANSWER.encode())
    await writer.drain()
    writer.close()


load_subconfig("jupyterhub_config.py", path=str(Path(__file__).parents[2]))
c = get_config()
c.JupyterHub.spawner_class = Recording
c.Recording.update(c.GpuDockerSpawner)
c.JupyterHub.services = [*hubconfig.services(), {"name": "foreign", "api_token": "foreign-" * 4, "display": False}]
