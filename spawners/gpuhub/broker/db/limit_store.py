"""The part of the store that keeps the limits which administrators set for single users."""

from __future__ import annotations

from dataclasses import asdict

import sqlalchemy as sa

from gpuhub.broker.db import tables, writer
from gpuhub.broker.db.engine import READ_ONLY, Connect
from gpuhub.domain.owner_limits import OwnLimits


class LimitStore:
    """Reads and writes users' own limits; `connect` opens a transaction of the store."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    def load(self) -> dict[str, OwnLimits]:
        """Return all own limits, by user."""
        with self._connect(READ_ONLY) as connection:
            rows = connection.execute(sa.select(tables.user_limits)).mappings().all()
        return {row["owner"]: OwnLimits(**row) for row in rows}

    def save(self, owner: str, limits: OwnLimits | None) -> None:
        """Replace a user's own limits; None deletes them."""
        with self._connect(None) as connection:
            connection.execute(sa.delete(tables.user_limits).where(tables.user_limits.c.owner == owner))
            writer.insert_rows(connection, tables.user_limits, [] if limits is None else [asdict(limits)])
