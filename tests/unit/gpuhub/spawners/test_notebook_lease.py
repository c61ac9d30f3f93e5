"""What the hub's spawner does between a lease's grant and its container."""

from __future__ import annotations

from gpuhub.broker_api.schemas import LeaseRequest
from gpuhub.spawners.notebook_lease import stage_datasets
from tests.support.docker.simulated_nodes import build_cluster
from tests.support.hub.fake_broker import FakeBroker


async def test_spawner_reports_the_copy_until_it_is_there() -> None:
    """The user sees what is copied; the volumes are those of the broker."""
    broker = FakeBroker(build_cluster())
    broker.staged = {"datasets/digits": "copy-1"}
    lease = await broker.request_lease(LeaseRequest(profile="cpu", key="k", owner="ada"))
    texts: list[str] = []
    assert await stage_datasets(broker, lease, texts.append) == {"datasets/digits": "copy-1"}
    assert texts == ["Copying datasets/digits to rig1: 1 KiB of 2 KiB"]
