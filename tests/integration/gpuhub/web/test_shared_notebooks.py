"""The page of a shared notebook in headless browsers, with the real proxy, hub, broker and courier on simulated nodes."""

from __future__ import annotations

import base64
import http.server
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from PIL import Image
from playwright.sync_api import BrowserContext, Page, expect

from gpuhub.common import secrets
from gpuhub.web.shared_notebooks import FRAME_POLICY
from tests.support.browser import remote
from tests.support.browser.remote import RemoteBrowser
from tests.support.hub.pages import check_accessibility, take_picture
from tests.support.hub.simulated_hub import SimulatedHub, simulated_hub

pytestmark = [pytest.mark.browser, pytest.mark.root]
TIMEOUT_MS = 60_000
#: One pixel, red.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
PATH = "work/train.ipynb"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHub]:
    """A hub with the users ada, ben and root1."""
    with simulated_hub("ghnbs", tmp_path_factory.mktemp("hub"), 18570) as started:
        started.make_tokens("ada", "ben", "root1")
        yield started


@pytest.fixture(autouse=True)
def clean(hub: SimulatedHub) -> Iterator[None]:
    """End all shares after each test."""
    yield
    for user in ("ada", "ben"):
        hub.send("DELETE", f"/shares?user={user}", "root1")


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """Another web server: its address, and the paths that were requested."""
    requested: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", requested
    server.shutdown()
    thread.join()
    server.server_close()


def save(hub: SimulatedHub, *cells: Any, path: str = PATH) -> Path:
    """Save a notebook in ada's home."""
    file = hub.running.setting.home("ada") / path
    file.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells)), file)
    return file


def share(hub: SimulatedHub, viewer: str = "ben", path: str = PATH) -> str:
    """Return the path of the page."""
    made = hub.send("PUT", f"/notebooks/shares/{viewer}", json={"path": path, "for_s": 3600})
    return str(made["path"])


def code(source: str, **outputs: str) -> Any:
    """Return a code cell with an output of each of these types, `_` for `/`."""
    data = {kind.replace("_", "/", 1): content for kind, content in outputs.items()}
    shown = [nbformat.v4.new_output("display_data", data)] if data else []
    return nbformat.v4.new_code_cell(source, execution_count=1, outputs=shown)


def open_page(hub: SimulatedHub, context: BrowserContext, path: str) -> Page:
    page = context.new_page()
    page.on("pageerror", lambda error: pytest.fail(f"the page's script failed: {error}"))
    page.goto(f"{hub.url}{path}")
    return page


def test_viewer_sees_the_notebook_as_it_was_saved_until_the_owner_ends_it(
    hub: SimulatedHub, contexts: dict[str, BrowserContext]
) -> None:
    """Text, code and plots; saved again, it is shown again; then all of it is gone."""
    save(hub, nbformat.v4.new_markdown_cell("# Results"), code("loss = 4.2", image_png=PIXEL))
    page = open_page(hub, contexts["ben"], share(hub))
    frame = page.frame_locator("#gpuhub-notebook")
    expect(frame.get_by_role("heading", name="Results")).to_be_visible(timeout=TIMEOUT_MS)
    expect(frame.locator("pre").first).to_contain_text("loss = 4.2")
    assert frame.locator("img").first.evaluate("image => image.naturalWidth") == 1
    facts = page.locator("#gpuhub-shared-job")
    expect(facts).to_contain_text("ada")
    expect(facts).to_contain_text("Saved")
    check_accessibility(page)
    take_picture(page, "shared-notebook")
    pages = page.evaluate("history.length")
    save(hub, nbformat.v4.new_markdown_cell("# Better results"))
    expect(frame.get_by_role("heading", name="Better results")).to_be_visible(timeout=TIMEOUT_MS)
    # The browser's button leads back to the page before, however often the notebook was saved.
    assert page.evaluate("history.length") == pages
    hub.send("DELETE", f"/shares?user={'ben'}", "root1")
    expect(page.locator("#gpuhub-share-end")).to_contain_text("is not shared with ben, or no longer", timeout=20_000)
    assert page.locator("#gpuhub-notebook").count() == 0
    expect(facts).to_be_hidden()
    page.reload()
    expect(page.locator("body")).to_contain_text("is not shared with ben, or no longer")


@pytest.mark.parametrize("is_alone", [False, True])
def test_nothing_of_a_notebook_runs_or_is_loaded(
    hub: SimulatedHub, contexts: dict[str, BrowserContext], elsewhere: tuple[str, list[str]], is_alone: bool
) -> None:
    """Neither in the page's frame nor when its address is opened by itself."""
    address, requested = elsewhere
    script = "top.postMessage('stolen', '*'); parent.document.title = 'stolen'; document.title = 'stolen'"
    encoded = base64.b64encode(script.encode()).decode()
    attack = (
        f"<script>{script}</script><img src=x onerror=\"{script}\"><img src='{address}/image'>"
        f"<script src='data:text/javascript;base64,{encoded}'></script><script src='{address}/script'></script>"
        f"<link rel=stylesheet href='{address}/style'><style>body {{ background: url('{address}/css') }}</style>"
        f"<style>@import '{address}/import';</style><iframe src='{address}/frame'></iframe>"
        f"<iframe srcdoc=\"<script>{script}</script>\"></iframe><meta http-equiv=refresh content='0; url={address}/go'>"
        f"<form id=f action='{address}/form'><input name=a><button>Log in</button></form>"
        f"<svg onload=\"{script}\"></svg><object data='{address}/object'></object><video src='{address}/video'></video>"
        f"<a href='javascript:{script}'>link</a><base href='{address}/base/'><p id=end>the end</p>"
    )
    save(hub, code("1", text_html=attack, application_javascript=script), nbformat.v4.new_markdown_cell(attack))
    path = share(hub)
    page = contexts["ben"].new_page()
    page.goto(f"{hub.url}{path}{'/frame' if is_alone else ''}")
    frame: Any = page if is_alone else page.frame_locator("#gpuhub-notebook")
    if not is_alone:
        page.evaluate(
            "() => { window.heard = []; addEventListener('message', event => window.heard.push(event.data)); }"
        )
        page.evaluate("() => { const f = document.getElementById('gpuhub-notebook'); f.src = f.src; }")
    expect(frame.locator("#end").first).to_be_visible(timeout=TIMEOUT_MS)
    frame.get_by_role("link", name="link").first.click()
    frame.get_by_role("button", name="Log in").first.click()
    time.sleep(1)
    expect(frame.locator("#end").first).to_be_visible()
    assert "stolen" not in page.title()
    assert requested == []
    if not is_alone:
        assert page.evaluate("() => window.heard") == []
    found = contexts["ben"].request.get(f"{hub.url}{path.replace('/hub/', '/hub/')}/frame")
    assert found.headers["content-security-policy"] == FRAME_POLICY
    assert "<script>" in found.text()


def test_page_is_for_viewers_and_the_owner_alone(hub: SimulatedHub, contexts: dict[str, BrowserContext]) -> None:
    """Others get an error, also administrators; without a session it leads to the login."""
    save(hub, code("1"))
    path = share(hub, "ben")
    for below in ("", "/state", "/frame"):
        for name, status in (("ben", 200), ("ada", 200), ("root1", 403)):
            assert contexts[name].request.get(f"{hub.url}{path}{below}").status == status, (name, below)
    hub.send("DELETE", "/shares?user=ben", "root1")
    for below in ("", "/state", "/frame"):
        for name in ("ben", "ada", "root1"):
            assert contexts[name].request.get(f"{hub.url}{path}{below}").status == 404, (name, below)


def test_owner_finds_and_ends_it_on_the_page_of_gpus(hub: SimulatedHub, contexts: dict[str, BrowserContext]) -> None:
    """Both users' pages list it; the viewer sees the file's name, not its folder."""
    save(hub, code("1"))
    path = share(hub)
    ada, ben = (contexts[name].new_page() for name in ("ada", "ben"))
    for page in (ada, ben):
        page.goto(f"{hub.url}/hub/gpus")
    part = "[data-gpuhub-part=shares]"
    expect(ada.locator(part)).to_contain_text(PATH, timeout=TIMEOUT_MS)
    expect(ben.locator(part)).to_contain_text("train.ipynb", timeout=TIMEOUT_MS)
    assert "work/" not in (ben.locator(part).text_content() or "")
    take_picture(ada, "gpus-shared-notebook")
    ada.locator(part).get_by_role("button", name="End").click()
    expect(ada.locator(part)).to_be_empty()
    assert contexts["ben"].request.get(f"{hub.url}{path}").status == 404


@pytest.mark.parametrize("start", [remote.firefox, remote.webkit], ids=["firefox", "webkit"])
def test_other_browsers_show_the_notebook_and_run_nothing_of_it(
    hub: SimulatedHub,
    elsewhere: tuple[str, list[str]],
    tmp_path: Path,
    start: Callable[[], AbstractContextManager[RemoteBrowser]],
) -> None:
    """The frame is closed to the page's own script, too, so a picture shows what is in it."""
    address, requested = elsewhere
    attack = f"<script>top.document.title = 'stolen'; fetch('{address}/script')</script><img src='{address}/image'>"
    save(hub, code("plot()", image_png=draw_square("red")), code("attack()", text_html=attack))
    path = share(hub)
    with start() as browser:
        browser.open(f"{hub.url}/hub/login?next={path}")
        remote.fill(browser, "input[name=username]", "ben")
        remote.fill(browser, "input[name=password]", secrets.read_secret(hub.served.paths, secrets.USER_PASSWORD))
        remote.click(browser, "#login_submit")
        remote.wait_until(
            browser, lambda: count_pixels(browser, tmp_path, (255, 0, 0)) > 5000, "the square in the frame"
        )
        assert "stolen" not in browser.run("return document.title")
    assert requested == []


def draw_square(color: str) -> str:
    """Return a square of 100 pixels as PNG in base64."""
    file = io.BytesIO()
    Image.new("RGB", (100, 100), color).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def count_pixels(browser: RemoteBrowser, folder: Path, color: tuple[int, int, int]) -> int:
    """Return how many pixels of the window have the color."""
    browser.picture(folder / "window.png")
    with Image.open(folder / "window.png") as picture:
        return sum(count for count, found in picture.convert("RGB").getcolors(2**24) or () if found == color)
