"""Notebooks with internal TLS on the closet's real daemons: whom they let in, and what a restarted hub makes of them."""

from __future__ import annotations

import ssl
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuhub import names
from gpuhub.trust import internal, notebooks
from gpuhub.trust.internal import Store
from tests.integration.conftest import INSTANCE
from tests.integration.test_spawner import OWNER, Head, broker, head, users
from tests.support.fake_broker import FakeBroker

__all__ = ["broker", "head", "users"]

#: Answers as a notebook server does with the certificates that its environment names, and ends on SIGTERM.
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
def store(tmp_path_factory: pytest.TempPathFactory, closet: Any) -> Store:
    """As `gpuhub up` makes it."""
    folder = tmp_path_factory.mktemp("secrets") / "internal"
    # Not in this process, where JupyterHub would drop the HTTP client that other tests have used.
    make = (
        "import pathlib, sys; from gpuhub.trust import renewal; renewal.ensure(pathlib.Path(sys.argv[1]), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", make, folder, str(closet.plan.head)], check=True)
    return Store(folder)


@pytest.fixture
def secured(users: Any, store: Store) -> Any:
    """As `users`, in a hub with internal TLS."""
    turn_on(users, store)
    users().settings["config"].GpuDockerSpawner.cmd = ["python3", "-c", NOTEBOOK]
    return users


def turn_on(users: Any, store: Store) -> None:
    """What JupyterHub tells users and spawners with `internal_ssl`."""
    hub = store.pair(internal.HUB)
    users().settings.update(
        internal_ssl=True,
        internal_certs_location=str(store.folder),
        internal_trust_bundles={name: str(store.bundle(name)) for name in internal.AUTHORITIES},
        internal_ssl_key=str(hub.key),
        internal_ssl_cert=str(hub.certificate),
        internal_ssl_ca=str(store.bundle(internal.HUB_AUTHORITY)),
    )


def ask(user: Any, tls: ssl.SSLContext, *, server: str = "", scheme: str = "https") -> int:
    """What a user's notebook answers at its node's address."""
    found = user.spawners[server].server
    url = f"{scheme}://{found.ip}:{found.port}/"
    with httpx.Client(verify=tls, trust_env=False, timeout=10) as client:
        return client.get(url).status_code


def someone(store: Store, own: internal.Pair | None) -> ssl.SSLContext:
    """A client that trusts notebooks."""
    context = ssl.create_default_context(cafile=str(store.pair(internal.NOTEBOOKS_AUTHORITY).certificate))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def in_files(folder: Path, issued: notebooks.Issued) -> internal.Pair:
    pair = internal.Pair(folder / "certificate.pem", folder / "key.pem")
    pair.certificate.write_bytes(issued.certificate)
    pair.key.write_bytes(issued.key)
    return pair


async def test_a_notebook_lets_in_hub_and_proxy_alone(head: Head, secured: Any, store: Store, tmp_path: Path) -> None:
    """Not who has no certificate, nor another user's notebook, nor plain HTTP; only its user reads its key."""
    user = secured()
    await user.spawn(options={"profile": "cpu"})
    spawner = user.spawner
    bens = in_files(tmp_path, notebooks.issue(store.folder, "ben", spawner.server.ip))
    assert spawner.server.proto == "https"
    assert ask(user, someone(store, store.pair(internal.HUB))) == 200
    assert ask(user, someone(store, store.pair(internal.PROXY_CLIENT))) == 200
    for stranger in (someone(store, None), someone(store, bens), someone(store, store.pair(internal.BROKER))):
        with pytest.raises(httpx.TransportError, match=r"alert certificate required|alert unknown ca"):
            ask(user, stranger)
    with pytest.raises(httpx.TransportError):
        ask(user, someone(store, None), scheme="http")
    found = head.inspect(spawner.node, names.notebook_container(INSTANCE, OWNER, ""))
    with closing(head.closet.client(spawner.node)) as client:
        container = client.containers.get(found["Id"])
        listed = container.exec_run(["ls", "-ln", internal.NOTEBOOK_FOLDER], user=found["Config"]["User"])
        other = container.exec_run(["cat", internal.NOTEBOOK_KEY], user="65534:65534")
    lines = [line.split()[:4] for line in listed.output.decode().splitlines()[1:]]
    assert lines == [["-r--------", "1", *found["Config"]["User"].split(":")]] * 4
    assert other.exit_code != 0
    assert not list(store.folder.glob("user-*"))
    await user.stop()


async def test_a_restarted_hub_goes_on_with_notebooks_that_have_certificates(
    head: Head, broker: FakeBroker, secured: Any, store: Store
) -> None:
    """Restored from its state, a default and a named server answer it; forgotten, one is adopted with its own key."""
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
    assert ask(after, someone(store, store.pair(internal.HUB))) == 200
    await after.stop()


async def test_a_notebook_started_without_tls_is_still_found(head: Head, users: Any, store: Store) -> None:
    """Where the setting was changed meanwhile, it is reached as it was started."""
    before = users()
    await before.spawn(options={"profile": "cpu"})
    url = before.spawner.server.url
    turn_on(users, store)
    after = users()
    assert await after.spawner.poll() is None
    assert await after.spawner.get_url() == url
    assert url.startswith("http://")
    await after.stop()
