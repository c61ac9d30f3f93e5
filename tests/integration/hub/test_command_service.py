"""A service that an administrator's own configuration has the hub start and route to: its command and url."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gpuhub.ops.deploy.own_config import FOLDER
from tests.support.hub.login_hub import free_ports
from tests.support.hub.served_hub import ServedHub
from tests.support.product import ROOT, wait_for

#: Answers with the path of the request; with internal TLS, only the proxy's certificate is accepted.
PROGRAM = """
import os, ssl
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.environ['JUPYTERHUB_SERVICE_NAME']} {self.path}".encode())

server = HTTPServer(("127.0.0.1", urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"]).port), Handler)
if "JUPYTERHUB_SSL_KEYFILE" in os.environ:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=os.environ["JUPYTERHUB_SSL_CLIENT_CA"])
    context.load_cert_chain(os.environ["JUPYTERHUB_SSL_CERTFILE"], os.environ["JUPYTERHUB_SSL_KEYFILE"])
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""
OWN = """
import sys
c.JupyterHub.services.append({{"name": "notes", "command": [sys.executable, {program!r}], "url": {url!r}}})
"""


@pytest.fixture(params=["false", "true"], ids=["plain", "internal TLS"])
def hub(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServedHub]:
    """A running hub with the product's configuration and an administrator's file."""
    config = Path(shutil.copy(ROOT / "jupyterhub_config.py", tmp_path))
    program = tmp_path / "notes.py"
    program.write_text(PROGRAM, encoding="utf-8")
    url = f"http{'s' if request.param == 'true' else ''}://127.0.0.1:{free_ports(1)[0]}"
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "notes.py").write_text(OWN.format(program=str(program), url=url), encoding="utf-8")
    served = ServedHub(
        "ghcmd",
        tmp_path,
        f"internal_tls = {request.param}",
        18680,
        config=f"load_subconfig({str(config)!r})\n",
    )
    try:
        served.start()
        yield served
    finally:
        served.stop()


def test_service_with_a_command_is_reached_through_the_proxy(hub: ServedHub) -> None:
    def request() -> str | None:
        answer = httpx.get(f"http://127.0.0.1:{hub.port}/services/notes/page", timeout=30, trust_env=False)
        return answer.text if answer.status_code == httpx.codes.OK else None

    assert wait_for(request, "the service", 60) == "notes /services/notes/page"
