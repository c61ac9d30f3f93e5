"""The nodes' Docker daemons: one client and one small executor a node, so that a hung node stalls nobody else."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, TypeVar

import docker
import docker.errors
import docker.tls
import requests

from gpuhub.containers.ssh import ssh_files
from gpuhub.containers.tunnels import Tunnel
from gpuhub.errors import Conflict, GpuhubError, ImageMissing, NodeSilent, NodeUnreachable, NotFound
from gpuhub.settings import Node

#: Spoken until the daemon has said which version it has; Engine 20.10 and everything later answers `/version`.
_FIRST_API_VERSION = "1.41"
_THREADS = 4
_LONG_THREADS = 2
#: For loading, saving and pulling images.
LONG_TIMEOUT_S = 1800.0

T = TypeVar("T")


class _Kind(Enum):
    """What calls are about; those of one kind never wait for those of another."""

    SHORT = auto()
    LONG = auto()
    MOUNTING = auto()

    @property
    def threads(self) -> int:
        """How many for each node."""
        return _LONG_THREADS if self is _Kind.LONG else _THREADS


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
        self._lanes: dict[tuple[str, _Kind], _Lane] = {}
        self._tunnels: dict[str, Tunnel] = {}
        self._lock = threading.Lock()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in the order of the settings."""
        return tuple(self._nodes.values())

    def client(self, node: str) -> Any:
        """The node's docker.APIClient for short calls; blocks when it is made."""
        return self._lane(node, _Kind.SHORT).connected()

    def executor(self, node: str) -> ThreadPoolExecutor:
        """The node's threads for short calls."""
        return self._lane(node, _Kind.SHORT).executor

    async def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `APIClient.method(*args, **kwargs)` on the node.

        Raises:
            NodeUnreachable: the daemon does not answer within the time limit.
            ImageMissing, NotFound, Conflict: what the daemon said.
            GpuhubError: any other refusal, with the daemon's own explanation.
        """
        return await self.run(node, lambda client: getattr(client, method)(*args, **kwargs))

    async def run(self, node: str, work: Callable[[Any], T], *, long: bool = False, mounting: bool = False) -> T:
        """Run `work(client)` in one of the node's threads; `long` allows half an hour, for images. `mounting`: the
        daemon mounts or unmounts a user's storage for it, which may hang while the daemon itself is well, so it has
        threads of its own.

        Raises:
            As `call` does.
        """
        lane = self._lane(node, _Kind.LONG if long else _Kind.MOUNTING if mounting else _Kind.SHORT)
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(lane.executor, functools.partial(_work, lane, work))
        # Twice the client's own limit: the first may go by waiting for a thread.
        limit_s = lane.timeout_s * 2 + 5
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the answer.
            async with asyncio.timeout(limit_s):
                return await job
        except TimeoutError:
            raise NodeSilent(f"node {node}: its Docker daemon did not answer within {limit_s:.0f} s") from None

    def close(self) -> None:
        """Drop clients, threads and tunnels."""
        with self._lock:
            for lane in self._lanes.values():
                lane.close()
            for tunnel in self._tunnels.values():
                tunnel.close()
            self._lanes.clear()
            self._tunnels.clear()

    def _lane(self, name: str, kind: _Kind) -> _Lane:
        node = self._nodes.get(name)
        if node is None:
            raise NotFound(f"there is no node {name!r}; there are {', '.join(self._nodes)}")
        with self._lock:
            lane = self._lanes.get((name, kind))
            if lane is None:
                lane = _Lane(
                    node=node,
                    timeout_s=LONG_TIMEOUT_S if kind is _Kind.LONG else self._timeout_s,
                    executor=ThreadPoolExecutor(kind.threads, thread_name_prefix=f"docker-{name}-{kind.name.lower()}"),
                    tunnel=self._tunnel(node),
                )
                self._lanes[name, kind] = lane
            return lane

    def _tunnel(self, node: Node) -> Tunnel | None:
        if not node.docker.startswith("ssh://"):
            return None
        if node.name not in self._tunnels:
            self._tunnels[node.name] = Tunnel(node.name, node.docker, self._run_dir, ssh_files(self.instance))
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
        raise translate(lane.node.name, error, is_tls=lane.node.tls is not None) from error


#: What means that the daemon was not reached; the first that fits counts.
_SILENCE: tuple[tuple[type[Exception], str], ...] = (
    (docker.errors.TLSParameterError, "its tls cannot be used: check that the files of ca, cert and key exist"),
    (requests.exceptions.SSLError, "TLS with its Docker daemon fails: check ca, cert and key of its tls"),
    (requests.exceptions.Timeout, "its Docker daemon does not answer in time"),
    (requests.exceptions.RequestException, "its Docker daemon cannot be reached"),
    (OSError, "its Docker daemon cannot be reached"),
)


#: What OpenSSL says when one side's certificate is not accepted, and what that means here.
_REFUSALS: tuple[tuple[str, str], ...] = (
    ("certificate has expired", "the certificate of its Docker daemon has expired: `gpuhub node add --tls` renews it"),
    ("certificate is not yet valid", "the certificate of its Docker daemon is not valid yet: compare the clocks"),
    ("IP address mismatch", "the certificate of its Docker daemon is for another address"),
    ("Hostname mismatch", "the certificate of its Docker daemon is for another name"),
    ("CERTIFICATE_VERIFY_FAILED", "the certificate of its Docker daemon is not of the authority in tls.ca"),
    (
        "ALERT_CERTIFICATE_EXPIRED",
        "its Docker daemon says that tls.cert has expired: `gpuhub node add --tls` renews it",
    ),
    ("ALERT_CERTIFICATE_REQUIRED", "its Docker daemon wants a certificate: check tls.cert and tls.key"),
    ("ALERT_BAD_CERTIFICATE", "its Docker daemon does not accept tls.cert"),
    ("ALERT_UNKNOWN_CA", "its Docker daemon does not accept tls.cert: it knows another authority"),
)


#: With TLS 1.3 a refused certificate is told after the first request, which then may find the connection gone.
_BROKEN_OFF = ("Connection reset by peer", "Broken pipe", "EOF occurred in violation of protocol")


def translate(node: str, error: Exception, *, is_tls: bool = False) -> GpuhubError:
    """What docker-py raised, as an error whose text may be shown."""
    if isinstance(error, docker.errors.APIError):
        explanation = _explain(error)
        kinds: dict[int, type[GpuhubError]] = {404: NotFound, 409: Conflict}
        if isinstance(error, docker.errors.ImageNotFound):
            return ImageMissing(f"node {node}: {explanation}")
        return kinds.get(error.status_code or 0, GpuhubError)(f"node {node}: {explanation}")
    refusal = next((text for sign, text in _REFUSALS if sign in str(error)), None)
    if refusal is not None and isinstance(error, requests.exceptions.RequestException | OSError):
        return NodeUnreachable(f"node {node}: unauthenticated: {refusal}")
    if is_tls and any(sign in str(error) for sign in _BROKEN_OFF):
        return NodeUnreachable(
            f"node {node}: unauthenticated: its Docker daemon broke the connection off; unless it was being "
            "restarted, it does not accept tls.cert"
        )
    for kind, text in _SILENCE:
        if isinstance(error, kind):
            silent = isinstance(error, requests.exceptions.ReadTimeout)
            return (NodeSilent if silent else NodeUnreachable)(f"node {node}: {text}")
    return GpuhubError(f"node {node}: {_without_urls(str(error))}")


def _explain(error: Any) -> str:
    text = error.explanation or error
    return _without_urls(text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text))


def _without_urls(text: str) -> str:
    return re.sub(r"\b[a-z+]+://\S+", "(address)", text).strip()
