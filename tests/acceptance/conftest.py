"""The whole product, started as a user does (`gpuhub up`, instance `ghtest`) and driven in headless Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support import product as support
from tests.support.browser.chromium import WHOLE, chromium
from tests.support.hub.browser import Product, User, run_product
from tests.support.markers import mark_folder

FOLDER = Path(__file__).parent
#: The Slurm tests run with Slurm as the backend only, and those in `lab` on that practice closet only; see tests/run.
collect_ignore = [
    folder for folder, runs in (("slurm", support.ENGINE == "slurm"), ("lab", support.CLOSET == "lab")) if not runs
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are marked with another `backend`; tests without the mark pass with every backend."""
    mark_folder(items, FOLDER, ("closet", "docker", "browser", "root"))
    if support.ENGINE == "slurm":
        mark_folder(items, FOLDER, ("slurm",))
    others = [
        item for item in items if (mark := item.get_closest_marker("backend")) and support.ENGINE not in mark.args
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def product() -> Iterator[Product]:
    """gpuhub on the practice closet; `make down` at the end leaves nothing."""
    with run_product() as product:
        yield product


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium, as users have it."""
    with chromium(WHOLE) as found:
        yield found


@pytest.fixture(scope="session")
def make_user(product: Product, browser: Browser) -> Iterator[Callable[[str], User]]:
    """Return a factory of logged-in users, each with separate cookies."""
    contexts = []

    def make(name: str) -> User:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        contexts.append(context)
        user = User(name=name, page=context.new_page(), address=product.address)
        user.page.on("pageerror", lambda error: user.errors.append(str(error)))
        user.log_in(product.password)
        return user

    yield make
    for context in contexts:
        context.close()
