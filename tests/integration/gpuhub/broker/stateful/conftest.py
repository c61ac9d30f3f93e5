"""Short waits, so that a little virtual time has the effect of hours."""

from __future__ import annotations

import pytest

from gpuhub.domain import reconcile


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the reconciler's time limits, in seconds."""
    monkeypatch.setattr(reconcile, "START_GRACE_S", 40.0)
    monkeypatch.setattr(reconcile, "CREATED_GRACE_S", 20.0)
    monkeypatch.setattr(reconcile, "HUB_GRACE_S", 10.0)
