"""Clients of the nodes' Docker daemons: each node has its own client and threads, so a hung node delays no other."""

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

from gpuhub.common.errors import (
    Conflict,
    GpuhubError,
    ImageMissing,
    NodeSilent,
    NodeUnreachable,
    NotFound,
)
from gpuhub.config.settings import NodeSettings
from gpuhub.docker.response_limit import limit_answers
from gpuhub.docker.ssh import SshTunnel, ssh_files
from gpuhub.docker.start_slots import StartSlots

#: Used until the daemon reports its own API version; Engine 20.10 and everything later answers `/version`.
_FIRST_API_VERSION = "1.41"
_THREADS = 4
_LONG_THREADS = 2
#: Time limit for loading, saving and pulling images, seconds.
LONG_TIMEOUT_S = 1800.0
#: Time limit for calls for which Docker asks its Swarm and waits 20 s, and for mounts where many containers start at
#: once, seconds.
_PATIENT_TIMEOUT_S = 25.0
#: While a daemon manages a Swarm without a leader, it answers these after 20 s.
_SWARM_METHODS = ("info",)

T = TypeVar("T")


class CallKind(Enum):
    """Kind of a call to a daemon; calls of one kind never wait for those of another."""

    SHORT = auto()
    #: Loading, saving and pulling images, with pauses of half an hour at most.
    LONG = auto()
    #: The daemon mounts or unmounts a user's storage for the call, which may hang while the daemon itself is well.
    MOUNTING = auto()
    #: The daemon waits for its Swarm: it joins an overlay, or says what it is part of.
    SWARM = auto()
    #: Starts a program of a user's in a container, which users decide how often and how fast.
    EXEC = auto()

    @property
    def threads(self) -> int:
        """Return the number of threads per node."""
        return _LONG_THREADS if self is CallKind.LONG else _THREADS

    def choose_timeout(self, short_s: float) -> float:
        """Return the time limit of a call, where that of short ones is `short_s`; seconds."""
        if self is CallKind.LONG:
            return LONG_TIMEOUT_S
        return max(short_s, _PATIENT_TIMEOUT_S) if self in (CallKind.SWARM, CallKind.MOUNTING) else short_s


@dataclass(slots=True)
class _NodeConnection:
    """A client and its threads, for calls of one kind to one node."""

    node: NodeSettings
    timeout_s: float
    executor: ThreadPoolExecutor
    tunnel: SshTunnel | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    client: Any = None

    def connect(self) -> Any:
        """Return the client, which is made on first use. Blocks."""
        if self.tunnel is not None:
            self.tunnel.ensure()
        with self.lock:
            if self.client is None:
                self.client = _build_client(self.node, self.tunnel, self.timeout_s)
                if self.node.guest:
                    limit_answers(self.client)
            return self.client

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            if self.client is not None:
                self.client.close()
                self.client = None


class DockerClients:
    """Clients of every node's Docker daemon. Safe to use from one event loop and from threads."""

    def __init__(self, nodes: Sequence[NodeSettings], *, instance: str, run_dir: Path, timeout_s: float = 10.0) -> None:
        self._nodes = {node.name: node for node in nodes}
        self.instance = instance
        self.start_slots = StartSlots()
        #: The node that answered last for the Swarm; see `gpuhub.docker.swarm.managers.ask_manager`.
        self.swarm_manager: str | None = None
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._connections: dict[tuple[str, CallKind], _NodeConnection] = {}
        self._tunnels: dict[str, SshTunnel] = {}
        self._lock = threading.Lock()

    @property
    def nodes(self) -> tuple[NodeSettings, ...]:
        return tuple(self._nodes.values())

    def client(self, node: str) -> Any:
        """Return the node's docker.APIClient for short calls. Blocks while the client is made."""
        return self._connection(node, CallKind.SHORT).connect()

    def executor(self, node: str) -> ThreadPoolExecutor:
        """Return the node's threads for short calls."""
        return self._connection(node, CallKind.SHORT).executor

    async def call(self, node: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `APIClient.method(*args, **kwargs)` on the node.

        Raises:
            NodeUnreachable: The daemon does not answer within the time limit.
            ImageMissing, NotFound, Conflict: The daemon refused the call for this reason.
            GpuhubError: The daemon refused the call for another reason, which is in the text.
        """
        kind = CallKind.SWARM if method in _SWARM_METHODS else CallKind.SHORT
        return await self.run(node, lambda client: getattr(client, method)(*args, **kwargs), kind=kind)

    async def run(self, node: str, work: Callable[[Any], T], *, kind: CallKind = CallKind.SHORT) -> T:
        """Run `work(client)` in one of the node's threads; each kind of call has its own.

        Raises:
            GpuhubError: As for `call`.
        """
        connection = self._connection(node, kind)
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(connection.executor, functools.partial(_run_work, connection, work))
        # Twice the client's own limit, because the call may first wait for a thread. A long one goes on while data
        # comes, whose pauses the client limits: over a slow line, images take hours.
        limit_s = None if kind is CallKind.LONG else connection.timeout_s * 2 + 5
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the answer.
            async with asyncio.timeout(limit_s):
                return await job
        except TimeoutError:
            raise NodeSilent(f"node {node}: its Docker daemon did not answer within {limit_s or 0:.0f} s") from None

    def close(self) -> None:
        """Close clients, threads and tunnels."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            for tunnel in self._tunnels.values():
                tunnel.close()
            self._connections.clear()
            self._tunnels.clear()

    def _connection(self, name: str, kind: CallKind) -> _NodeConnection:
        node = self._nodes.get(name)
        if node is None:
            raise NotFound(f"there is no node {name!r}; there are {', '.join(self._nodes)}")
        with self._lock:
            connection = self._connections.get((name, kind))
            if connection is None:
                connection = _NodeConnection(
                    node=node,
                    timeout_s=kind.choose_timeout(self._timeout_s),
                    executor=ThreadPoolExecutor(kind.threads, thread_name_prefix=f"docker-{name}-{kind.name.lower()}"),
                    tunnel=self._tunnel(node),
                )
                self._connections[name, kind] = connection
            return connection

    def _tunnel(self, node: NodeSettings) -> SshTunnel | None:
        if not node.docker.startswith("ssh://"):
            return None
        if node.name not in self._tunnels:
            self._tunnels[node.name] = SshTunnel(
                node.name, node.docker, self._run_dir, ssh_files(self.instance), is_guest=node.guest
            )
        return self._tunnels[node.name]


def _build_client(node: NodeSettings, tunnel: SshTunnel | None, timeout_s: float) -> Any:
    """Build a client that uses the daemon's own API version.

    Raises:
        NodeUnreachable: The node has no Docker. docker-py would use this machine's own daemon in place of an empty URL.
    """
    if not node.docker:
        raise NodeUnreachable(f"node {node.name}: cluster.toml gives it no docker address, so it has no containers")
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


def _run_work(connection: _NodeConnection, work: Callable[[Any], T]) -> T:
    try:
        return work(connection.connect())
    except GpuhubError:
        raise
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise translate_docker_error(connection.node.name, error, is_tls=connection.node.tls is not None) from error


#: Errors that mean that the daemon was not reached, with their texts; the first match counts.
_UNREACHABLE_CAUSES: tuple[tuple[type[Exception], str], ...] = (
    (docker.errors.TLSParameterError, "its tls cannot be used: check that the files of ca, cert and key exist"),
    (requests.exceptions.SSLError, "TLS with its Docker daemon fails: check ca, cert and key of its tls"),
    (requests.exceptions.Timeout, "its Docker daemon does not answer in time"),
    (requests.exceptions.RequestException, "its Docker daemon cannot be reached"),
    (OSError, "its Docker daemon cannot be reached"),
)

#: OpenSSL's messages for a certificate that one side refuses, and our explanations.
_TLS_REFUSALS: tuple[tuple[str, str], ...] = (
    ("certificate has expired", "the certificate of its Docker daemon has expired: `gpuhub node add --tls` renews it"),
    ("certificate is not yet valid", "the certificate of its Docker daemon is not valid yet: compare the clocks"),
    ("IP address mismatch", "the certificate of its Docker daemon is for another address"),
    ("Hostname mismatch", "the certificate of its Docker daemon is for another name"),
    ("CERTIFICATE_VERIFY_FAILED", "the certificate of its Docker daemon is not of the authority in tls.ca"),
    (
        "ALERT_CERTIFICATE_EXPIRED",
        "its Docker daemon reports that tls.cert has expired: `gpuhub node add --tls` renews it",
    ),
    ("ALERT_CERTIFICATE_REQUIRED", "its Docker daemon requires a certificate: check tls.cert and tls.key"),
    ("ALERT_BAD_CERTIFICATE", "its Docker daemon does not accept tls.cert"),
    ("ALERT_UNKNOWN_CA", "its Docker daemon does not accept tls.cert: it trusts another authority"),
)

#: Part of Docker's error for a container that is still listed and inspected but can't be read or started; the status is
#: 409 or 500.
_REMOVAL_SIGN = "marked for removal"

#: Texts of a connection that is gone: with TLS 1.3 a certificate is refused after the first request, which then may
#: fail so.
_CONNECTION_RESETS = ("Connection reset by peer", "Broken pipe", "EOF occurred in violation of protocol")


def is_being_removed(error: Exception) -> bool:
    """Return whether Docker refused to read or start a container because it is being removed."""
    return isinstance(error, docker.errors.APIError) and _REMOVAL_SIGN in str(error)


def translate_docker_error(node: str, error: Exception, *, is_tls: bool = False) -> GpuhubError:
    """Return an error with a text for users in place of what docker-py raised."""
    if isinstance(error, docker.errors.APIError):
        explanation = _explain(error)
        kinds: dict[int, type[GpuhubError]] = {404: NotFound, 409: Conflict}
        if isinstance(error, docker.errors.ImageNotFound):
            return ImageMissing(f"node {node}: {explanation}")
        error_class = kinds.get(404 if is_being_removed(error) else error.status_code or 0, GpuhubError)
        return error_class(f"node {node}: {explanation}")
    refusal = next((text for sign, text in _TLS_REFUSALS if sign in str(error)), None)
    if refusal is not None and isinstance(error, requests.exceptions.RequestException | OSError):
        return NodeUnreachable(f"node {node}: unauthenticated: {refusal}")
    if is_tls and any(sign in str(error) for sign in _CONNECTION_RESETS):
        return NodeUnreachable(
            f"node {node}: unauthenticated: its Docker daemon closed the connection; unless it was being "
            "restarted, it does not accept tls.cert"
        )
    for kind, text in _UNREACHABLE_CAUSES:
        if isinstance(error, kind):
            silent = isinstance(error, requests.exceptions.ReadTimeout)
            return (NodeSilent if silent else NodeUnreachable)(f"node {node}: {text}")
    return GpuhubError(f"node {node}: {_without_urls(str(error))}")


def _explain(error: Any) -> str:
    text = error.explanation or error
    return _without_urls(text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text))


def _without_urls(text: str) -> str:
    return re.sub(r"\b[a-z+]+://\S+", "(address)", text).strip()
