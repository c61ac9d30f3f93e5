"""The whole product, started as a user does (`gpuhub up`, instance `ghtest`) and driven in headless Chromium."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from gpuhub import secrets, settings
from gpuhub.head.supervisor import Supervisor
from gpuhub.paths import Paths
from tests.support import product as support
from tests.support.product import ROOT, wait_for

__all__ = ["ROOT", "Product", "User", "gpuhub", "run_make", "wait_for"]

#: With Slurm as the engine these run instead of what is about gpuhub's own queue; see tests/run.
collect_ignore = [] if support.ENGINE == "slurm" else ["slurm"]
INSTANCE = os.environ.get("GPUHUB_TEST_INSTANCE", "ghtest")
PICTURES = Path(os.environ.get("GPUHUB_TEST_PICTURES", ROOT / ".cache" / "pictures"))


def run_make(target: str) -> str:
    """Run a make target as README has it, with this tier's instance; its output."""
    return support.run_make(INSTANCE, target)


def gpuhub(*words: str) -> str:
    """The administrator's command on the head node."""
    done = subprocess.run(
        [ROOT / ".venv" / "bin" / "gpuhub", *words, "--instance", INSTANCE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is about one engine's own rules (the mark `engine`) runs with that engine only; pytest counts the others as
    deselected. Everything else is to pass with either.
    """
    others = [item for item in items if (mark := item.get_closest_marker("engine")) and support.ENGINE not in mark.args]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@dataclass
class User:
    """Somebody with a browser of their own."""

    name: str
    page: Page
    address: str
    errors: list[str] = field(default_factory=list)

    def log_in(self, password: str) -> None:
        """From the front page to the spawn form."""
        self.page.goto(self.address)
        self.page.fill("input[name=username]", self.name)
        self.page.fill("input[name=password]", password)
        self.page.click("#login_submit")
        self.page.wait_for_url("**/hub/**")

    def open_form(self) -> None:
        """The spawn form."""
        self.page.goto(f"{self.address}/hub/spawn")
        self.page.wait_for_selector("input[name=profile]")

    def choose(self, profile: str) -> None:
        """Pick a profile and start."""
        self.page.check(f"#gpuhub-{profile}")
        self.page.click("input[type=submit], button[type=submit]")

    def wait_for_lab(self, deadline_s: float = 90) -> None:
        """JupyterLab can be used: its launcher or a notebook is there."""
        self.page.wait_for_url(f"**/user/{self.name}/lab**", timeout=deadline_s * 1000)
        self.page.wait_for_selector(".jp-LauncherCard, .jp-NotebookPanel", timeout=deadline_s * 1000)

    def click_stop(self) -> None:
        """Stop one's server on the home page; its button does nothing before the page's scripts have come."""
        self.page.goto(f"{self.address}/hub/home")
        self.wait_for_scripts()
        self.page.click("#stop")

    def wait_for_scripts(self) -> None:
        """The buttons of a page of JupyterHub's are bound."""
        self.page.wait_for_function("window._jupyterhub_page_loaded === true")

    def picture(self, name: str) -> None:
        """Keep a screenshot to look at."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png")

    def fetch(self, path: str, method: str = "GET") -> Any:
        """What the hub or the user's server answers to this user's browser."""
        token = next((c["value"] for c in self.page.context.cookies() if c["name"] == "_xsrf"), "")
        answer = self.page.request.fetch(f"{self.address}{path}", method=method, headers={"X-XSRFToken": token})
        assert answer.ok, f"{method} {path}: {answer.status} {answer.text()[:500]}"
        return json.loads(answer.text() or "null")

    def cluster(self) -> dict[str, Any]:
        """The cluster as the spawn form sees it, as soon as the broker tells the hub."""
        found: dict[str, Any] = wait_for(
            lambda: self.fetch("/hub/gpuhub/cluster")["cluster"], "the hub knows the cluster"
        )
        return found

    def holders(self) -> dict[str, str]:
        """Model → who holds it, of every held GPU."""
        gpus = [gpu for node in self.cluster()["nodes"] for gpu in node["gpus"]]
        return {gpu["model"]: gpu["holder"]["owner"] for gpu in gpus if gpu["holder"]}


@dataclass
class Product:
    """The running product."""

    paths: Paths
    cluster: settings.Cluster
    address: str
    password: str
    supervisor: Supervisor
    up_output: str


@pytest.fixture(scope="session")
def product() -> Iterator[Product]:
    """gpuhub, up on the practice closet; taken down at the end, with nothing left."""
    paths = Paths(INSTANCE)
    run_make("down")
    shutil.rmtree(paths.state / "homes", ignore_errors=True)
    for stale in ("jupyterhub.sqlite", "broker.sqlite"):
        (paths.state / stale).unlink(missing_ok=True)
    output = run_make("up")
    cluster = settings.load(paths.closet_cluster_file)
    yield Product(
        paths=paths,
        cluster=cluster,
        address=f"http://127.0.0.1:{cluster.hub.port}",
        password=secrets.read_secret(paths, secrets.USER_PASSWORD),
        supervisor=Supervisor(paths),
        up_output=output,
    )
    run_make("down")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium of Debian's package."""
    chromium = shutil.which("chromium")
    assert chromium, "chromium is missing: `spawners/setup.sh dev` installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def make_user(product: Product, browser: Browser) -> Iterator[Callable[[str], User]]:
    """Makes users who are logged in, each with cookies of their own."""
    contexts = []

    def make(name: str) -> User:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        contexts.append(context)
        user = User(name=name, page=context.new_page(), address=product.address)
        user.page.on("pageerror", lambda error: user.errors.append(str(error)))
        user.log_in(product.password)
        return user

    yield make
    for context in contexts:
        context.close()
