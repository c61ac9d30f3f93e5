"""Every page that gpuhub serves or changes: for people without a mouse or with little sight, and on a phone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from gpuhub.common.gpu import shorten_model
from tests.support.docker.simulated_nodes import wait_until
from tests.support.hub.pages import (
    check_accessibility,
    check_keyboard,
    check_motion,
    start_job,
    take_picture,
)
from tests.support.hub.simulated_hub import SimulatedHub, simulated_hub

pytestmark = [pytest.mark.browser, pytest.mark.root]
expect.set_options(timeout=60_000)
PHONE, DESKTOP = 360, 1280
JOB = "train-a-model-with-a-rather-long-name.py"
Open = Callable[[SimulatedHub, Page], None]

CARDS = {
    "rig1": [("NVIDIA GeForce RTX 5090", 32607), ("NVIDIA GeForce RTX 5080", 16303)],
    "rig2": [("NVIDIA GeForce RTX 5070 Ti", 16303), ("NVIDIA GeForce RTX 5070", 12227)],
    "rig3": [("NVIDIA GeForce RTX 5060 Ti", 16311), ("NVIDIA GeForce RTX 4090", 24564)],
    "workstation-of-the-lab": [
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887),
        ("NVIDIA A100-SXM4-80GB", 81920),
        ("NVIDIA H100 80GB HBM3", 81559),
        ("NVIDIA L40S", 46068),
    ],
}
PROFILE = """
[[profiles]]
name = "card{number}"
title = "{model}"
description = "For fine-tuning of language models and large batches"
gpu_model = "{model}"
time_limit = "12h"
images = ["gpuhub/llm:latest", "registry.example.org/physics/simulations-with-a-long-name:2026.11"]
"""
FURTHER = """
[idle]
suspend_after = "10m"
stop_after = "2h"
[costs]
currency = "EUR"
gpu_hour = 0.5
[scheduling]
quarantine_after = "2s"
"""
#: Notebooks wait in the broker's queue as in the product, and no Docker daemon is asked.
CONFIG = """
import sys
from pathlib import Path
load_subconfig({real!r})
sys.path.insert(0, str(Path({real!r}).parent))
from gpuhub import hub_config
from gpuhub.docker import networks
from tests.support.docker.simulated_nodes import SimulatedDaemons, simulated_nodes
cluster = hub_config.cluster()
nodes = simulated_nodes({{node.name: [] for node in cluster.nodes}})
daemons = SimulatedDaemons(cluster.nodes, nodes, Path.cwd())
async def _find_network(*_):
    return networks.UserNetwork(name="ada", id="1", subnet="10.201.0.0/24")
networks.ensure_user_network = _find_network
c.GpuDockerSpawner.make_daemons = lambda: daemons
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHub]:
    """A hub with ten models of GPUs, where ada and ben have notebooks and jobs, and others wait."""
    models = sorted({name for cards in CARDS.values() for name, _ in cards})
    tables = "".join(
        PROFILE.format(number=number, model=shorten_model(name))
        for number, name in enumerate(models)
        if "5090" not in name
    )
    folder = tmp_path_factory.mktemp("hub")
    with simulated_hub("ghaxe", folder, 18700, cards=CARDS, tables=tables + FURTHER, config=CONFIG) as started:
        started.make_tokens("ada", "ben", "root1")
        occupy(started)
        yield started


def occupy(hub: SimulatedHub) -> None:
    """Make something of all that pages show."""
    lost = hub.request_notebook("ben", "card4", "lost")
    hub.request_notebook("ada", "rtx5090")
    hub.request_notebook("ben", "rtx5090", "second")
    job = start_job(hub, name=JOB, port=8000)
    start_job(hub, name="sweep.py", nnodes=4, nproc_per_node=1)
    hub.send("PUT", f"/jobs/{job['id']}/shares/ben", json={"for_s": 3600})
    log = hub.running.setting.home("ada") / ".gpu_launch" / "jobs" / job["run_id"] / "output.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("epoch 1\n\x1b[1;31mloss 4.2\x1b[0m\n")
    file = hub.running.setting.home("ada") / "train.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Training")]), file)
    hub.send("PUT", "/notebooks/shares/ben", json={"path": "train.ipynb", "for_s": 3600})
    hub.running.setting.nodes[lost["nodes"][0]].is_reachable = False
    hub.send("DELETE", f"/leases/{lost['id']}", "ben")
    wait_until(
        lambda: hub.send("GET", f"/leases/{lost['id']}", "root1")["state"] == "quarantined", "a quarantined lease"
    )


def at(path: str, text: str) -> Open:
    """Return what opens a page that shows a text."""

    def open_page(hub: SimulatedHub, page: Page) -> None:
        page.goto(f"{hub.url}{path}")
        expect(page.locator("body")).to_contain_text(text)

    return open_page


def open_live_page(hub: SimulatedHub, page: Page) -> None:
    page.goto(f"{hub.url}/hub/gpus")
    expect(page.locator("#gpuhub-connection")).to_have_text("live")


def in_dialog(*buttons: str) -> Open:
    """Return what opens a dialog of the live page with one button after the other."""

    def open_dialog(hub: SimulatedHub, page: Page) -> None:
        open_live_page(hub, page)
        for button in buttons:
            page.get_by_role("button", name=button, exact=True).click()
        expect(page.get_by_role("dialog").get_by_role("heading")).to_be_visible()

    return open_dialog


def at_share(kind: str, text: str) -> Open:
    """Return what opens a page of ada's job or notebook as ben."""

    def open_share(hub: SimulatedHub, page: Page) -> None:
        path = next(share["path"] for share in hub.send("GET", "/shares", "ben") if f"/{kind}/" in share["path"])
        page.goto(f"{hub.url}{path}")
        expect(page.locator("body")).to_contain_text(text)

    return open_share


def open_usage(hub: SimulatedHub, page: Page) -> None:
    open_live_page(hub, page)
    for summary in ("By day, as a table", "Usage and limits of all users"):
        page.locator("summary", has_text=summary).click()


def open_limits(hub: SimulatedHub, page: Page) -> None:
    open_usage(hub, page)
    page.get_by_role("button", name="Limits of ada").click()
    expect(page.get_by_role("dialog")).to_contain_text("Limits of ada")


def show_idle_notices(hub: SimulatedHub, page: Page) -> None:
    ends = (datetime.now(UTC) + timedelta(minutes=9)).isoformat()
    warning = {"text": "Your notebook on rig1 is idle.", "stops_at": ends, "keep": "Keep for 1 h", "lease": "l1"}
    stopped = {"text": "Your notebook second was stopped, because it was idle.", "at": ends}
    answer = {"warnings": [warning], "stopped": stopped}
    page.route("**/gpuhub/idle*", lambda route: route.fulfill(json=answer))
    page.goto(f"{hub.url}/hub/home")
    expect(page.locator("#gpuhub-idle .alert")).to_have_count(2)


def open_port_that_waits(hub: SimulatedHub, page: Page) -> None:
    job = next(job for job in hub.send("GET", "/jobs") if job["name"] == JOB)
    address = f"{hub.url}/services/broker/ports/{job['id']}/"
    page.goto(address)
    page.route(address, keep_page)
    page.goto(address)
    expect(page.locator("body")).to_contain_text("This page tries again by itself.")
    expect(page.locator("body")).to_have_css("max-width", "576px")


def keep_page(route: Route) -> None:
    """Answer without the header by which the page tries again, so that it can be checked."""
    answer = route.fetch()
    route.fulfill(response=answer, headers={name: value for name, value in answer.headers.items() if name != "refresh"})


def fail_to_log_in(hub: SimulatedHub, page: Page) -> None:
    page.goto(f"{hub.url}/hub/login")
    page.fill("input[name=username]", "ada")
    page.fill("input[name=password]", "wrong")
    page.click("#login_submit")
    expect(page.locator("body")).to_contain_text("Wrong user name or password")


def wait_in_the_queue(hub: SimulatedHub, page: Page) -> None:
    page.goto(f"{hub.url}/hub/spawn/ben/waiting")
    if page.locator("input[name=profile]").count():
        page.check("#gpuhub-rtx5090")
        page.click("button[type=submit]")
    expect(page.locator("#progress-message")).to_contain_text("position")


def fail_to_start(hub: SimulatedHub, page: Page) -> None:
    page.goto(f"{hub.url}/hub/spawn/ben/failing")
    page.check("#gpuhub-card0")
    page.get_by_label("Image of").first.select_option("gpuhub/llm:latest")
    page.click("button[type=submit]")
    expect(page.locator("body")).to_contain_text("is not on")


PAGES: dict[str, tuple[str | None, Open]] = {
    "login": (None, at("/hub/login", "Sign in")),
    "login-refused": (None, fail_to_log_in),
    "home": ("ada", at("/hub/home", "Start")),
    "idle-notices": ("ada", show_idle_notices),
    "not-running": ("ada", at("/user/ada/", "this page follows it")),
    "missing": ("ada", at("/hub/nothing", "There is no such page here.")),
    "spawn-form": ("ada", at("/hub/spawn", "Choose a GPU")),
    "spawn-pending": ("ben", wait_in_the_queue),
    "spawn-refused": ("ben", fail_to_start),
    "notifications": ("ada", at("/hub/notifications", "Add a destination")),
    "troubleshooting": (None, at("/hub/gpuhub/troubleshooting", "Troubleshooting")),
    "shared-job": ("ben", at_share("shared", "loss 4.2")),
    "shared-notebook": ("ben", at_share("shared-notebook", "As it was last saved")),
    "port-waits": ("ada", open_port_that_waits),
    "gpus": ("ada", open_live_page),
    "gpus-admin": ("root1", open_live_page),
    "gpus-usage": ("root1", open_usage),
    "dialog-extend": ("ada", in_dialog("Extend your notebook on rig1")),
    "dialog-share": ("ada", in_dialog(f"Share the output of {JOB}")),
    "dialog-cancel": ("ada", in_dialog(f"Cancel job {JOB}")),
    "dialog-leases": ("root1", in_dialog("Leases on rig1")),
    "dialog-stop": ("root1", in_dialog("Leases on rig1", "Stop ada's notebook on rig1")),
    "dialog-cordon": ("root1", in_dialog("Cordon rig1")),
    "dialog-drain": ("root1", in_dialog("Drain rig1")),
    "dialog-force": ("root1", in_dialog("Force")),
    "dialog-limits": ("root1", open_limits),
}


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, hub: SimulatedHub, browser: Browser, sessions: dict[str, Any]) -> None:
    """axe-core finds nothing serious, nothing is cut off, all controls have the focus in turn, and nothing moves."""
    user, open_page = PAGES[name]
    context = browser.new_context(storage_state=sessions[user] if user else None, reduced_motion="reduce")
    page = context.new_page()
    page.on("pageerror", lambda error: pytest.fail(f"the page's script failed: {error}"))
    open_page(hub, page)
    for scheme, width in itertools.product(("light", "dark"), (PHONE, DESKTOP)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function("name => (document.documentElement.dataset.bsTheme ?? name) === name", arg=scheme)
        take_picture(page, f"page-{name}-{scheme}-{width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        check_accessibility(page)
    check_motion(page)
    check_keyboard(page)
    context.close()
