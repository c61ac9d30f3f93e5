"""Nodes that sleep, in headless Chromium: how they are shown, and the buttons of administrators."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from gpuhub.common import secrets
from tests.support.browser.chromium import chromium
from tests.support.docker.sleepy_nodes import build_switch, follow_switches
from tests.support.hub.simulated_hub import SimulatedHub, simulated_hub

pytestmark = [pytest.mark.browser, pytest.mark.root]
ROOT = Path(__file__).parents[4]
PICTURES = Path(os.environ.get("GPUHUB_TEST_PICTURES", ROOT / ".cache" / "pictures"))
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHub]:
    """A hub whose node rig2 sleeps by hand, and whose switch does not wake rig3."""
    folder = tmp_path_factory.mktemp("hub")
    keys = {
        name: f"power = {{ on = {json.dumps(on)}, off = {json.dumps(build_switch(folder, name, 'off'))} }}\n"
        for name, on in (("rig2", build_switch(folder, "rig2", "on")), ("rig3", ["/usr/bin/true"]))
    }
    with (
        simulated_hub("ghsleep", folder, 18540, keys=keys) as started,
        follow_switches(folder, started.running.setting.nodes),
    ):
        started.make_tokens("ada", "root1")
        yield started


@pytest.fixture(scope="module")
def admin(hub: SimulatedHub) -> Iterator[Page]:
    """The page of GPUs as an administrator sees it."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.on("pageerror", lambda error: pytest.fail(f"the page's script failed: {error}"))
        page.goto(f"{hub.url}/hub/login?next=%2Fhub%2Fgpus")
        page.fill("input[name=username]", "root1")
        page.fill("input[name=password]", secrets.read_secret(hub.served.paths, secrets.ADMIN_PASSWORD))
        page.click("#login_submit")
        expect(page.locator("#gpuhub-connection")).to_have_text("live")
        yield page


def take_picture(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


def test_administrator_puts_a_node_to_sleep_and_wakes_it(hub: SimulatedHub, admin: Page) -> None:
    """The page shows each state; GPUs that sleep are counted apart from those out of service."""
    node = admin.locator("[data-node-name=rig2]")
    node.get_by_role("button", name="Put rig2 to sleep").click()
    admin.get_by_role("button", name="Sleep", exact=True).last.click()
    expect(node.locator(".badge").first).to_have_text("asleep")
    expect(node).to_contain_text("asleep, woken when the queue needs it")
    expect(admin.locator("body")).to_contain_text("1 asleep")
    expect(admin.locator("body")).not_to_contain_text("out of service")
    expect(admin.locator("[data-node-name=rig1]").get_by_role("button", name="Put rig1 to sleep")).to_have_count(0)
    take_picture(admin, "sleeping-node")
    node.get_by_role("button", name="Wake rig2").click()
    admin.get_by_role("button", name="Wake", exact=True).last.click()
    expect(node.locator(".badge").first).to_have_text("up")


def test_request_shows_which_node_is_waking(hub: SimulatedHub, admin: Page) -> None:
    """In the queue and at the node, which stays so until it answers."""
    node = admin.locator("[data-node-name=rig3]")
    hub.send("POST", "/nodes/rig3/power", "root1", json={"on": False})
    expect(node.locator(".badge").first).to_have_text("asleep")
    job = {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1, "models": ["RTX 5060"], "batch": True}
    made = hub.send("POST", "/jobs", status=201, json=job)
    expect(node.locator(".badge").first).to_have_text("waking")
    waiting = hub.send("GET", f"/jobs/{made['id']}")
    assert "waking rig3" in waiting["lease"]["waiting_for"]
    take_picture(admin, "waking-node")
    hub.running.setting.nodes["rig3"].is_reachable = True
    expect(node.locator(".badge").first).to_have_text("up")
