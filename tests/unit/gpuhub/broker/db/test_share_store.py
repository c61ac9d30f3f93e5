"""Output shares in the store."""

from __future__ import annotations

from pathlib import Path

from gpuhub.broker.db.store import Store
from gpuhub.domain.models import OutputShareRow

SHARE = OutputShareRow(
    subject="j1", viewer="ben", owner="ada", run_id="run-000001", name="train.py", created_at=1.0, expires_at=9.5
)


def test_shares_are_stored_replaced_and_deleted(tmp_path: Path) -> None:
    """One for each job and viewer, the oldest first; they survive a restart."""
    later = OutputShareRow(
        subject="j1", viewer="eve", owner="ada", run_id="run-000001", name="", created_at=2.0, expires_at=3.0
    )
    extended = OutputShareRow(
        subject="j1", viewer="ben", owner="ada", run_id="run-000001", name="train.py", created_at=4.0, expires_at=20.0
    )
    store = Store.open_file(tmp_path / "broker.sqlite")
    store.shares.put(later)
    store.shares.put(SHARE)
    assert store.shares.load() == [SHARE, later]
    store.shares.put(extended)
    store.close()
    store = Store.open_file(tmp_path / "broker.sqlite")
    assert store.shares.load() == [later, extended]
    store.shares.delete([later])
    store.shares.delete([later])
    assert store.shares.load() == [extended]
    store.close()
