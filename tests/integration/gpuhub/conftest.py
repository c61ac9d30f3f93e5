"""A small cluster, and a broker on simulated nodes whose couriers are real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.config.settings import ClusterSettings
from tests.support.broker.in_process import Setting
from tests.support.clusters import build_cluster


@pytest.fixture
def cluster() -> ClusterSettings:
    """Return a cluster of three nodes with one GPU each."""
    return build_cluster()


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Return the practice closet's three nodes, simulated."""
    return Setting(tmp_path)
