"""Notebooks with internal TLS on real daemons: which clients they accept, and how a restarted hub reaches them."""

from __future__ import annotations

import ssl
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuhub.common import names
from gpuhub.tls import internal_certificates, notebook_certificate
from gpuhub.tls.internal_certificates import CertificateStore
from tests.support.closet.head_node import OWNER, HeadNode
from tests.support.closet.practice_closet import INSTANCE
from tests.support.hub.fake_broker import FakeBroker

#: Responds like a notebook server, with the certificates that its environment names, and ends on SIGTERM.
NOTEBOOK = """
import http.server, os, signal, ssl, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("X-JupyterHub-Version", "6.1.1")
        self.end_headers()
    def log_message(self, *_):
        pass
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(os.environ["JUPYTERHUB_SSL_CERTFILE"], os.environ["JUPYTERHUB_SSL_KEYFILE"])
context.load_verify_locations(os.environ["JUPYTERHUB_SSL_CLIENT_CA"])
context.verify_mode = ssl.CERT_REQUIRED
server = http.server.ThreadingHTTPServer(("0.0.0.0", 8888), Handler)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, closet: Any) -> CertificateStore:
    """A certificate store as `gpuhub up` makes it."""
    folder = tmp_path_factory.mktemp("secrets") / "internal"
    # In a child process: here JupyterHub would drop the HTTP client that other tests have used.
    make = "import pathlib, sys; from gpuhub.tls import internal_certificates; internal_certificates.ensure_internal_certificates(pathlib.Path(sys.argv[1]), sys.argv[2])"
    subprocess.run([sys.executable, "-c", make, folder, str(closet.plan.head)], check=True)
    return CertificateStore(folder)


@pytest.fixture
def secured(users: Any, store: CertificateStore) -> Any:
    """The factory `users` in a hub with internal TLS."""
    enable_internal_tls(users, store)
    users().settings["config"].GpuDockerSpawner.cmd = ["python3", "-c", NOTEBOOK]
    return users


def enable_internal_tls(users: Any, store: CertificateStore) -> None:
    """Set what JupyterHub passes to users and spawners with `internal_ssl`."""
    hub = store.files(internal_certificates.HUB)
    users().settings.update(
        internal_ssl=True,
        internal_certs_location=str(store.folder),
        internal_trust_bundles={name: str(store.bundle(name)) for name in internal_certificates.AUTHORITIES},
        internal_ssl_key=str(hub.key),
        internal_ssl_cert=str(hub.certificate),
        internal_ssl_ca=str(store.bundle(internal_certificates.HUB_AUTHORITY)),
    )


def ask(user: Any, tls: ssl.SSLContext, *, server: str = "", scheme: str = "https") -> int:
    """Return the status with which a user's notebook responds at its node's address."""
    address = user.spawners[server].server
    url = f"{scheme}://{address.ip}:{address.port}/"
    with httpx.Client(verify=tls, trust_env=False, timeout=10) as client:
        return client.get(url).status_code


def client_context(store: CertificateStore, own: internal_certificates.CertificateFiles | None) -> ssl.SSLContext:
    """Return the TLS context of a client that trusts notebooks."""
    context = ssl.create_default_context(cafile=str(store.files(internal_certificates.NOTEBOOKS_AUTHORITY).certificate))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def write_certificate(
    folder: Path, issued: notebook_certificate.NotebookCertificate
) -> internal_certificates.CertificateFiles:
    pair = internal_certificates.CertificateFiles(folder / "certificate.pem", folder / "key.pem")
    pair.certificate.write_bytes(issued.certificate)
    pair.key.write_bytes(issued.key)
    return pair


async def test_notebook_accepts_only_hub_and_proxy(
    head: HeadNode, secured: Any, store: CertificateStore, tmp_path: Path
) -> None:
    """A notebook refuses clients without a certificate, other users' notebooks and plain HTTP; only its user reads its
    key.
    """
    user = secured()
    await user.spawn(options={"profile": "cpu"})
    spawner = user.spawner
    bens = write_certificate(tmp_path, notebook_certificate.issue_certificate(store.folder, "ben", spawner.server.ip))
    assert spawner.server.proto == "https"
    assert ask(user, client_context(store, store.files(internal_certificates.HUB))) == 200
    assert ask(user, client_context(store, store.files(internal_certificates.PROXY_CLIENT))) == 200
    for stranger in (
        client_context(store, None),
        client_context(store, bens),
        client_context(store, store.files(internal_certificates.BROKER)),
    ):
        with pytest.raises(httpx.TransportError, match=r"alert certificate required|alert unknown ca"):
            ask(user, stranger)
    with pytest.raises(httpx.TransportError):
        ask(user, client_context(store, None), scheme="http")
    inspected = head.inspect(spawner.node, names.notebook_container_name(INSTANCE, OWNER, ""))
    with closing(head.closet.client(spawner.node)) as client:
        container = client.containers.get(inspected["Id"])
        listed = container.exec_run(
            ["ls", "-ln", internal_certificates.NOTEBOOK_FOLDER], user=inspected["Config"]["User"]
        )
        other = container.exec_run(["cat", internal_certificates.NOTEBOOK_KEY], user="65534:65534")
    lines = [line.split()[:4] for line in listed.output.decode().splitlines()[1:]]
    assert lines == [["-r--------", "1", *inspected["Config"]["User"].split(":")]] * 4
    assert other.exit_code != 0
    assert not list(store.folder.glob("user-*"))
    await user.stop()


async def test_restarted_hub_resumes_notebooks_with_certificates(
    head: HeadNode, broker: FakeBroker, secured: Any, store: CertificateStore
) -> None:
    """A restarted hub reaches notebooks restored from its state, and adopts a forgotten one with its own key."""
    before = secured()
    for server in ("", "second"):
        await before.spawn(server, options={"profile": "cpu"})
    urls = {server: before.spawners[server].server.url for server in ("", "second")}
    restarted = secured()
    for server, url in urls.items():
        spawner = restarted.spawners[server]
        assert await spawner.poll() is None
        assert await spawner.get_url() == url
        assert url.startswith("https://")
        await restarted._wait_up(spawner)
    await restarted.stop("second")
    container = restarted.spawner.object_id
    restarted.spawner.orm_spawner.state = {}
    restarted.spawner.server = None
    after = secured()
    await after.spawn(options={"profile": "cpu"})
    assert after.spawner.object_id == container
    assert after.spawner.server.url == urls[""]
    assert ask(after, client_context(store, store.files(internal_certificates.HUB))) == 200
    await after.stop()


async def test_a_notebook_started_without_tls_is_still_found(
    head: HeadNode, users: Any, store: CertificateStore
) -> None:
    """A notebook that was started before the setting changed is reached without TLS."""
    before = users()
    await before.spawn(options={"profile": "cpu"})
    url = before.spawner.server.url
    enable_internal_tls(users, store)
    after = users()
    assert await after.spawner.poll() is None
    assert await after.spawner.get_url() == url
    assert url.startswith("http://")
    await after.stop()
