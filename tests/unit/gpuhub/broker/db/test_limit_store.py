"""Limits of single users in the store."""

from __future__ import annotations

from pathlib import Path

from gpuhub.broker.db.store import Store
from gpuhub.domain.owner_limits import OwnLimits


def test_own_limits_are_stored_replaced_and_deleted(tmp_path: Path) -> None:
    """One row for each user, which survives a restart."""
    first = OwnLimits(owner="ada", max_gpus=2, longest_lease_s=3600.0, reason="paper", by="root", at=1.5)
    second = OwnLimits(owner="ada", gpu_hours_per_week=7.5, max_waiting=3, max_jobs=9, by="eve", at=2.0)
    ben = OwnLimits(owner="ben", max_gpus=1, by="root", at=3.0)
    store = Store.open_file(tmp_path / "broker.sqlite")
    for limits in (first, ben, second):
        store.limits.save(limits.owner, limits)
    store.close()
    store = Store.open_file(tmp_path / "broker.sqlite")
    assert store.limits.load() == {"ada": second, "ben": ben}
    store.limits.save("ada", None)
    store.limits.save("ada", None)
    assert store.limits.load() == {"ben": ben}
    store.close()
