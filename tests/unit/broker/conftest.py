"""A broker on simulated nodes for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.brokers import Setting


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """The practice closet's three nodes, simulated."""
    return Setting(tmp_path)
