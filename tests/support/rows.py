"""Rows of the broker, built with what a test does not care about."""

from __future__ import annotations

from gpuhub.broker.rows import Ask, LeaseRow
from gpuhub.broker.schemas import Purpose


def lease_row(**changes: object) -> LeaseRow:
    """ada's request for a notebook, made at 100."""
    row = LeaseRow(
        id="l1",
        seq=1,
        key="k",
        owner="ada",
        purpose=Purpose.NOTEBOOK,
        subject="",
        profile="rtx5090",
        ask=Ask(),
        created_at=100.0,
        since=100.0,
    )
    return row.evolve(**changes)
