"""The choice of an image on the spawn form, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from gpuhub.spawners.base import parse_spawn_options
from gpuhub.web.spawn_form import render_form
from tests.support.browser.chromium import chromium
from tests.support.clusters import build_cluster

pytestmark = pytest.mark.browser
FIELDS = "() => Array.from(new FormData(document.forms[0]).entries()).map(([key, value]) => [key, [value]])"


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of headless Chromium."""
    with chromium() as browser:
        yield browser.new_page()


def test_the_choice_of_an_image_chooses_its_profile(page: Page) -> None:
    """What the form sends is what the hub accepts; the other profile is sent without an image."""
    cluster = build_cluster()
    small = cluster.profiles[1].model_copy(update={"images": ("gpuhub/llm:latest",)})
    offering = cluster.model_copy(update={"profiles": (cluster.profiles[0], small)})
    page.set_content(f"<form>{render_form(offering, None, last_profile=None)}<button type=submit>Start</button></form>")
    assert parse_spawn_options(dict(page.evaluate(FIELDS))) == {"profile": cluster.profiles[0].name}
    page.get_by_label(f"Image of {small.title}").select_option("gpuhub/llm:latest")
    assert parse_spawn_options(dict(page.evaluate(FIELDS))) == {"profile": small.name, "image": "gpuhub/llm:latest"}
