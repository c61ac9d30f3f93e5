"""The page of a notebook that waits for a GPU, in headless Chromium, with the product's spawner on simulated nodes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Browser, expect

from tests.support.hub.simulated_hub import SimulatedHub, simulated_hub

pytestmark = [pytest.mark.browser, pytest.mark.root]
#: The product's configuration, without the network of the user, which simulated nodes cannot have.
CONFIG = """
from types import SimpleNamespace
from gpuhub.docker import networks
load_subconfig({real!r})
async def ensure_user_network(*_):
    return SimpleNamespace(subnet="10.0.0.0/24")
networks.ensure_user_network = ensure_user_network
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHub]:
    """A hub with the product's own spawner, where ben has the GPU that ada asks for."""
    with simulated_hub("ghwait", tmp_path_factory.mktemp("hub"), 18960, config=CONFIG) as started:
        started.make_tokens("ada", "ben", "root1")
        started.request_notebook("ben", "rtx5090")
        yield started


def test_expected_start_is_in_the_users_time_zone(
    hub: SimulatedHub, browser: Browser, sessions: dict[str, Any]
) -> None:
    """Both in the message and in the log of earlier ones."""
    zone = "Asia/Kathmandu"  # not a whole number of hours away from any other
    (lease,) = hub.send("GET", "/leases", "ben")
    context = browser.new_context(storage_state=sessions["ada"], timezone_id=zone)
    page = context.new_page()
    page.goto(f"{hub.url}/hub/spawn/ada")
    page.check("#gpuhub-rtx5090")
    page.click("button[type=submit]")
    shown = page.locator("#progress-message time")
    clock = f"{datetime.fromisoformat(lease['expires_at']).astimezone(ZoneInfo(zone)):%H:%M}"
    expect(shown).to_contain_text(clock, timeout=60_000)
    page.click("#progress-details summary")
    expect(page.locator("#progress-log time").last).to_contain_text(clock)
    context.close()


def test_leaving_the_queue_leads_to_the_form(hub: SimulatedHub, browser: Browser, sessions: dict[str, Any]) -> None:
    """Although the start has not ended when the broker has released the request; nothing is called failed."""
    context = browser.new_context(storage_state=sessions["ada"])
    page = context.new_page()
    page.goto(f"{hub.url}/hub/spawn/ada/second")
    page.check("#gpuhub-rtx5090")
    page.click("button[type=submit]")
    # The start seems to last for two more answers.
    redirects = iter(range(2))
    location = {"Location": "/hub/spawn-pending/ada/second"}
    page.route(
        "**/hub/spawn/ada/second",
        lambda route: (
            route.continue_() if next(redirects, None) is None else route.fulfill(status=302, headers=location)
        ),
    )
    page.locator("#progress-message .gpuhub-leave").click(timeout=60_000)
    expect(page.locator("#gpuhub-rtx5090")).to_be_visible(timeout=60_000)
    context.close()
