"""When the queue is served although nothing has happened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpuhub.broker.state import scheduler_sync
from tests.support.broker.calls import ask, delete
from tests.support.broker.in_process import Setting, asgi_broker, until


async def test_requests_that_wait_are_decided_on_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usage decays, and with it their order changes; without waiting requests nothing is decided in vain."""
    monkeypatch.setattr(scheduler_sync, "ORDER_PERIOD_S", 0.1)
    setting = Setting(tmp_path)
    async with asgi_broker(setting) as running:
        for node in setting.nodes.values():
            node.is_silent = True
        count = 0
        decide = running.core.scheduler.decide

        def counting(now: float) -> object:
            nonlocal count
            count += 1
            return decide(now)

        monkeypatch.setattr(running.core.scheduler, "decide", counting)
        await ask(running, "ada")
        waiting = await ask(running, "ben")
        assert waiting["state"] == "requested"
        before = count

        async def is_repeated() -> bool:
            return count > before + 3

        await until(is_repeated, "the queue is served again")
        await delete(running, "ben", f"/leases/{waiting['id']}")
        await asyncio.sleep(0.3)
        before = count
        await asyncio.sleep(0.5)
        assert count == before
