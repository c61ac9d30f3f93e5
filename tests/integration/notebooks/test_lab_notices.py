"""The notices of JupyterLab's extension in Chromium, with the answers of the notebook's server given by the test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, sync_playwright

from tests.support.product import ROOT

pytestmark = pytest.mark.browser
EXTENSION = (ROOT / "images/notebook/lab/extension/static/remoteEntry.js").read_text(encoding="utf-8")
#: JupyterLab's application as far as the extension uses it; what it was asked to show is kept.
APPLICATION = """
window.shown = [];
window.app = {
  restored: Promise.resolve(),
  shell: { isEmpty: () => false },
  commands: {
    hasCommand: () => false,
    addCommand: () => undefined,
    execute: async (command, options) => { window.shown.push({ command, ...options }); return String(window.shown.length); },
  },
};
"""
START = """
async () => {
  const module = (await globalThis._JUPYTERLAB["gpuhub-lab"].get())();
  module.default.find((plugin) => plugin.id === "gpuhub-lab:idle").activate(window.app);
}
"""
HOT = "GPU 0 (RTX 5090) of rig1: its clocks have been lowered by the hardware for minutes"
LOST = "GPU 0 (RTX 5090) of rig1: Xid 79, it has fallen off the bus: reset the GPU or restart the node"


@pytest.fixture
def page() -> Iterator[Page]:
    """A page whose clock the test moves."""
    chromium = shutil.which("chromium")
    assert chromium, "chromium is missing: `spawners/setup.sh dev` installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        opened = browser.new_page()
        opened.clock.install()
        yield opened
        browser.close()


def answer(page: Page, *problems: str) -> None:
    """Let the notebook's server answer this from now on."""
    body: dict[str, Any] = {"idle": None, "gpu_problems": problems}

    def fulfil(route: Route) -> None:
        is_page = route.request.resource_type == "document"
        route.fulfill(
            body="<p>JupyterLab</p>" if is_page else json.dumps(body),
            content_type="text/html" if is_page else "application/json",
        )

    page.unroute_all()
    page.route("**/*", fulfil)


def read_notices(page: Page) -> list[str]:
    return [str(notice["message"]) for notice in page.evaluate("window.shown")]


def wait_for_notices(page: Page, number: int) -> list[str]:
    page.wait_for_function(f"window.shown.length >= {number}")
    return read_notices(page)


def test_each_problem_of_a_gpu_is_shown_once_until_it_has_ended(page: Page) -> None:
    """A user who closes a notice does not get it again; a problem that comes back is news."""
    answer(page, HOT)
    page.goto("http://notebook.test/lab")
    page.evaluate(APPLICATION)
    page.evaluate(EXTENSION)
    page.evaluate(START)
    assert wait_for_notices(page, 1) == [HOT]
    answer(page, HOT, LOST)
    page.clock.run_for(11_000)
    assert wait_for_notices(page, 2) == [HOT, LOST]
    answer(page, LOST)
    with page.expect_response("**/gpuhub/idle"):
        page.clock.run_for(11_000)
    answer(page, HOT, LOST)
    page.clock.run_for(11_000)
    assert wait_for_notices(page, 3) == [HOT, LOST, HOT]
    assert {notice["type"] for notice in page.evaluate("window.shown")} == {"warning"}
