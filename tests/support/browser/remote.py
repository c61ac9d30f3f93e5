"""Firefox and WebKit, the engine of Safari, as Debian has them, driven by their own remote protocols.

Playwright, which drives Chromium elsewhere, has builds of its own of these two. WebKitGTK is driven by W3C WebDriver
through Selenium. Firefox's counterpart, geckodriver, is no package of Debian: the same commands go to Firefox itself,
by Mozilla's Marionette (https://firefox-source-docs.mozilla.org/testing/marionette/Protocol.html).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from selenium import webdriver
from selenium.webdriver.webkitgtk.options import Options
from selenium.webdriver.webkitgtk.service import Service

from tests.support.product import wait_for

#: Time for a page to show what it shall show, seconds.
PAGE_S = 90.0
SIZE = (1280, 900)
_CSS = "css selector"


class RemoteBrowser(Protocol):
    """One window of a browser."""

    #: Name and version.
    name: str

    def open(self, url: str) -> None:
        """Go to an address, and wait until the page has loaded."""
        ...

    def url(self) -> str:
        """Return the address of the page."""
        ...

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function in the page, and return what it returns."""
        ...

    def find(self, css: str) -> Any:
        """Return the first element of a selector; it has `click` and `send_keys`."""
        ...

    def picture(self, file: Path) -> None:
        """Save a screenshot."""
        ...


class Marionette:
    """A connection to Firefox: each message is its length in bytes, a colon, and a list as JSON."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=2 * PAGE_S)
        self._file = self._socket.makefile("rb")
        self._number = 0
        self._receive()

    def send(self, command: str, **parameters: Any) -> Any:
        """Send a command; return its result.

        Raises:
            RuntimeError: the command failed.
        """
        self._number += 1
        text = json.dumps([0, self._number, command, parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(text), text))
        _, _, error, result = self._receive()
        if error is not None:
            raise RuntimeError(f"{command}: {error['error']}: {error['message']}")
        return result

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def _receive(self) -> Any:
        digits = b""
        while (byte := self._file.read(1)) != b":":
            assert byte.isdigit(), "Firefox has ended"
            digits += byte
        return json.loads(self._file.read(int(digits)))


@dataclass(frozen=True, slots=True)
class FirefoxElement:
    """An element of Firefox's page."""

    marionette: Marionette
    reference: str

    def click(self) -> None:
        """Click in its middle."""
        self.marionette.send("WebDriver:ElementClick", id=self.reference)

    def send_keys(self, *texts: str) -> None:
        """Type a text, which may have keys such as Enter as WebDriver's code points."""
        self.marionette.send("WebDriver:ElementSendKeys", id=self.reference, text="".join(texts))


class Firefox:
    """Firefox by Marionette."""

    def __init__(self, marionette: Marionette) -> None:
        self._marionette = marionette
        capabilities = marionette.send("WebDriver:NewSession")["capabilities"]
        self.name = f"Firefox {capabilities['browserVersion']}"
        marionette.send("WebDriver:SetTimeouts", pageLoad=1000 * PAGE_S)
        marionette.send("WebDriver:SetWindowRect", width=SIZE[0], height=SIZE[1])

    def open(self, url: str) -> None:
        self._marionette.send("WebDriver:Navigate", url=url)

    def url(self) -> str:
        return str(self._marionette.send("WebDriver:GetCurrentURL")["value"])

    def run(self, script: str, *arguments: Any) -> Any:
        # Without a sandbox, scripts see the page's own variables.
        return self._marionette.send("WebDriver:ExecuteScript", script=script, args=arguments, sandbox=None)["value"]

    def find(self, css: str) -> Any:
        found = self._marionette.send("WebDriver:FindElement", using=_CSS, value=css)["value"]
        return FirefoxElement(self._marionette, next(iter(found.values())))

    def picture(self, file: Path) -> None:
        picture = self._marionette.send("WebDriver:TakeScreenshot", full=False)["value"]
        file.write_bytes(base64.b64decode(picture))


class WebKit:
    """WebKitGTK's MiniBrowser by WebDriver."""

    def __init__(self, driver: webdriver.WebKitGTK) -> None:
        self._driver = driver
        self.name = f"WebKitGTK {driver.capabilities['browserVersion']}"

    def open(self, url: str) -> None:
        self._driver.get(url)

    def url(self) -> str:
        return str(self._driver.current_url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self._driver.execute_script(script, *arguments)

    def find(self, css: str) -> Any:
        return self._driver.find_element(_CSS, css)

    def picture(self, file: Path) -> None:
        self._driver.save_screenshot(file)


@contextmanager
def firefox() -> Iterator[RemoteBrowser]:
    """Start Firefox without a screen, with a profile of its own."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder)
        # The port that the system gave it is written into the profile.
        (profile / "user.js").write_text('user_pref("marionette.port", 0);\n', encoding="utf-8")
        command = [_find("firefox-esr"), "--headless", "--marionette", "--no-remote", "--profile", folder]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"HOME": folder}
        ) as process:
            try:
                wait_for((profile / "MarionetteActivePort").exists, "Firefox listens", deadline_s=PAGE_S)
                port = int((profile / "MarionetteActivePort").read_text())
                marionette = Marionette(port)
                try:
                    yield Firefox(marionette)
                finally:
                    marionette.close()
            finally:
                process.terminate()


@contextmanager
def webkit() -> Iterator[RemoteBrowser]:
    """Start WebKitGTK on a screen in memory, with a profile of its own."""
    browser = next(Path("/usr/lib").glob("*/webkit2gtk-4.*/MiniBrowser"), None)
    assert browser, "WebKitGTK's MiniBrowser is missing: `spawners/setup.sh dev` installs webkit2gtk-driver"
    with virtual_screen() as display, tempfile.TemporaryDirectory() as home:
        options = Options()
        options.binary_location = str(browser)
        options.add_argument("--automation")
        environment = {"DISPLAY": display, "HOME": home, "XDG_RUNTIME_DIR": home, "PATH": "/usr/bin:/bin"}
        # Without a GPU, and without the sandbox of a desktop's user.
        environment |= {"WEBKIT_DISABLE_COMPOSITING_MODE": "1", "LIBGL_ALWAYS_SOFTWARE": "1"}
        service = Service(executable_path=_find("WebKitWebDriver"), env=environment)
        with warnings.catch_warnings():
            # Selenium's class for WebKitGTK is not adapted to its own connection yet.
            warnings.filterwarnings("ignore", "setting remote_server_addr", DeprecationWarning)
            driver = webdriver.WebKitGTK(options=options, service=service)
        try:
            driver.set_page_load_timeout(PAGE_S)
            driver.set_window_size(*SIZE)
            yield WebKit(driver)
        finally:
            driver.quit()


@contextmanager
def virtual_screen() -> Iterator[str]:
    """Start an X server without a screen; yield its display."""
    command = [_find("Xvfb"), "-displayfd", "1", "-screen", "0", f"{SIZE[0]}x{SIZE[1]}x24", "-nolisten", "tcp"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            yield f":{server.stdout.readline().strip()}"
        finally:
            server.terminate()


def fill(browser: RemoteBrowser, css: str, text: str) -> None:
    """Type into a field."""
    field = wait_for_element(browser, css)
    field.click()
    field.send_keys(text)


def click(browser: RemoteBrowser, css: str) -> None:
    """Click on an element, after the page has scrolled to it: pages scroll slowly, and WebKit does not wait."""
    element = wait_for_element(browser, css)
    browser.run("document.querySelector(arguments[0]).scrollIntoView({behavior: 'instant', block: 'center'});", css)
    element.click()


def wait_for_element(browser: RemoteBrowser, css: str, deadline_s: float = PAGE_S) -> Any:
    """Return the first element of a selector as soon as it is visible."""
    script = (
        "const found = document.querySelector(arguments[0]);"
        " return found !== null && found.getClientRects().length > 0;"
    )
    wait_until(browser, lambda: browser.run(script, css), css, deadline_s)
    return browser.find(css)


def wait_for_text(browser: RemoteBrowser, css: str, text: str, deadline_s: float = PAGE_S) -> None:
    """Wait until an element of a selector contains a text."""
    script = "return [...document.querySelectorAll(arguments[0])].some(one => one.textContent.includes(arguments[1]));"
    wait_until(browser, lambda: browser.run(script, css, text), f"{css} with {text!r}", deadline_s)


def wait_until(browser: RemoteBrowser, condition: Callable[[], Any], what: str, deadline_s: float = PAGE_S) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: it is not true in time; the text of the page is in the message.
    """
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            text = browser.run("return document.body.innerText")
            raise AssertionError(f"{browser.name}: not within {deadline_s} s: {what} at {browser.url()}\n{text[:2000]}")
        time.sleep(0.2)


def _find(program: str) -> str:
    path = shutil.which(program)
    assert path, f"{program} is missing: `spawners/setup.sh dev` installs it"
    return path
