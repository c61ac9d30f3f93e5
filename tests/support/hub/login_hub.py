"""A real hub for logins, behind its real proxy and with our jupyterhub_config.py; its one node is never used."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gpuhub.common import secrets
from gpuhub.common.paths import Paths
from tests.support.product import wait_for

ROOT = Path(__file__).parents[3]

SETTINGS = """
{top}
[[nodes]]
name = "rig1"
address = "127.0.0.1"
docker = "unix:///nowhere/docker.sock"
[[profiles]]
name = "cpu"
title = "No GPU"
gpu_count = 0
[hub]
address = "127.0.0.1"
port = {ports[0]}
api_port = {ports[1]}
broker_port = {ports[2]}
proxy_api_port = {ports[3]}
"""


@dataclass
class LoginHub:
    """A running hub; `settings` are the tables of cluster.toml except nodes, profiles and ports."""

    paths: Paths
    settings: str
    ports: list[int]
    file: Path
    config: Path = ROOT / "jupyterhub_config.py"
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _browsers: list[httpx.Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The browsers' URL."""
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def log(self) -> str:
        """The hub's log."""
        return (self.paths.log / "hub.log").read_text(encoding="utf-8", errors="replace")

    def write(self, settings: str) -> None:
        """Write other settings for the next start."""
        self.settings = settings
        self.file.write_text(SETTINGS.format(top=settings, ports=self.ports), encoding="utf-8")

    def start(self) -> None:
        """Start hub and proxy, and wait for the login page."""
        common = ["--instance", self.paths.instance, "--cluster-file", str(self.file)]
        if "proxy" not in self._running:
            self._run("proxy", [str(Path(sys.executable).with_name("gpuhub")), "proxy", *common])
        self.run_hub()
        wait_for(self._is_up, f"the hub; its log ends\n{self.log[-3000:]}", 90)

    def run_hub(self) -> subprocess.Popen[bytes]:
        """Start the hub's process without waiting."""
        return self._run("hub", [sys.executable, "-m", "jupyterhub", "-f", str(self.config)])

    def run_broker(self) -> None:
        """Start a server in the broker's place: the hub only checks at its start that it answers."""
        where = ["--bind", "127.0.0.1", "--directory", str(self.paths.run), str(self.ports[2])]
        self._run("broker", [sys.executable, "-m", "http.server", *where])

    def stop(self, name: str = "hub") -> None:
        """End a process and wait for it."""
        process = self._running.pop(name)
        process.terminate()
        process.wait(30)

    def close(self) -> None:
        """End all processes and remove their files."""
        for browser in self._browsers:
            browser.close()
        for name in list(self._running):
            self.stop(name)
        for folder in (self.paths.state, self.paths.run, self.paths.log):
            shutil.rmtree(folder, ignore_errors=True)

    def browser(self) -> httpx.Client:
        """Return a client with separate cookies."""
        browser = httpx.Client(base_url=self.url, follow_redirects=True, timeout=60, trust_env=False)
        self._browsers.append(browser)
        return browser

    def user(self, name: str) -> dict[str, Any] | None:
        """Return the hub's model of a user, through a service that may list users; None for an unknown user."""
        token = secrets.read_secret(self.paths, secrets.BROKER_TOKEN)
        answer = httpx.get(
            f"{self.url}/hub/api/users", headers={"Authorization": f"Bearer {token}"}, timeout=30, trust_env=False
        )
        answer.raise_for_status()
        return next((model for model in answer.json() if model["name"] == name), None)

    def _is_up(self) -> bool | None:
        assert self._running["hub"].poll() is None, f"the hub ended:\n{self.log[-3000:]}"
        try:
            return httpx.get(f"{self.url}/hub/login", timeout=5, trust_env=False).status_code == 200 or None
        except httpx.TransportError:
            return None

    def _run(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.paths.state),
            "GPUHUB_INSTANCE": self.paths.instance,
            "GPUHUB_CLUSTER_FILE": str(self.file),
        }
        with (self.paths.log / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command, cwd=self.paths.state, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        return self._running[name]


@contextmanager
def login_hub(instance: str, settings: str, *, start: bool = True) -> Iterator[LoginHub]:
    """Start a hub, and remove it at the end."""
    paths = Paths(instance)
    hub = LoginHub(paths, settings, free_ports(4), paths.state / "cluster.toml")
    with ExitStack() as stack:
        for folder in (paths.state, paths.run, paths.log):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        stack.callback(hub.close)
        secrets.ensure_secrets(paths)
        hub.write(settings)
        hub.run_broker()
        if start:
            hub.start()
        yield hub


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that are free."""
    sockets = [socket.socket() for _ in range(count)]
    for listener in sockets:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def sign_in(browser: httpx.Client, name: str, password: str) -> httpx.Response:
    """Submit the form as a browser does, and follow redirects."""
    form = browser.get("/hub/login")
    token = re.search(r'name="_xsrf" value="([^"]+)"', form.text)
    assert token is not None, form.text[:2000]
    return browser.post(
        "/hub/login?next=%2Fhub%2Fhome", data={"_xsrf": token[1], "username": name, "password": password}
    )


def find_user(browser: httpx.Client) -> str | None:
    """Return the user that the hub's page of tokens names; None when no user is logged in."""
    page = browser.get("/hub/token")
    match = re.search(r'user:\s*"([^"]*)"', page.text)
    return match[1] if match and page.url.path == "/hub/token" else None
