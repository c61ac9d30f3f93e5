"""The time from the click to a usable JupyterLab, compared with stock DockerSpawner, the same image and daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from tests.bench.product import Product, paired_ratio, print_progress, running

PAIRS = 7
_STOCK_ID = 20001
_READY = ".jp-LauncherCard, .jp-NotebookPanel"
_STOCK_CONFIG = """
import docker
from dockerspawner import DockerSpawner

DockerSpawner._client = docker.APIClient(base_url={docker!r}, version="auto")
c.JupyterHub.spawner_class = DockerSpawner
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_ip = {head!r}
c.JupyterHub.hub_port = {hub_port}
c.JupyterHub.db_url = "sqlite:///:memory:"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_api_port}"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allowed_users = {{"stock"}}
c.DockerSpawner.image = "gpuhub/notebook:latest"
c.DockerSpawner.host_ip = {node!r}
c.DockerSpawner.use_internal_ip = False
c.DockerSpawner.remove = True
c.DockerSpawner.name_template = "stock-{{username}}"
c.DockerSpawner.extra_create_kwargs = {{"user": {user!r}, "labels": {{}}}}
c.DockerSpawner.environment = {{"HOME": "/home/stock"}}
c.DockerSpawner.volumes = {{{home!r}: "/home/stock"}}
c.Spawner.default_url = "/lab"
c.Spawner.notebook_dir = "/home/stock"
"""


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `spawn`."""
    with running() as product, _stock_hub(product) as stock, browsing() as browser:
        ours = log_in(browser, product.address, "ada", product.password)
        theirs = log_in(browser, stock, "stock", "any")
        pairs = []
        for number in range(PAIRS + 1):
            turns = {"gpuhub": partial(click_to_lab, ours, product.address), "stock": partial(_stock, theirs, stock)}
            took = {name: turns[name]() for name in (turns if number % 2 else reversed(turns))}
            print_progress(
                f"click to Lab: gpuhub {took['gpuhub']:.2f} s, stock {took['stock']:.2f} s{' (warm-up)' if not number else ''}"
            )
            pairs.append((took["gpuhub"], took["stock"]))
    ours_s, stock_s = zip(*pairs[1:], strict=True)
    yield "spawn.click_to_lab", sorted(ours_s)[PAIRS // 2], "s"
    yield "spawn.click_to_lab_stock", sorted(stock_s)[PAIRS // 2], "s"
    yield "spawn.click_to_lab_over_stock", paired_ratio(ours_s, stock_s), "ratio"


@contextmanager
def browsing() -> Iterator[Browser]:
    """Start a headless Chromium."""
    chromium = shutil.which("chromium")
    assert chromium, "chromium is missing: `spawners/setup.sh dev` installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@contextmanager
def _stock_hub(product: Product) -> Iterator[str]:
    """Start a JupyterHub with stock DockerSpawner on the first node's daemon."""
    node = product.cluster.nodes[0]
    # Kept from start to start, as ours is.
    home = product.paths.state / "homes" / "stock"
    home.mkdir(parents=True, exist_ok=True)
    os.chown(home, _STOCK_ID, _STOCK_ID)
    port, hub_port, proxy_api_port = 18100, 18181, 18101
    config = _STOCK_CONFIG.format(
        docker=node.docker,
        port=port,
        head=product.cluster.hub.address,
        hub_port=hub_port,
        proxy_api_port=proxy_api_port,
        node=node.address,
        user=f"{_STOCK_ID}:{_STOCK_ID}",
        home=str(home),
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.py").write_text(config, encoding="utf-8")
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jupyterhub", "-f", "config.py"],
                cwd=folder,
                stdout=log,
                stderr=log,
                env={**os.environ, "CONFIGPROXY_AUTH_TOKEN": os.urandom(16).hex()},
            )
            try:
                _wait_http(f"http://127.0.0.1:{port}/hub/login", Path(folder, "log"))
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()
                process.wait(30)


def _wait_http(url: str, log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if httpx.get(url, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            print_progress("waiting for the stock hub")
        time.sleep(0.5)
    raise TimeoutError(f"the stock hub does not answer:\n{log.read_text(errors='replace')[-2000:]}")


def log_in(browser: Browser, address: str, name: str, password: str) -> Page:
    """Return a page on which the user has logged in."""
    page = browser.new_context().new_page()
    page.goto(f"{address}/hub/login?next=/hub/home")
    page.fill("input[name=username]", name)
    page.fill("input[name=password]", password)
    page.click("#login_submit")
    page.wait_for_url("**/hub/home")
    return page


def click_to_lab(page: Page, address: str) -> float:
    """Return the seconds from the click on Start to JupyterLab's launcher, with a GPU, and stop the server."""
    page.goto(f"{address}/hub/spawn")
    page.check("#gpuhub-rtx5090")
    begin = time.monotonic()
    page.click("input[type=submit], button[type=submit]")
    return _finish(page, address, begin)


def _stock(page: Page, address: str) -> float:
    # Without an options form the home page's button leads here, and the server starts.
    begin = time.monotonic()
    page.goto(f"{address}/hub/spawn", wait_until="commit")
    return _finish(page, address, begin)


def _finish(page: Page, address: str, begin: float) -> float:
    page.wait_for_url("**/user/*/lab**", timeout=90_000)
    page.wait_for_selector(_READY, timeout=90_000)
    seconds = time.monotonic() - begin
    # The button works only after the page's scripts have loaded.
    page.goto(f"{address}/hub/home", wait_until="networkidle")
    page.click("#stop")
    page.wait_for_selector("#stop", state="hidden", timeout=60_000)
    return seconds
