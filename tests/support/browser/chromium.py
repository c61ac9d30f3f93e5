"""Debian's Chromium without windows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

#: The shell has the same engine, and takes half of the processor's time; the whole browser also has a certificate store.
SHELL, WHOLE = "chromium-headless-shell", "chromium"
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage")


def find(name: str = SHELL) -> str:
    """Return the path of the program."""
    path = shutil.which(name)
    assert path, f"{name} is missing: `spawners/setup.sh dev` installs it"
    return path


@contextmanager
def chromium(name: str = SHELL) -> Iterator[Browser]:
    """Start a browser, and close it at the end."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find(name), args=ARGUMENTS)
        yield browser
        browser.close()
