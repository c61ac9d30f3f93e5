"""One process of a kind for each instance."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import acquire_lock


def test_lock_has_one_holder(tmp_path: Path) -> None:
    """The second is told who holds what; it gets the lock when the first has let go."""
    file = tmp_path / "run" / "hub.lock"
    first = acquire_lock(file, "another hub runs")
    with pytest.raises(SetupError, match=r"another hub runs \(it locks .*hub\.lock\): stop it first"):
        acquire_lock(file, "another hub runs")
    os.close(first)
    os.close(acquire_lock(file, "another hub runs"))
