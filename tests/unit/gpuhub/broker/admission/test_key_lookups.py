"""Lookups by key that come together, and that fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuhub.broker.admission.key_lookups import KeyLookups
from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker_api.schemas import Purpose
from gpuhub.common.errors import Unavailable
from gpuhub.domain.models import LeaseRow, ResourceRequest


class HeldStore(Store):
    """A store whose lookups wait for `gate`, fail with `error`, and are counted."""

    gate: threading.Event
    error: Exception | None = None
    lookups: list[int]

    def find_leases_by_key(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], LeaseRow]:
        self.lookups.append(len(keys))
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return super().find_leases_by_key(keys)


@pytest.fixture
def store(tmp_path: Path) -> HeldStore:
    """A store with the lease of ada's key `k7`."""
    store = HeldStore.open_file(tmp_path / "b.sqlite")
    store.gate, store.lookups = threading.Event(), []
    lease = LeaseRow(
        id="l1", seq=1, key="k7", owner="ada", purpose=Purpose.NOTEBOOK, subject="", profile="p",
        resources=ResourceRequest(), created_at=1.0, since=1.0,
    )  # fmt: skip
    store.save(Changes(leases=[(None, lease)]))
    return store


async def test_lookups_that_come_together_share_a_query(store: HeldStore) -> None:
    """Six hundred lookups of two owners need two queries, and each gets its own answer."""
    lookups = KeyLookups(store)
    asked = [asyncio.ensure_future(lookups.find(owner, f"k{n}")) for n in range(300) for owner in ("ada", "ben")]
    await asyncio.sleep(0)
    asked += [asyncio.ensure_future(lookups.find("ada", "k7"))]
    asked[0].cancel()
    store.gate.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found = [number for number, answer in enumerate(answers) if isinstance(answer, LeaseRow)]
    assert found == [14, 600]
    assert sum(answer is None for answer in answers) == 598
    assert len(store.lookups) <= 2
    store.close()


async def test_failed_query_fails_its_lookups_alone(store: HeldStore) -> None:
    """Every caller of a failed query gets the error, and later ones get answers."""
    lookups = KeyLookups(store)
    store.gate.set()
    store.error = Unavailable("the disk is full")
    failed = await asyncio.gather(*(lookups.find("ada", f"k{n}") for n in range(3)), return_exceptions=True)
    assert [str(error) for error in failed] == ["the disk is full"] * 3
    store.error = None
    found = await lookups.find("ada", "k7")
    assert found is not None
    assert found.id == "l1"
    store.close()
