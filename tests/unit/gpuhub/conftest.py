"""Fixtures for the hub's side: a small cluster, and a broker on simulated nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.config.settings import ClusterSettings
from tests.support.broker.in_process import Setting
from tests.support.clusters import build_cluster


@pytest.fixture
def cluster() -> ClusterSettings:
    """A cluster of three nodes with one GPU each."""
    return build_cluster()


@pytest.fixture
def head_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine be the example's head node, also where it has no network."""
    monkeypatch.setattr("gpuhub.config.settings.find_own_address", lambda _targets: "192.168.1.21")


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """The practice closet's three nodes, simulated."""
    return Setting(tmp_path)
