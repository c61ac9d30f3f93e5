"""The page of notifications with the real proxy, hub and broker, in Chromium, and a real receiver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser.chromium import chromium
from tests.support.hub.served_hub import SETTINGS, ServedHub
from tests.support.receivers import Webhook, webhook

PORT = 18620
PICTURES = Path(os.environ.get("GPUHUB_TEST_PICTURES", Path(__file__).parents[3] / ".cache" / "pictures"))
PHONE = {"width": 390, "height": 844}
TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def hook() -> Iterator[Webhook]:
    with webhook() as served:
        yield served


@pytest.fixture(scope="module")
def hub(hook: Webhook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A running hub whose administrator permits the webhook's address."""
    settings = f'{SETTINGS}\n[notifications]\nallowed_addresses = ["{hook.address}"]\n'
    served = ServedHub("ghnotify", tmp_path_factory.mktemp("hub"), "", PORT, settings=settings)
    try:
        served.start()
        yield served
    finally:
        served.stop()


@pytest.fixture
def page(hub: ServedHub) -> Iterator[Page]:
    """The page of notifications, for ada."""
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(f"http://127.0.0.1:{PORT}/hub/login?next=/hub/notifications")
        page.fill("input[name=username]", "ada")
        page.fill("input[name=password]", hub.password)
        page.click("#login_submit")
        expect(page.get_by_role("heading", name="Notifications", exact=True)).to_be_visible()
        yield page


def add(page: Page, url: str, name: str) -> None:
    page.get_by_role("textbox", name="Address").fill(url)
    page.get_by_role("textbox", name="Name").fill(name)
    page.get_by_role("button", name="Add").click()


def test_a_user_adds_tests_changes_and_removes_a_destination(hub: ServedHub, hook: Webhook, page: Page) -> None:
    """What leads into the network of the head node is refused with the reason; the address is never shown again."""
    problem = page.locator("#gpuhub-problem")
    add(page, "json://169.254.169.254/latest/meta-data", "")
    expect(problem).to_contain_text("169.254.169.254 is not an address of the internet")
    add(page, f"json://127.0.0.1:{PORT + 2}/services/broker/s3cret", "")
    expect(problem).to_contain_text("127.0.0.1 is not an address of the internet")
    page.screenshot(path=PICTURES / "notifications-refused.png", full_page=True)

    add(page, f"json://{hook.address}/s3cret", "My webhook")
    entry = page.get_by_role("article", name="My webhook")
    expect(entry).to_contain_text("Webhook at 127.0.0.1")
    expect(entry).to_contain_text("Nothing was sent yet")
    expect(problem).to_be_hidden()
    entry.get_by_role("button", name="Send a test").click()
    expect(entry).to_contain_text("Last accepted at", timeout=TIMEOUT_MS)
    assert [message["title"] for message in hook.received] == ["Notifications of gpuhub arrive here"]

    entry.get_by_label("A job has ended").uncheck()
    page.reload()
    expect(entry.get_by_label("A job has ended")).not_to_be_checked()
    expect(entry.get_by_label("A job failed")).to_be_checked()
    take_pictures(page)
    assert "s3cret" not in page.content()
    entry.get_by_role("button", name="Remove").click()
    expect(page.locator("#gpuhub-list")).to_contain_text("Nothing is sent.")
    assert [name for name in ("hub", "broker", "proxy") if "s3cret" in hub.log(name)] == []


def take_pictures(page: Page) -> None:
    """Keep pictures in light and dark, also at a phone's width, where nothing may be wider than the screen."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for theme in ("light", "dark"):
        page.evaluate("theme => document.documentElement.setAttribute('data-bs-theme', theme)", theme)
        page.screenshot(path=PICTURES / f"notifications-{theme}.png", full_page=True)
        before = page.viewport_size
        page.set_viewport_size({"width": PHONE["width"], "height": PHONE["height"]})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(path=PICTURES / f"notifications-phone-{theme}.png", full_page=True)
        assert before is not None
        page.set_viewport_size(before)
