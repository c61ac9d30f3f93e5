"""The time from the click to a usable JupyterLab, compared with stock DockerSpawner, the same image and daemon.

Groups: `spawn` (one user in a browser, with what it kept from earlier starts and without), `spawn-trace` (where the
time of ours goes) and `storm` (fifty users at once).
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import docker
import httpx
from playwright.sync_api import Browser, Page

from gpuhub_closet.cluster_file import MORE_USERS
from tests.bench.product import INSTANCE, Product, make, paired_ratio, print_progress, running
from tests.support.browser.chromium import WHOLE, chromium
from tests.support.hub import users
from tests.support.product import wait_for

PAIRS = 7
_STOCK_ID = 20001
STORM_USERS = 50
STORM_PAIRS = 2
STORM_LIMIT_S = 600
_READY = ".jp-LauncherCard, .jp-NotebookPanel"
_SUBMIT = "input[type=submit], button[type=submit]"
#: Wall-clock time of the last page's beginning, seconds; since then: its last redirect, its answer, its last script.
_TIMES = """() => {
  const page = performance.getEntriesByType("navigation")[0];
  const files = performance.getEntriesByType("resource").filter(entry => entry.name.includes(".js"));
  const seconds = [0, page.fetchStart, page.responseEnd, Math.max(...files.map(entry => entry.responseEnd))];
  return [performance.timeOrigin / 1000, ...seconds.slice(1).map(value => value / 1000)];
}"""
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
c.Authenticator.allowed_users = {{"stock", *{users!r}}}
c.JupyterHub.services = [{{"name": "storm", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [{{"name": "storm", "services": ["storm"], "scopes": ["admin:users", "admin:servers"]}}]
c.DockerSpawner.image = "gpuhub/notebook:latest"
c.DockerSpawner.host_ip = {node!r}
c.DockerSpawner.use_internal_ip = False
c.DockerSpawner.remove = True
c.DockerSpawner.name_template = "stock-{{username}}"
c.DockerSpawner.extra_create_kwargs = {{"user": {user!r}, "labels": {{}}}}
c.DockerSpawner.environment = {{"HOME": "/home/stock"}}
c.DockerSpawner.volumes = {{{homes!r} + "/{{username}}": "/home/stock"}}
c.Spawner.default_url = "/lab"
c.Spawner.notebook_dir = "/home/stock"
"""


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `spawn`."""
    with running() as product, _stock_hub(product) as stock, chromium(WHOLE) as browser:
        yield "spawn.first_start_over_later", _first_over_later(browser, product), "ratio"
        warm = _measure_pairs(browser, product, stock, is_cold=False)
        cold = _measure_pairs(browser, product, stock, is_cold=True)
    for suffix, pairs in (("", warm), ("_cold", cold)):
        ours_s, stock_s = zip(*pairs, strict=True)
        yield f"spawn.click_to_lab{suffix}", statistics.median(ours_s), "s"
        yield f"spawn.click_to_lab{suffix}_stock", statistics.median(stock_s), "s"
        yield f"spawn.click_to_lab{suffix}_over_stock", paired_ratio(ours_s, stock_s), "ratio"


def _first_over_later(browser: Browser, product: Product) -> float:
    """Return how much longer the first start on a node takes than later ones; its files are not in memory yet."""
    page = log_in(browser, product.address, "ben", product.password)
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
    make("up")
    first, *later = [click_to_lab(page, product.address, "rtx5070") for _ in range(4)]
    print_progress(f"first start on a node {first:.2f} s, later ones {', '.join(f'{took:.2f}' for took in later)} s")
    return first / statistics.median(later)


def _measure_pairs(browser: Browser, product: Product, stock: str, *, is_cold: bool) -> list[tuple[float, float]]:
    """Return the seconds of ours and stock, measured in turn; the first pair is left out."""
    start_ours: dict[str, Callable[[Page], float]] = {
        "gpuhub": lambda page: click_to_lab(page, product.address),
        "stock": lambda page: _stock(page, stock),
    }
    logins = {"gpuhub": (product.address, "ada", product.password), "stock": (stock, "stock", "any")}
    pages = {name: log_in(browser, *user) for name, user in logins.items()}
    pairs = []
    for number in range(PAIRS + 1):
        took = {}
        for name in ("gpuhub", "stock") if number % 2 else ("stock", "gpuhub"):
            if is_cold:
                pages[name].context.close()
                pages[name] = log_in(browser, *logins[name])
            took[name] = start_ours[name](pages[name])
        kind = "with an empty cache" if is_cold else "again"
        print_progress(
            f"click to Lab {kind}: gpuhub {took['gpuhub']:.2f} s, stock {took['stock']:.2f} s{' (warm-up)' if not number else ''}"
        )
        pairs.append((took["gpuhub"], took["stock"]))
    return pairs[1:]


def trace() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `spawn-trace`: the parts of a start of ours, medians, one after the other."""
    parts: dict[str, list[float]] = {}
    with running() as product, chromium(WHOLE) as browser:
        page = log_in(browser, product.address, "ada", product.password)
        click_to_lab(page, product.address)
        for _ in range(PAIRS):
            for name, seconds in _trace_one(page, product).items():
                parts.setdefault(name, []).append(seconds)
    for name, values in parts.items():
        yield f"spawn.trace_{name}_s", statistics.median(values), "s"


def _trace_one(page: Page, product: Product) -> dict[str, float]:
    _open_form(page, product.address, "rtx5090")
    begin = time.time()
    page.click(_SUBMIT)
    page.wait_for_url("**/user/*/lab**", timeout=90_000, wait_until="commit")
    page.wait_for_selector(_READY, timeout=90_000)
    usable = time.time()
    origin, redirected, answered, loaded = page.evaluate(_TIMES)
    node = next(node for node in product.cluster.nodes if any(gpu.model == "RTX 5090" for gpu in node.gpus or ()))
    with closing(docker.APIClient(base_url=node.docker, version="auto")) as daemon:
        [found] = daemon.containers(filters={"name": f"^/?{INSTANCE}-nb-"})
        container = daemon.inspect_container(found["Id"])
    created = datetime.fromisoformat(container["Created"]).timestamp()
    started = datetime.fromisoformat(container["State"]["StartedAt"]).timestamp()
    _stop(page, product.address)
    marks = {
        "hub_and_broker": created,
        "container": started,
        "server": origin + redirected,
        "login_and_page": origin + answered,
        "files": origin + loaded,
        "lab": usable,
        "whole": usable,
    }
    before = [begin, *list(marks.values())[:-2], begin]
    return {name: mark - last for (name, mark), last in zip(marks.items(), before, strict=True)}


def measure_storm() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `storm`: until the last of fifty users is in, who start at the same moment."""
    os.environ[MORE_USERS] = str(STORM_USERS)
    names = [f"user{number:02}" for number in range(1, STORM_USERS + 1)]
    pairs = []
    with running() as product, ExitStack() as stack:
        ours = [
            stack.enter_context(closing(users.log_in(product.address, name, product.password))).hub for name in names
        ]
        token = os.urandom(16).hex()
        stock = stack.enter_context(_stock_hub(product, names, token))
        headers = {"Authorization": f"token {token}"}
        theirs = [
            stack.enter_context(
                httpx.Client(base_url=f"{stock}/hub/api", headers=headers, trust_env=False, timeout=300)
            )
            for _ in names
        ]
        storms = {"gpuhub": _Storm(ours, names, {"profile": "cpu"}), "stock": _Storm(theirs, names, {})}
        for number in range(STORM_PAIRS):
            order = list(storms) if number % 2 else list(reversed(storms))
            took = {name: storms[name].run() for name in order}
            print_progress(f"{STORM_USERS} users: gpuhub {took['gpuhub']:.1f} s, stock {took['stock']:.1f} s")
            pairs.append((took["gpuhub"], took["stock"]))
    ours_s, stock_s = zip(*pairs, strict=True)
    yield f"spawn.storm_{STORM_USERS}", statistics.median(ours_s), "s"
    yield f"spawn.storm_{STORM_USERS}_stock", statistics.median(stock_s), "s"
    yield f"spawn.storm_{STORM_USERS}_over_stock", paired_ratio(ours_s, stock_s), "ratio"
    for suffix, name in (("", "gpuhub"), ("_stock", "stock")):
        yield f"spawn.storm_{STORM_USERS}_failures{suffix}", storms[name].failures, "starts"


@dataclass(slots=True)
class _Storm:
    """Users who start their servers at the same moment; `failures` are starts that failed and were asked for again."""

    hubs: Sequence[httpx.Client]
    names: Sequence[str]
    options: dict[str, str]
    failures: int = 0

    def run(self) -> float:
        """Return the seconds until every user's server is ready; stop all."""
        with ThreadPoolExecutor(len(self.names)) as pool:
            begin = time.monotonic()
            pairs = list(zip(self.hubs, self.names, strict=True))
            list(pool.map(self._start, *zip(*pairs, strict=True)))
            waiting = pairs
            while waiting:
                assert time.monotonic() - begin < STORM_LIMIT_S, f"{len(waiting)} of {len(pairs)} are not in"
                waiting = [(hub, name) for hub, name in waiting if not self._is_ready(hub, name)]
                time.sleep(0.2)
            seconds = time.monotonic() - begin
            list(pool.map(lambda pair: _stop_server(*pair), pairs))
            wait_for(lambda: all(not _read_servers(*pair) for pair in pairs), "all servers have stopped", STORM_LIMIT_S)
        return seconds

    def _start(self, hub: httpx.Client, name: str) -> None:
        answer = hub.post(f"/users/{name}/server", json=self.options)
        # 400 while a start is pending, 5xx when it failed at once.
        assert answer.is_success or answer.status_code in (400, *range(500, 504)), answer.text

    def _is_ready(self, hub: httpx.Client, name: str) -> bool:
        server = _read_servers(hub, name).get("")
        if server is None:
            self.failures += 1
            self._start(hub, name)
            return False
        return bool(server["ready"])


def _read_servers(hub: httpx.Client, name: str) -> dict[str, Any]:
    servers: dict[str, Any] = hub.get(f"/users/{name}").raise_for_status().json()["servers"]
    return servers


def _stop_server(hub: httpx.Client, name: str) -> None:
    hub.delete(f"/users/{name}/server").raise_for_status()


@contextmanager
def _stock_hub(product: Product, names: Sequence[str] = (), token: str = "") -> Iterator[str]:
    """Start a JupyterHub with stock DockerSpawner on the first node's daemon, for these users besides `stock`.

    Args:
        token: An API token that may start and stop the servers of all; empty for one that nobody knows.
    """
    node = product.cluster.nodes[0]
    # Kept from start to start, as ours are.
    homes = product.paths.state / "homes-stock"
    for name in ("stock", *names):
        (homes / name).mkdir(parents=True, exist_ok=True)
        os.chown(homes / name, _STOCK_ID, _STOCK_ID)
    port, hub_port, proxy_api_port = 18100, 18181, 18101
    config = _STOCK_CONFIG.format(
        docker=node.docker,
        port=port,
        head=product.cluster.hub.address,
        hub_port=hub_port,
        proxy_api_port=proxy_api_port,
        node=node.address,
        user=f"{_STOCK_ID}:{_STOCK_ID}",
        homes=str(homes),
        users=set(names),
        token=token or os.urandom(16).hex(),
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
                shutil.rmtree(homes)


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


def click_to_lab(page: Page, address: str, profile: str = "rtx5090") -> float:
    """Return the seconds from the click on Start to JupyterLab's launcher, with a GPU, and stop the server."""
    _open_form(page, address, profile)
    begin = time.monotonic()
    page.click(_SUBMIT)
    return _finish(page, address, begin)


def _open_form(page: Page, address: str, profile: str) -> None:
    page.goto(f"{address}/hub/spawn")
    page.check(f"#gpuhub-{profile}")


def _stock(page: Page, address: str) -> float:
    # Without an options form the home page's button leads here, and the server starts.
    begin = time.monotonic()
    page.goto(f"{address}/hub/spawn", wait_until="commit")
    return _finish(page, address, begin)


def _finish(page: Page, address: str, begin: float) -> float:
    page.wait_for_url("**/user/*/lab**", timeout=90_000)
    page.wait_for_selector(_READY, timeout=90_000)
    seconds = time.monotonic() - begin
    _stop(page, address)
    return seconds


def _stop(page: Page, address: str) -> None:
    # The button works only after the page's scripts have loaded.
    page.goto(f"{address}/hub/home", wait_until="networkidle")
    page.click("#stop")
    page.wait_for_selector("#stop", state="hidden", timeout=60_000)
