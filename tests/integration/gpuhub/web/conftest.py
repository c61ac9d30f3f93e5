"""A browser, and sessions of the users of a test module's `hub`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext

from gpuhub.common import secrets
from tests.support.browser.chromium import chromium
from tests.support.hub.simulated_hub import SimulatedHub


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def sessions(browser: Browser, hub: SimulatedHub) -> dict[str, Any]:
    """The cookies of each user, who has logged in."""
    states: dict[str, Any] = {}
    for name in ("ada", "ben", "root1"):
        page = browser.new_page()
        page.goto(f"{hub.url}/hub/login?next=%2Fhub%2Fhome")
        kind = secrets.ADMIN_PASSWORD if name == "root1" else secrets.USER_PASSWORD
        page.fill("input[name=username]", name)
        page.fill("input[name=password]", secrets.read_secret(hub.served.paths, kind))
        page.click("#login_submit")
        page.wait_for_url("**/hub/home")
        states[name] = page.context.storage_state()
        page.close()
    return states


@pytest.fixture
def contexts(browser: Browser, sessions: dict[str, Any]) -> Iterator[dict[str, BrowserContext]]:
    """Each user's browser."""
    made = {name: browser.new_context(storage_state=session) for name, session in sessions.items()}
    yield made
    for context in made.values():
        context.close()
