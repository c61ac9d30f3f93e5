"""What a waiting user holds already, for the page of a start."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuhub.broker_api.schemas import LeasedGpuView, LeaseState, LeaseView, NodeState, NodeView, Purpose
from gpuhub.broker_api.schemas.bench import NodeBenchView
from gpuhub.config.settings import ProfileSettings
from gpuhub.spawners.base import LeasedSpawner
from gpuhub.spawners.progress_log import ProgressLog
from gpuhub.web.text import describe_holdings, describe_node

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def lease(subject: str, model: str = "RTX 5090", **changes: Any) -> LeaseView:
    """Return an active lease of ada's notebook with one GPU."""
    gpu = LeasedGpuView(uuid="GPU-1", node="rig1", index=0, model=model, memory_mib=32_607)
    values = {
        "id": f"l-{subject}", "owner": "ada", "purpose": Purpose.NOTEBOOK, "subject": subject, "profile": None,
        "state": LeaseState.ACTIVE, "version": 1, "position": None, "waiting_for": None, "nodes": ("rig1",),
        "gpus": (gpu,) if model else (), "epoch": 1, "created_at": NOW, "granted_at": NOW, "expires_at": None,
        "reason": None,
    }  # fmt: skip
    return LeaseView.model_validate(values | changes)


WAITING = lease("", model="", state=LeaseState.REQUESTED)


def test_own_notebooks_and_jobs_are_named_with_what_ends_them() -> None:
    """Not other users', what ends, what waits, and GPUs that the profile cannot use."""
    leases = [WAITING, lease("second"), lease("third", model="RTX 5070"), lease("x", owner="ben"),
              lease("y", state=LeaseState.RELEASING), lease("j1", purpose=Purpose.JOB), lease("cpu", model="")]  # fmt: skip
    assert describe_holdings(leases, WAITING, ("RTX 5090",)) == (
        "You hold GPUs yourself that this notebook could use: notebook 'second' (rig1: RTX 5090); a job (rig1: RTX 5090). "
        "The Home page stops notebooks. %gpu_status in a notebook and `gpu-launch ps` list jobs; %gpu_cancel and "
        "`gpu-launch cancel` end them."
    )
    assert "notebook 'third' (rig1: RTX 5070)" in describe_holdings(leases, WAITING, ())
    assert describe_holdings(leases[3:5], WAITING, ()) == ""
    assert "your default notebook" in describe_holdings([lease("")], WAITING, ())


@pytest.mark.parametrize(
    ("gpu_count", "state", "count"),
    [(1, LeaseState.REQUESTED, 1), (0, LeaseState.REQUESTED, 0), (1, LeaseState.GRANTED, 0)],
)
async def test_start_that_waits_reports_them(gpu_count: int, state: LeaseState, count: int) -> None:
    """Before its place in the queue; a start that does not wait reports nothing."""

    async def leases() -> list[LeaseView]:
        return [lease("second")]

    log = ProgressLog()
    spawner = SimpleNamespace(broker=SimpleNamespace(leases=leases), _progress_log=log)
    profile = ProfileSettings(name="gpu", title="GPU", gpu_count=gpu_count)
    waiting = lease("", model="", state=state)
    await LeasedSpawner._report_holdings(cast("LeasedSpawner", spawner), waiting, profile)
    log.close()
    assert ["notebook 'second'" in event["message"] for event in [event async for event in log.follow()]] == [
        True
    ] * count


@pytest.mark.parametrize(
    ("link_bytes_s", "text"),
    [
        (None, "driver 570.86.15 · measured 61.2 TFLOP/s"),
        ((2.9e8, 2.9e8), "driver 570.86.15 · measured 61.2 TFLOP/s, 2.32 Gbit/s with another node"),
        ((1.2e8, 2.9e8), "driver 570.86.15 · measured 61.2 TFLOP/s, 960 Mbit/s to 2.32 Gbit/s with another node"),
    ],
)
def test_node_is_described_with_what_was_measured(link_bytes_s: tuple[float, float] | None, text: str) -> None:
    """The slowest and the fastest connection, if they differ."""
    bench = NodeBenchView(
        measured_at="2026-11-28 10:15", device="RTX 5090", flops=6.12e13, read_bytes_s=1e8, link_bytes_s=link_bytes_s
    )
    node = NodeView(name="rig1", state=NodeState.UP, message=None, gpus=(), driver="570.86.15", bench=bench)
    assert describe_node(node) == text
