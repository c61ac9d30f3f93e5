"""The notice about an idle notebook, in a real browser."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Browser, expect

from gpuhub.web.template_loader import read_asset

pytestmark = pytest.mark.browser
PAGE = f"<div id=gpuhub-idle data-url=/gpuhub/></div><script>{read_asset('gpuhub_idle.js')}</script>"


@pytest.mark.parametrize("skew", [timedelta(hours=-2), timedelta(), timedelta(minutes=40)])
def test_countdown_follows_the_hubs_clock(browser: Browser, skew: timedelta) -> None:
    """The clock of the user's machine may be wrong."""
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    warning = {
        "lease": "l1",
        "text": "Your notebook: idle.",
        "stops_at": (now + timedelta(minutes=9)).isoformat(),
        "keep": "",
    }
    page = browser.new_page()
    page.clock.set_fixed_time(now + skew)
    page.route("http://hub/", lambda route: route.fulfill(body=PAGE, content_type="text/html"))
    answer = {"warnings": [warning], "now": now.isoformat(), "stopped": None}
    page.route("**/gpuhub/idle*", lambda route: route.fulfill(json=answer))
    page.goto("http://hub/")
    expect(page.locator("#gpuhub-idle strong")).to_have_text("9:00 min")
    page.close()
