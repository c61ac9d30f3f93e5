"""The page about a notebook that does not run, in headless Chromium, with the real proxy and hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.support.hub.simulated_hub import SimulatedHub, simulated_hub

pytestmark = [pytest.mark.browser, pytest.mark.root]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHub]:
    """A hub where no notebook runs."""
    with simulated_hub("ghidle", tmp_path_factory.mktemp("hub"), 18980) as started:
        yield started


def test_page_follows_a_start_from_elsewhere(hub: SimulatedHub, browser: Browser, sessions: dict[str, Any]) -> None:
    """As after a restart of the hub, when the broker starts what had been waiting: nobody clicks on this page."""
    context = browser.new_context(storage_state=sessions["ada"])
    page = context.new_page()
    page.goto(f"{hub.url}/user/ada/")
    expect(page.locator("body")).to_contain_text("this page follows it")
    token = next(cookie["value"] for cookie in context.cookies() if cookie["name"] == "_xsrf")
    started = context.request.post(f"{hub.url}/hub/api/users/ada/server", headers={"X-XSRFToken": token})
    assert started.status in {201, 202}, started.text()
    expect(page.locator("body")).to_contain_text("cookies", timeout=60_000)
    context.close()
