"""Services on the practice closet's nodes: from lines in cluster.toml to a page behind the login, and to `gpuhub down`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from gpuhub.common import names, secrets
from gpuhub.common.paths import Paths
from tests.support.closet.existing_nodes import INSTANCE, run_gpuhub, write_settings
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

ADDRESS = "http://127.0.0.1:18200"
#: Answers with what it was sent, and remembers each visitor in its data.
PROGRAM = (
    "import http.server, json\\n"
    "class Handler(http.server.BaseHTTPRequestHandler):\\n"
    "    def do_GET(self):\\n"
    "        sent = {name.lower(): value for name, value in self.headers.items()}\\n"
    "        open('/data/visitors', 'a').write(sent['x-forwarded-user'] + chr(10))\\n"
    "        body = json.dumps(sent).encode()\\n"
    "        self.send_response(200)\\n"
    "        self.send_header('Content-Length', str(len(body)))\\n"
    "        self.end_headers()\\n"
    "        self.wfile.write(body)\\n"
    "print('serving', flush=True)\\n"
    "http.server.ThreadingHTTPServer(('', 8000), Handler).serve_forever()\\n"
)
#: From a user's container: connections to a service's own addresses, and what the broker answers to its token.
PROBE = """
import os, socket, sys, urllib.request
def connect(host):
    try:
        socket.create_connection((host, 8000), 5).close()
        return "open"
    except OSError as error:
        return type(error).__name__
print([connect(host) for host in sys.argv[1:]])
"""


@pytest.fixture
def data() -> Iterator[Path]:
    """A folder of the nodes, which have this machine's file system."""
    folder = Path("/srv") / f"gpuhub-test-{uuid4().hex[:8]}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def write(closet: Any, folder: Path, data: Path, services: bool = True) -> Path:
    """Write settings with a service that has no network, and one that has one and admits nobody of the tests."""
    common = f'image = "gpuhub/base:latest"\ncommand = ["python3", "-c", "{PROGRAM}"]\nport = 8000\n'
    tables = (
        f'[[services]]\nname = "notes"\nnode = "rig2"\ndata = "{data}"\n{common}'
        f'[[services]]\nname = "private"\ninternet = true\nusers = ["nobody-here"]\n{common}'
    )
    file = write_settings(closet, folder, tables if services else "")
    file.write_text(file.read_text().replace('https = "local"\n', ""))
    return file


def run_service(*words: str) -> str:
    """Run `gpuhub service`, and return its output."""
    command = [str(Path(sys.executable).with_name("gpuhub")), "service", *words, "--instance", INSTANCE]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout


def find_service(name: str) -> str:
    return next((line for line in run_service("list").splitlines() if line.startswith(f"{name} ")), "")


def ask(path: str, token: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}", "Cookie": "jupyterhub-session-id=secret"}
    return httpx.get(ADDRESS + path, headers=headers, trust_env=False, timeout=30)


def test_a_service_from_cluster_toml_to_its_removal(closet: Any, tmp_path: Path, data: Path) -> None:
    """Four lines bring it; it comes back when it dies; `doctor`, `service` and `down` know it, and its data stays."""
    file = write(closet, tmp_path, data)
    try:
        done = run_gpuhub("up", file)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for(lambda: "running" in find_service("notes"), "the service runs", 120)
        password = secrets.read_secret(Paths(INSTANCE), secrets.USER_PASSWORD)
        ada: Client = log_in(ADDRESS, "ada", password)
        wait_for(lambda: ask("/services/notes/", ada.token).status_code == 200, "it answers", 60)
        sent = ask("/services/notes/", ada.token).json()
        assert sent["x-forwarded-user"] == "ada"
        assert not {"authorization", "cookie"} & set(sent)
        assert ask("/services/private/", ada.token).status_code == 404
        assert ask("/services/notes/", "0" * 32).status_code == 401

        name = names.service_container_name(INSTANCE, "notes")
        with closing(closet.client("rig2")) as client:
            client.containers.get(name).kill()
        wait_for(lambda: " 1 " in find_service("notes"), "it was started again", 60)
        assert "serving" in run_service("logs", "notes")
        assert "starts again" in run_service("restart", "notes")
        wait_for(lambda: ask("/services/notes/", ada.token).status_code == 200, "it answers again", 60)
        with closing(closet.client("rig2")) as client:
            client.containers.get(name).remove(force=True)
        findings = json.loads(run_gpuhub("doctor", "--json", file).stdout)[0]["findings"]
        assert any(one["check"] == "service" and "private on rig1 runs" in one["value"] for one in findings)

        # Others on the bridge, and the node's address: neither is a way to a service.
        with closing(closet.client("rig1")) as client:
            relay = client.containers.get(names.service_relay_name(INSTANCE, "private"))
            own = relay.attrs["NetworkSettings"]["Networks"][names.access_network_name(INSTANCE)]["IPAddress"]
            addresses = [own, str(closet.plan.node("rig1").address)]
            probed = client.containers.run(
                "gpuhub/base:latest",
                ["python3", "-c", PROBE, *addresses],
                network=names.access_network_name(INSTANCE),
                remove=True,
            )
        assert "open" not in probed.decode()

        file = write(closet, tmp_path, data, services=False)
        done = run_gpuhub("up", file)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for(lambda: not list_containers(closet), "the former services are gone", 60)
        write(closet, tmp_path, data)
        assert run_gpuhub("up", file).returncode == 0
        wait_for(lambda: "running" in find_service("notes"), "the service runs again", 120)
    finally:
        done = run_gpuhub("down", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list_containers(closet) == []
    assert "ada" in (data / "visitors").read_text()


def list_containers(closet: Any) -> list[str]:
    """Return the names of services' containers on all nodes."""
    labels = [f"{names.LABEL_INSTANCE}={INSTANCE}", f"{names.LABEL_KIND}={names.KIND_SERVICE}"]
    found = []
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            found += [
                one.name for one in client.containers.list(all=True, ignore_removed=True, filters={"label": labels})
            ]
    return found
