"""Starts that are cut off: by a user they are undone, by the end of the hub's process they are not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.app import JupyterHub

from gpuhub.ops.deploy.hub_process import GpuHub
from gpuhub.spawners import base
from gpuhub.spawners.base import LeasedSpawner


async def cancel_start(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cancel a start whose container exists already, and return what is done about that."""
    monkeypatch.setattr(base, "check_values", lambda _spawner: None)
    done: list[str] = []
    has_begun = asyncio.Event()

    async def start() -> str:
        has_begun.set()
        await asyncio.Event().wait()
        return ""

    async def undo() -> None:
        done.append("undo")

    spawner: Any = SimpleNamespace(_start=start, _undo=undo, _default_http_timeout=60, _undo_task=None)
    starting = asyncio.create_task(LeasedSpawner.start(spawner))
    await has_begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await LeasedSpawner._await_undo(spawner)
    return done


async def test_end_of_the_hub_leaves_what_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next process continues with the container, as after a crash; a user who cancels a start wants neither."""
    monkeypatch.setattr(LeasedSpawner, "is_hub_ending", False)
    assert await cancel_start(monkeypatch) == ["undo"]
    cleaned = []

    async def clean_up(_hub: object) -> None:
        cleaned.append("services")

    monkeypatch.setattr(JupyterHub, "cleanup", clean_up)
    await GpuHub.cleanup(GpuHub())
    assert cleaned == ["services"]
    assert await cancel_start(monkeypatch) == []
