"""Markers that say what a test needs; pyproject.toml lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest


def mark_folder(items: Iterable[pytest.Item], folder: Path, names: Iterable[str]) -> None:
    """Mark every test below a folder."""
    for item in items:
        if item.path.is_relative_to(folder):
            for name in names:
                item.add_marker(name)


def mark_users_of_fixtures(items: Iterable[pytest.Item], folder: Path, names: Mapping[str, Iterable[str]]) -> None:
    """Mark the tests below a folder that use a fixture, directly or through others; `names` are by fixture."""
    for item in items:
        if item.path.is_relative_to(folder):
            for fixture in names.keys() & getattr(item, "fixturenames", ()):
                for name in names[fixture]:
                    item.add_marker(name)
