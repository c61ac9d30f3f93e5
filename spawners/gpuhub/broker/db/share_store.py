"""Output shares in the store."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from gpuhub.broker.db import tables
from gpuhub.broker.db.engine import READ_ONLY, Connect
from gpuhub.domain.models import OutputShareRow

_share = tables.output_shares.c


class ShareStore:
    """The table of output shares."""

    def __init__(self, transaction: Connect) -> None:
        """`transaction` opens one of the store's, with its execution options as the argument."""
        self._transaction = transaction

    def load(self) -> list[OutputShareRow]:
        """Return all shares, the oldest first."""
        query = sa.select(tables.output_shares).order_by(_share.created_at, _share.subject, _share.viewer)
        with self._transaction(READ_ONLY) as connection:
            return [OutputShareRow(**row) for row in connection.execute(query).mappings()]

    def put(self, row: OutputShareRow) -> None:
        """Add a share, or replace the one of the same subject and viewer."""
        values = {column.name: getattr(row, column.name) for column in tables.output_shares.columns}
        with self._transaction() as connection:
            _delete(connection, [row])
            connection.execute(sa.insert(tables.output_shares).values(**values))

    def delete(self, rows: Iterable[OutputShareRow]) -> None:
        """Delete shares."""
        with self._transaction() as connection:
            _delete(connection, rows)


def _delete(connection: sa.Connection, rows: Iterable[OutputShareRow]) -> None:
    for row in rows:
        connection.execute(
            sa.delete(tables.output_shares).where(_share.subject == row.subject, _share.viewer == row.viewer)
        )
