"""The nodes' Docker daemons: one client and one small executor a node, so that a hung node stalls nobody else."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import docker
import docker.errors
import docker.tls
import requests

from gpuhub.containers.tunnels import Tunnel
from gpuhub.errors import Conflict, GpuhubError, ImageMissing, NodeUnreachable, NotFound
from gpuhub.settings import Node

#: Spoken until the daemon has said which version it has; Engine 20.10 and everything later answers `/version`.
_FIRST_API_VERSION = "1.41"
_THREADS = 4
_LONG_THREADS = 2
#: For loading, saving and pulling images.
LONG_TIMEOUT_S = 1800.0

T = TypeVar("T")


@dataclass(slots=True)
class _Lane:
    """A client and its threads, for calls of one time limit to one node."""

    node: Node
    timeout_s: float
    executor: ThreadPoolExecutor
    tunnel: Tunnel | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    client: Any = None

    def connected(self) -> Any:
        """The client, made on first use; blocks."""
        if self.tunnel is not None:
            self.tunnel.ensure()
        with self.lock:
            if self.client is None:
                self.client = _connect(self.node, self.tunnel, self.timeout_s)
            return self.client

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            if self.client is not None:
                self.client.close()
                self.client = None


class Daemons:
    """Every node's Docker daemon. Safe to use from one event loop and from threads."""

    def __init__(self, nodes: Sequence[Node], *, instance: str, run_dir: Path, timeout_s: float = 10.0) -> None:
        self._nodes = {node.name: node for node in nodes}
        self.instance = instance
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._lanes: dict[tuple[str, bool], _Lane] = {}
        self._tunnels: dict[str, Tunnel] = {}
        self._lock = threading.Lock()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in the order of the settings."""
        return tuple(self._nodes.values())

    def client(self, node: str) -> Any:
        """The node's docker.APIClient for short calls; blocks when it is made."""
        return self._lane(node, long=False).connected()

    def executor(self, node: str) -> ThreadPoolExecutor:
        """The node's threads for short calls."""
        return self._lane(node, long=False).executor

    async def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `APIClient.method(*args, **kwargs)` on the node.

        Raises:
            NodeUnreachable: the daemon does not answer within the time limit.
            ImageMissing, NotFound, Conflict: what the daemon said.
            GpuhubError: any other refusal, with the daemon's own explanation.
        """
        return await self.run(node, lambda client: getattr(client, method)(*args, **kwargs))

    async def run(self, node: str, work: Callable[[Any], T], *, long: bool = False) -> T:
        """Run `work(client)` in one of the node's threads; `long` allows half an hour, for images.

        Raises:
            As `call` does.
        """
        lane = self._lane(node, long=long)
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(lane.executor, functools.partial(_work, lane, work))
        # Twice the client's own limit: the first may go by waiting for a thread.
        limit_s = lane.timeout_s * 2 + 5
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the answer.
            async with asyncio.timeout(limit_s):
                return await job
        except TimeoutError:
            raise NodeUnreachable(f"node {node}: its Docker daemon did not answer within {limit_s:.0f} s") from None

    def close(self) -> None:
        """Drop clients, threads and tunnels."""
        with self._lock:
            for lane in self._lanes.values():
                lane.close()
            for tunnel in self._tunnels.values():
                tunnel.close()
            self._lanes.clear()
            self._tunnels.clear()

    def _lane(self, name: str, *, long: bool) -> _Lane:
        node = self._nodes.get(name)
        if node is None:
            raise NotFound(f"there is no node {name!r}; there are {', '.join(self._nodes)}")
        with self._lock:
            lane = self._lanes.get((name, long))
            if lane is None:
                lane = _Lane(
                    node=node,
                    timeout_s=LONG_TIMEOUT_S if long else self._timeout_s,
                    executor=ThreadPoolExecutor(
                        _LONG_THREADS if long else _THREADS,
                        thread_name_prefix=f"docker-{name}{'-long' if long else ''}",
                    ),
                    tunnel=self._tunnel(node),
                )
                self._lanes[name, long] = lane
            return lane

    def _tunnel(self, node: Node) -> Tunnel | None:
        if not node.docker.startswith("ssh://"):
            return None
        if node.name not in self._tunnels:
            self._tunnels[node.name] = Tunnel(node.name, node.docker, self._run_dir)
        return self._tunnels[node.name]


def _connect(node: Node, tunnel: Tunnel | None, timeout_s: float) -> Any:
    """A client that speaks the daemon's own API version."""
    tls = None
    if node.tls is not None:
        tls = docker.tls.TLSConfig(
            client_cert=(str(node.tls.cert), str(node.tls.key)), ca_cert=str(node.tls.ca), verify=True
        )
    base_url = node.docker if tunnel is None else tunnel.base_url
    version = _FIRST_API_VERSION
    for _ in range(2):
        client = docker.APIClient(base_url=base_url, version=version, timeout=timeout_s, tls=tls)
        # Otherwise REQUESTS_CA_BUNDLE in the environment would override the node's own CA.
        client.trust_env = False
        if version == _FIRST_API_VERSION:
            version = client.version(api_version=False)["ApiVersion"]
            if version == _FIRST_API_VERSION:
                break
            client.close()
    return client


def _work(lane: _Lane, work: Callable[[Any], T]) -> T:
    try:
        return work(lane.connected())
    except GpuhubError:
        raise
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise translate(lane.node.name, error) from error


#: What means that the daemon was not reached; the first that fits counts.
_SILENCE: tuple[tuple[type[Exception], str], ...] = (
    (docker.errors.TLSParameterError, "its tls cannot be used: check that the files of ca, cert and key exist"),
    (requests.exceptions.SSLError, "TLS with its Docker daemon fails: check ca, cert and key of its tls"),
    (requests.exceptions.Timeout, "its Docker daemon does not answer in time"),
    (requests.exceptions.RequestException, "its Docker daemon cannot be reached"),
    (OSError, "its Docker daemon cannot be reached"),
)


def translate(node: str, error: Exception) -> GpuhubError:
    """What docker-py raised, as an error whose text may be shown."""
    if isinstance(error, docker.errors.APIError):
        explanation = _explain(error)
        kinds: dict[int, type[GpuhubError]] = {404: NotFound, 409: Conflict}
        if isinstance(error, docker.errors.ImageNotFound):
            return ImageMissing(f"node {node}: {explanation}")
        return kinds.get(error.status_code or 0, GpuhubError)(f"node {node}: {explanation}")
    for kind, text in _SILENCE:
        if isinstance(error, kind):
            return NodeUnreachable(f"node {node}: {text}")
    return GpuhubError(f"node {node}: {_without_urls(str(error))}")


def _explain(error: Any) -> str:
    text = error.explanation or error
    return _without_urls(text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text))


def _without_urls(text: str) -> str:
    return re.sub(r"\b[a-z+]+://\S+", "(address)", text).strip()
