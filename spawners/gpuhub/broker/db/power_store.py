"""The part of the store that keeps which nodes sleep, so that a restart of the broker does not take them for broken."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from gpuhub.broker.db import tables, writer
from gpuhub.broker.db.engine import READ_ONLY, Connect
from gpuhub.nodes.power_status import PowerState, PowerStatus


class PowerStore:
    """Reads and writes the power of nodes; `connect` opens a transaction of the store."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    def load(self) -> dict[str, PowerStatus]:
        """Return the power of all nodes that may sleep, by node."""
        with self._connect(READ_ONLY) as connection:
            rows = connection.execute(sa.select(tables.node_power)).mappings().all()
        return {row["node"]: _parse(dict(row)) for row in rows}

    def save(self, power: PowerStatus) -> None:
        """Replace the power of a node."""
        with self._connect(None) as connection:
            connection.execute(sa.delete(tables.node_power).where(tables.node_power.c.node == power.node))
            record = asdict(power) | {"state": power.state.value, "wake_times_s": list(power.wake_times_s)}
            writer.insert_rows(connection, tables.node_power, [record])

    def delete_others(self, nodes: Collection[str]) -> None:
        """Delete all but these nodes."""
        with self._connect(None) as connection:
            connection.execute(sa.delete(tables.node_power).where(tables.node_power.c.node.not_in(list(nodes))))


def _parse(values: dict[str, Any]) -> PowerStatus:
    return PowerStatus(**values | {"state": PowerState(values["state"]), "wake_times_s": tuple(values["wake_times_s"])})
