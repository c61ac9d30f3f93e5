"""The way from the login to a cell's result in Firefox and in WebKit, the engine of Safari; the others use Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from selenium.webdriver.common.keys import Keys

from tests.support.browser import remote
from tests.support.browser.remote import RemoteBrowser
from tests.support.hub.browser import PICTURES, Product
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

USER = "ben"
CELL = "print('six times seven is', 6 * 7)"
STATUS = ".gpuhub-status"


@pytest.fixture(params=[remote.firefox, remote.webkit], ids=["firefox", "webkit"])
def browser(request: pytest.FixtureRequest) -> Iterator[RemoteBrowser]:
    """A window of each browser, one after the other."""
    start: Callable[[], AbstractContextManager[RemoteBrowser]] = request.param
    with start() as started:
        yield started


@pytest.fixture(scope="module")
def client(product: Product) -> Iterator[Client]:
    """The same user's token, to look at what the browser did."""
    client = log_in(product.address, USER, product.password)
    yield client
    if client.servers():
        stop(client)
    client.close()


def stop(client: Client) -> None:
    """Stop the user's server, and wait until its GPU is free."""
    status, answer = client.ask(client.hub, "DELETE", f"/users/{USER}/server")
    assert status in {202, 204}, answer
    wait_for(lambda: not any(gpu["holder"] for gpu in client.gpus()), "the GPU is free", 60)


def test_from_login_to_a_cells_result(product: Product, client: Client, browser: RemoteBrowser) -> None:
    """Login, spawn form, JupyterLab, a cell in a new notebook, and the GPU on the live page, until it is free again."""
    browser.open(product.address)
    remote.fill(browser, "input[name=username]", USER)
    remote.fill(browser, "input[name=password]", product.password)
    remote.click(browser, "#login_submit")
    remote.wait_until(browser, lambda: "/hub/" in browser.url() and "login" not in browser.url(), "logged in")

    browser.open(f"{product.address}/hub/spawn")
    remote.wait_for_text(browser, ".gpuhub-card", "RTX 5060")
    remote.click(browser, "#gpuhub-rtx5060")
    picture(browser, "form")
    remote.click(browser, "input[type=submit], button[type=submit]")
    remote.wait_until(browser, lambda: f"/user/{USER}/lab" in browser.url(), "the way to JupyterLab")
    remote.wait_for_text(browser, STATUS, "RTX 5060")

    # Without the tabs that the browser before this one left.
    browser.open(f"{product.address}/user/{USER}/lab?reset")
    remote.click(browser, ".jp-LauncherCard[data-category=Notebook]")
    # JupyterLab drops a cell that is run before its kernel is connected.
    remote.wait_for_text(browser, "#jp-main-statusbar", "| Idle")
    cell = remote.wait_for_element(browser, ".jp-Notebook .jp-CodeCell .cm-content")
    cell.click()
    cell.send_keys(CELL, Keys.SHIFT + Keys.ENTER)
    remote.wait_for_text(browser, ".jp-OutputArea-output", "six times seven is 42")
    picture(browser, "lab")

    browser.open(f"{product.address}/hub/gpus")
    remote.wait_for_text(browser, "#gpuhub-connection", "live")
    remote.wait_for_text(browser, "[data-gpuhub-part=own]", "RTX 5060")
    browser.run("window.isSamePage = true")
    picture(browser, "gpus")
    stop(client)
    remote.wait_for_text(browser, "[data-gpuhub-part=own]", "You have no ")
    assert browser.run("return window.isSamePage") is True


def picture(browser: RemoteBrowser, what: str) -> None:
    """Save a screenshot for inspection."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    browser.picture(PICTURES / f"{browser.name.split()[0].lower()}-{what}.png")
