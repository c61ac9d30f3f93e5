"""A node of the practice closet that sleeps: shown as such, woken by a request, and asleep again when it is idle."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomlkit
from playwright.sync_api import expect

from tests.support.hub.browser import Product, User, gpuhub
from tests.support.product import wait_for

#: The node whose card is the RTX 5070. It is not the first, which manages the Swarm.
NODE, PROFILE = "rig2", "rtx5070"
#: The shortest that is allowed, and the longest wait for a notebook on a node that has to start first.
IDLE, WAKE_S = "1m", 180
pytestmark = pytest.mark.backend("builtin")


@pytest.fixture(scope="module")
def sleepy(product: Product) -> Iterator[Product]:
    """The closet with a node that sleeps after a minute; at the end with its own settings and nodes again."""
    before = product.paths.closet_cluster_file.read_text(encoding="utf-8")
    changed = tomlkit.parse(before).unwrap()
    switch = [str(Path(sys.executable).with_name("gpuhub-closet")), "power", "--instance", product.paths.instance]
    for node in changed["nodes"]:
        if node["name"] == NODE:
            node["power"] = {"on": [*switch, "on", NODE], "off": [*switch, "off", NODE], "idle": IDLE}
    product.restart(tomlkit.dumps(changed))
    yield product
    product.supervisor.ensure_started(NODE)
    product.restart(before)


def read_state() -> str:
    """Return the node's power as the administrator's command shows it, such as `asleep`."""
    return gpuhub("node", "power", "status", NODE).split()[2]


def test_idle_node_sleeps_and_a_request_wakes_it(sleepy: Product, make_user: Callable[[str], User]) -> None:
    """It went to sleep by itself; a click on the page starts JupyterLab on it."""
    wait_for(lambda: read_state() == "asleep", f"{NODE} is asleep", deadline_s=180)
    assert sleepy.supervisor.state(NODE) == "STOPPED"
    ada = make_user("ada")
    ada.page.goto(f"{ada.address}/hub/gpus")
    node = ada.page.locator(f"[data-node-name={NODE}]")
    expect(node.locator(".badge").first).to_have_text("asleep")
    expect(node).to_contain_text("asleep, woken when the queue needs it")
    ada.picture("power-asleep")
    assert "asleep" in gpuhub("doctor", NODE, "--cluster-file", str(sleepy.paths.closet_cluster_file))
    ada.open_form()
    ada.choose(PROFILE)
    ada.page.wait_for_url("**/hub/spawn-pending/ada**", timeout=30_000)
    expect(ada.page.locator("body")).to_contain_text(re.compile(rf"waking {NODE}"), timeout=30_000)
    ada.picture("power-waking")
    ada.wait_for_lab(WAKE_S)
    assert read_state() == "on"
    assert "usually up" in gpuhub("node", "power", "status", NODE)
    ada.click_stop()
    wait_for(lambda: ada.holders() == {}, "every GPU is free")


def test_administrator_switches_it(sleepy: Product) -> None:
    """The commands wait until the node is asleep, or up."""
    assert "rig2 is asleep" in gpuhub("node", "power", "off", NODE)
    assert sleepy.supervisor.state(NODE) == "STOPPED"
    assert "rig2 is on after" in gpuhub("node", "power", "on", NODE)
    assert sleepy.supervisor.state(NODE) == "RUNNING"
