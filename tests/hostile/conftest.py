"""Fixtures: the scene of the attacks, and the check after each of them that nobody else was hit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.scene import ANSWER_S, Scene
from tests.support.hub.browser import run_product
from tests.support.markers import mark_folder
from tests.support.product import wait_for


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need."""
    mark_folder(items, Path(__file__).parent, ("closet", "docker", "root"))


@pytest.fixture(scope="session")
def running_scene() -> Iterator[Scene]:
    """The product with the victim's and the attacker's containers."""
    with run_product() as product:
        scene = Scene(product)
        try:
            scene.begin()
            yield scene
        finally:
            scene.end()


@pytest.fixture
def scene(running_scene: Scene) -> Iterator[Scene]:
    """The scene; afterwards the same processes and containers run as before, and everybody gets answers."""
    # A daemon of a node that has just been flooded may not answer at once.
    wait_for(lambda: len(running_scene.head_state().containers) == 2, "ada's notebook and job run", 30)
    before = running_scene.head_state()
    yield running_scene
    wait_for(
        lambda: running_scene.head_state() == before,
        lambda: f"the same runs as before: {before} and now {running_scene.head_state()}",
        30,
    )
    assert max(running_scene.ask_everybody().values()) < ANSWER_S
    nodes = running_scene.ada.ask(running_scene.ada.broker, "GET", "/nodes")[1]
    assert {node["name"]: node["state"] for node in nodes} == dict.fromkeys(("rig1", "rig2", "rig3"), "up")
