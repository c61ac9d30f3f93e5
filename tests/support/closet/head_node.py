"""The hub's side of the practice closet: its settings, Docker clients and containers."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing
from typing import Any

from gpuhub.common import names
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients
from tests.support.closet.practice_closet import Closet

OWNER = "ada"
#: Responds like a notebook server, and ends on SIGTERM.
NOTEBOOK = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("X-JupyterHub-Version", "6.1.1")
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8888), Handler).serve_forever()
"""


@dataclasses.dataclass(frozen=True)
class HeadNode:
    """The head node of a closet."""

    closet: Closet
    cluster: ClusterSettings
    daemons: DockerClients

    def inspect(self, node: str, name: str) -> dict[str, Any]:
        """Return Docker's description of a container."""
        with closing(self.closet.client(node)) as client:
            return dict(client.api.inspect_container(name))

    def containers(self, kind: str) -> list[str]:
        """Return the names of the instance's containers of a kind on all nodes."""
        labels = [f"{names.LABEL_INSTANCE}={self.closet.paths.instance}", f"{names.LABEL_KIND}={kind}"]
        listed = []
        for node in self.cluster.nodes:
            with closing(self.closet.client(node.name)) as client:
                listed += [
                    container.name
                    for container in client.containers.list(all=True, ignore_removed=True, filters={"label": labels})
                ]
        return listed

    def remove_containers(self) -> None:
        """Remove the containers of a failed test, so that the next one does not fail too."""
        for node in self.cluster.nodes:
            with closing(self.closet.client(node.name)) as client:
                for container in client.containers.list(
                    all=True, ignore_removed=True, filters={"label": names.LABEL_LEASE}
                ):
                    container.remove(force=True)


def read_gpu_uuids(head: HeadNode, node: str) -> list[str]:
    cards = head.closet.paths.run / "closet" / node / "cards"
    texts = [(card / "card").read_text(encoding="utf-8") for card in sorted(cards.iterdir())]
    return [word for text in texts for word in text.split() if word.startswith("GPU-")]


async def until(condition: Any, deadline_s: float = 60.0) -> None:
    """Poll until the condition holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
