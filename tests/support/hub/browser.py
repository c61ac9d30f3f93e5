"""The running product of the acceptance tests, its users in a browser, and its administrator's command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page

from gpuhub.common import secrets
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.ops.deploy.programs import BROKER, HUB, Supervisor
from tests.support import product as support
from tests.support.product import ROOT, wait_for

INSTANCE = os.environ.get("GPUHUB_TEST_INSTANCE", "ghtest")
PICTURES = Path(os.environ.get("GPUHUB_TEST_PICTURES", ROOT / ".cache" / "pictures"))


@dataclass
class User:
    """A user with a separate browser context."""

    name: str
    page: Page
    address: str
    errors: list[str] = field(default_factory=list)

    def log_in(self, password: str) -> None:
        """Log in at the front page."""
        self.page.goto(self.address)
        self.page.fill("input[name=username]", self.name)
        self.page.fill("input[name=password]", password)
        self.page.click("#login_submit")
        self.page.wait_for_url("**/hub/**")

    def open_form(self) -> None:
        """Open the spawn form."""
        self.page.goto(f"{self.address}/hub/spawn")
        self.page.wait_for_selector("input[name=profile]")

    def choose(self, profile: str) -> None:
        """Select a profile and start the server."""
        self.page.check(f"#gpuhub-{profile}")
        self.page.click("input[type=submit], button[type=submit]")

    def wait_for_lab(self, deadline_s: float = 90) -> None:
        """Wait until JupyterLab shows its launcher or a notebook."""
        self.page.wait_for_url(f"**/user/{self.name}/lab**", timeout=deadline_s * 1000)
        self.page.wait_for_selector(".jp-LauncherCard, .jp-NotebookPanel", timeout=deadline_s * 1000)

    def click_stop(self) -> None:
        """Stop the server on the home page, after the page's scripts have loaded."""
        self.page.goto(f"{self.address}/hub/home")
        self.wait_for_scripts()
        self.page.click("#stop")

    def wait_for_scripts(self) -> None:
        """Wait until the buttons of a page of JupyterHub are bound."""
        self.page.wait_for_function("window._jupyterhub_page_loaded === true")

    def picture(self, name: str) -> None:
        """Save a screenshot for inspection."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png")

    def fetch(self, path: str, method: str = "GET") -> Any:
        """Return the JSON response of the hub or the user's server to this user's browser."""
        token = next((c["value"] for c in self.page.context.cookies() if c["name"] == "_xsrf"), "")
        answer = self.page.request.fetch(f"{self.address}{path}", method=method, headers={"X-XSRFToken": token})
        assert answer.ok, f"{method} {path}: {answer.status} {answer.text()[:500]}"
        return json.loads(answer.text() or "null")

    def cluster(self) -> dict[str, Any]:
        """Return the cluster as the spawn form sees it, once the broker has answered the hub."""
        answer: dict[str, Any] = wait_for(
            lambda: self.fetch("/hub/gpuhub/cluster")["cluster"], "the hub knows the cluster"
        )
        return answer

    def holders(self) -> dict[str, str]:
        """Return the owner of each leased GPU by model."""
        gpus = [gpu for node in self.cluster()["nodes"] for gpu in node["gpus"]]
        return {gpu["model"]: gpu["holder"]["owner"] for gpu in gpus if gpu["holder"]}


@dataclass
class Product:
    """The running product."""

    paths: Paths
    cluster: settings.ClusterSettings
    address: str
    password: str
    supervisor: Supervisor
    up_output: str

    def restart(self, cluster_file: str) -> None:
        """Restart hub and broker with other settings, the text of a cluster.toml."""
        for name in (HUB, BROKER):
            self.supervisor.stop(name)
        self.paths.closet_cluster_file.write_text(cluster_file, encoding="utf-8")
        for name in (BROKER, HUB):
            self.supervisor.ensure_started(name)
        wait_for(lambda: _is_answering(f"{self.address}/hub/health"), "the hub answers")
        wait_for(lambda: _is_answering(f"{self.address}/services/broker/health"), "the broker answers")


def _is_answering(url: str) -> bool:
    """Return whether there is an answer, and not from the proxy in place of the service."""
    return httpx.get(url, trust_env=False).is_success


@contextmanager
def run_product() -> Iterator[Product]:
    """Start gpuhub on the practice closet, with empty homes and databases; `make down` at the end leaves nothing."""
    paths = Paths(INSTANCE)
    support.stop_earlier_run(INSTANCE)
    shutil.rmtree(paths.state / "homes", ignore_errors=True)
    for stale in ("jupyterhub.sqlite", "broker.sqlite"):
        for file in paths.state.glob(f"{stale}*"):
            file.unlink()
    output = run_make("up")
    try:
        cluster = settings.load(paths.closet_cluster_file)
        yield Product(
            paths=paths,
            cluster=cluster,
            address=f"http://127.0.0.1:{cluster.hub.port}",
            password=secrets.read_secret(paths, secrets.USER_PASSWORD),
            supervisor=Supervisor(paths),
            up_output=output,
        )
    finally:
        run_make("down")


def run_make(target: str, **variables: str) -> str:
    """Run a make target as README describes it with this instance, and return its output."""
    return support.run_make(INSTANCE, target, **variables)


def gpuhub(*words: str, timeout_s: float = 60) -> str:
    """Run the administrator's command on the head node and return its output."""
    done = subprocess.run(
        [ROOT / ".venv" / "bin" / "gpuhub", *words, "--instance", INSTANCE],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
