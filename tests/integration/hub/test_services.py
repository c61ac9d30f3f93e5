"""A service behind the login: real proxy, hub and broker, a real Docker docker_daemon, and Chromium."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser.chromium import chromium
from tests.support.docker.own_daemon import TINY, OwnDaemon, own_daemon
from tests.support.hub.served_hub import SETTINGS, ServedHub

PORT = 18640
PICTURES = Path(os.environ.get("GPUHUB_TEST_PICTURES", Path(__file__).parents[3] / ".cache" / "pictures"))
TIMEOUT_MS = 60_000
#: Shows who visits it, and tries what a page could steal.
PROGRAM = """
import http.server
PAGE = '''<!doctype html><html><head><title>Notes</title></head><body><h1>Notes of USER</h1><p id=out></p><script>
(async () => {
  let cookies, hub;
  try { cookies = document.cookie } catch (error) { cookies = error.name }
  try { hub = (await fetch('/hub/api/user', {credentials: 'include'})).status } catch (error) { hub = error.name }
  const own = await (await fetch('own')).text();
  document.getElementById('out').textContent = JSON.stringify({cookies, hub, own});
})()</script></body></html>'''
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        user = self.headers["X-Forwarded-User"]
        secrets = [name for name in ("Cookie", "Authorization") if name in self.headers]
        text = f"{self.path} for {user} {secrets}" if self.path.startswith("/own") else PAGE.replace("USER", user)
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Set-Cookie", "jupyterhub-session-id=stolen; Path=/")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def docker_daemon() -> Iterator[OwnDaemon]:
    with own_daemon() as found:
        yield found


@pytest.fixture(scope="module")
def hub(docker_daemon: OwnDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A hub with a service for all, and one for ben."""
    program = PROGRAM.replace("{", "{{").replace("}", "}}").replace("\\", "\\\\").replace('"', '\\"')
    program = program.replace("\n", "\\n")
    tables = "".join(
        f'[[services]]\nname = "{name}"\nimage = "{TINY}"\ncommand = ["python3", "-c", "{program}"]\nport = 8000\n{more}\n'
        for name, more in (("notes", ""), ("private", 'users = ["ben"]'))
    )
    settings = SETTINGS.replace("unix:///run/gpuhub-nobody-listens-here.sock", docker_daemon.url) + tables
    served = ServedHub("ghserve", tmp_path_factory.mktemp("hub"), "", PORT, settings=settings)
    try:
        served.start()
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@contextmanager
def visitor(hub: ServedHub, browser: Browser, name: str, path: str) -> Iterator[Page]:
    """Open a path as a user who logs in on the way."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(f"http://127.0.0.1:{PORT}{path}")
    page.fill("input[name=username]", name)
    page.fill("input[name=password]", hub.password)
    page.click("#login_submit")
    yield page
    context.close()


def test_a_user_finds_the_service_in_the_menu(hub: ServedHub, browser: Browser) -> None:
    """The menu has what the user may use; the page has the user's name, and reads and sets nothing of the hub's."""
    with visitor(hub, browser, "ada", "/hub/gpus") as page:
        page.get_by_role("button", name="Services").click()
        links = page.locator(".dropdown-menu .dropdown-item")
        expect(page.get_by_role("link", name="notes")).to_be_visible()
        assert "private" not in " ".join(links.all_inner_texts())
        page.screenshot(path=PICTURES / "services-menu.png")
        before = [(cookie["name"], cookie["value"]) for cookie in page.context.cookies()]
        page.get_by_role("link", name="notes").click()
        expect(page.get_by_role("heading", name="Notes of ada")).to_be_visible(timeout=TIMEOUT_MS)
        out = page.locator("#out")
        expect(out).to_contain_text("own")
        assert out.inner_text() == '{"cookies":"","hub":"TypeError","own":"/own for ada []"}'
        page.screenshot(path=PICTURES / "service-page.png")
        after = [(cookie["name"], cookie["value"]) for cookie in page.context.cookies()]
        assert ("jupyterhub-session-id", "stolen") not in after
        assert {name for name, _ in after} == {name for name, _ in before}


def test_the_address_leads_through_the_login(hub: ServedHub, browser: Browser) -> None:
    """Who is not logged in comes back to the address afterwards; who may not use the service is told so."""
    with visitor(hub, browser, "ben", "/services/private/") as page:
        expect(page.get_by_role("heading", name="Notes of ben")).to_be_visible(timeout=TIMEOUT_MS)
        address = page.url
    with visitor(hub, browser, "ada", "/services/private/") as page:
        expect(page.locator("body")).to_contain_text("there is no service 'private' that ada may use")
        page.screenshot(path=PICTURES / "service-refused.png")
    assert "/services/broker/service-visits/private/" in address


def test_without_a_token_a_program_is_refused(hub: ServedHub) -> None:
    """The proxy routes the address to the broker alone."""
    answer = httpx.get(f"http://127.0.0.1:{PORT}/services/notes/own", trust_env=False, timeout=30)
    assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json")
    assert "own for" not in answer.text
