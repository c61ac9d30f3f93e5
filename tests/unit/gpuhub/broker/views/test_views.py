"""The cluster as JSON: built once for all who see the same, and never older than it may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.views import views
from gpuhub.broker_api.schemas import CordonRequest, LeaseRequest
from gpuhub.config.settings import UserSettings
from gpuhub.domain.models import Identity
from tests.support.broker.in_process import Running, Setting, asgi_broker
from tests.support.docker.simulated_nodes import build_cluster

ADA, BEN = Identity(name="ada"), Identity(name="ben")
ROOT = Identity(name="root", is_admin=True)


def list_holders(running: Running, who: Identity) -> list[str]:
    nodes: list[dict[str, Any]] = json.loads(running.app.state.cluster.cluster_json(who))["nodes"]
    return [gpu["holder"]["owner"] for node in nodes for gpu in node["gpus"] if gpu["holder"]]


async def test_small_cluster_view_is_always_current(tmp_path: Path) -> None:
    """Everybody gets the same text while nothing changes, and another one at once when something does."""
    async with asgi_broker(Setting(tmp_path)) as running:
        broker = running.app.state.broker
        await broker.request_lease(ADA, LeaseRequest(profile="rtx5090", key="k1"))
        assert list_holders(running, BEN) == ["ada"]
        await broker.request_lease(BEN, LeaseRequest(profile="rtx5070", key="k1"))
        assert sorted(list_holders(running, ADA)) == ["ada", "ben"]


async def test_large_cluster_view_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where building takes long, a change waits; what an administrator decides does not."""
    monkeypatch.setattr(views, "FAST_BUILD_S", -1.0)
    monkeypatch.setattr(views, "AGE_PER_BUILD_TIME", 1e9)
    async with asgi_broker(Setting(tmp_path)) as running:
        broker = running.app.state.broker
        assert list_holders(running, BEN) == []
        await broker.request_lease(ADA, LeaseRequest(profile="rtx5090", key="k1"))
        assert list_holders(running, BEN) == []
        await running.app.state.admin.cordon(ROOT, "rig2", CordonRequest())
        assert list_holders(running, BEN) == ["ada"]


async def test_cluster_view_applies_the_limits_of_the_caller(tmp_path: Path) -> None:
    """Who has reached a limit sees that nothing starts, whatever others see."""
    setting = Setting(tmp_path)
    setting.cluster = build_cluster(users=UserSettings(allowed=("ada", "ben"), max_gpus=1))
    async with asgi_broker(setting) as running:
        broker = running.app.state.broker
        await broker.request_lease(ADA, LeaseRequest(profile="rtx5090", key="k1"))

        def can_start_now(who: Identity) -> bool:
            profiles = json.loads(running.app.state.cluster.cluster_json(who))["profiles"]
            return next(bool(one["starts_now"]) for one in profiles if one["name"] == "rtx5060")

        assert (can_start_now(ADA), can_start_now(BEN)) == (False, True)
