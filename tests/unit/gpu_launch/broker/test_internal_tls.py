"""From a notebook's container to a broker that wants certificates on both sides."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch import environment
from gpu_launch.broker.client import BrokerClient
from gpu_launch.cli.connection import credentials
from gpu_launch.cli.connection.http import Connection, build_broker
from gpu_launch.errors import BrokerError
from tests.support.tls import make_certificate


class _EmptyJsonHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def container(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A notebook's environment, with a broker on loopback: one certificate serves both, and is its own authority."""
    certificate, key = map(str, make_certificate(tmp_path))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificate)
    tls.load_cert_chain(certificate, key)
    tls.verify_mode = ssl.CERT_REQUIRED
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _EmptyJsonHandler) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield {
            "GPUHUB_BROKER_URL": f"https://127.0.0.1:{server.server_port}",
            "GPUHUB_BROKER_CA": certificate,
            "JUPYTERHUB_API_TOKEN": "token",
            "JUPYTERHUB_SSL_CERTFILE": certificate,
            "JUPYTERHUB_SSL_KEYFILE": key,
        }
        server.shutdown()
        thread.join()


def test_broker_clients_present_the_notebooks_certificate(container: dict[str, str]) -> None:
    """The magic's client, the command line's, and its streams."""
    hub = credentials.choose_hub(None, container)
    assert BrokerClient.for_notebook(environment.read(container), retry_limit_s=0).list_jobs() == []
    assert build_broker(hub, retry_limit_s=0).list_jobs() == []
    with Connection(hub).get("/jobs") as answer:
        assert answer.read() == b"[]"


def test_system_certificate_authorities_are_not_trusted(container: dict[str, str], tmp_path: Path) -> None:
    """A broker of any other authority than the one given is refused, whatever the system trusts."""
    (tmp_path / "other").mkdir()
    container["GPUHUB_BROKER_CA"] = str(make_certificate(tmp_path / "other")[0])
    with pytest.raises(BrokerError, match="self-signed certificate"):
        BrokerClient.for_notebook(environment.read(container), retry_limit_s=0).list_jobs()


@pytest.mark.parametrize("missing", ["GPUHUB_BROKER_CA", "JUPYTERHUB_SSL_CERTFILE"])
def test_unreadable_certificates_are_reported(container: dict[str, str], missing: str) -> None:
    """With what to do, before anything is sent."""
    container[missing] = "/no/such/file.pem"
    with pytest.raises(BrokerError, match=r"cannot be read \(No such file or directory\): stop it and start it again"):
        BrokerClient.for_notebook(environment.read(container))
    with pytest.raises(BrokerError, match="cannot be read"):
        build_broker(credentials.choose_hub(None, container))


def test_ranks_do_not_get_the_notebooks_private_key(container: dict[str, str]) -> None:
    """As of all that the hub gave it."""
    left = environment.remove_secrets(container)
    assert left == {name: container[name] for name in ("GPUHUB_BROKER_URL", "GPUHUB_BROKER_CA")}
