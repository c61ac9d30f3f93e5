"""Limits of JupyterHub's real proxy: long headers, silent and slow clients."""

from __future__ import annotations

import os
import resource
import select
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuhub.common.paths import Paths
from gpuhub.ops.deploy.proxy import build_proxy_command, build_proxy_environment, find_proxy
from gpuhub.tls.internal_certificates import CertificateFiles
from tests.support.product import wait_for
from tests.support.tls import make_certificate

PORT = 18480


@pytest.fixture(scope="module", params=["http", "https"])
def proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The running proxy without a hub."""
    https = None
    if request.param == "https":
        https = CertificateFiles(*make_certificate(tmp_path_factory.mktemp("tls")))
    command = build_proxy_command(
        find_proxy(),
        public=("127.0.0.1", PORT),
        api_port=PORT + 1,
        hub_url="http://127.0.0.1:9",
        internal=None,
        https=https,
    )
    environment = build_proxy_environment(https, Paths("ghunit"), Path("/c.toml"), is_ours=False)
    process = subprocess.Popen(command, env=os.environ | environment | {"CONFIGPROXY_AUTH_TOKEN": "x"})
    try:
        wait_for(is_listening, "the proxy", 60)
        yield request.param
    finally:
        process.terminate()
        process.wait(30)


def is_listening() -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", PORT)) == 0


def connect() -> socket.socket:
    return socket.create_connection(("127.0.0.1", PORT), timeout=60)


def test_silent_clients_are_disconnected(proxy: str) -> None:
    """Without a byte, with half a request, or instead of a TLS handshake; Node's own limits are one or two minutes."""
    began = time.monotonic()
    with ExitStack() as stack:
        connections = [stack.enter_context(connect()) for _ in range(20)]
        if proxy == "http":
            for connection in connections[:10]:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        for connection in connections:
            assert b"HTTP/1.1 200" not in connection.recv(4096)
    assert time.monotonic() - began < 50


def test_connections_from_one_address_are_limited(proxy: str) -> None:
    """Above the limit connections are closed at once."""
    with ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
        connections = [stack.enter_context(connect()) for _ in range(2100)]
        poll = select.poll()
        for connection in connections:
            poll.register(connection, select.POLLIN | select.POLLHUP)
        last = connections[-1].fileno()
        wait_for(lambda: last in {number for number, _ in poll.poll(0)}, "the last one is closed", 8)


def test_long_headers_are_refused(proxy: str) -> None:
    """431 after 16 KiB."""
    with ExitStack() as stack:
        connection = stack.enter_context(connect())
        if proxy == "https":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = stack.enter_context(context.wrap_socket(connection))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000)
        assert connection.recv(4096).startswith(b"HTTP/1.1 431")
