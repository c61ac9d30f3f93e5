"""The product's hub on a machine without Docker, which records what JupyterHub passes to a notebook.

`RECORDED` names the folder. Everything except the container is real: the settings, roles and scopes, the spawner's
checks of user options, JupyterHub's token for the server, and a server that answers.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyterhub import __version__

from gpuhub import hub_config
from gpuhub.common.errors import Unavailable
from gpuhub.spawners.docker.spawner import GpuDockerSpawner

if TYPE_CHECKING:

    def get_config() -> Any: ...
    def load_subconfig(name: str, path: str) -> None: ...


ANSWER = f"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-JupyterHub-Version: {__version__}\r\nConnection: close\r\n\r\n{{}}"


class Recording(GpuDockerSpawner):
    """A server in the hub's process instead of a container."""

    _answering: asyncio.Server | None = None

    async def _start(self) -> tuple[str, int]:
        try:
            return await super()._start()
        except Unavailable:
            self._answering = await asyncio.start_server(answer, "127.0.0.1", 0)
        file = Path(os.environ["RECORDED"]) / f"{self.user.name}-{self.name}.json"
        file.write_text(json.dumps(self.get_env()), encoding="utf-8")
        host, port = self._answering.sockets[0].getsockname()
        return host, port

    async def poll(self) -> int | None:
        """Return whether the server answers."""
        return 0 if self._answering is None else None

    async def stop(self, now: bool = False) -> None:
        """End the server."""
        await super().stop(now)
        if self._answering is not None:
            self._answering.close()
            self._answering = None


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as a notebook server does."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(ANSWER.encode())
    await writer.drain()
    writer.close()


load_subconfig("jupyterhub_config.py", path=str(Path(__file__).parents[3]))
c = get_config()
c.JupyterHub.spawner_class = Recording
c.Recording.update(c.GpuDockerSpawner)
c.JupyterHub.services = [*hub_config.services(), {"name": "foreign", "api_token": "foreign-" * 4, "display": False}]
