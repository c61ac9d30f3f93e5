"""The tables of the broker's database. A change needs a migration in `migrations/versions`."""

from __future__ import annotations

from gpuhub.broker.db.tables.leases import gpu_modes, held_gpus, jobs, lease_gpus, leases, output_shares, workers
from gpuhub.broker.db.tables.metadata import metadata
from gpuhub.broker.db.tables.nodes import cordons, gpu_faults, gpu_records, gpus, node_power, reservations
from gpuhub.broker.db.tables.notifications import deliveries, destinations, events, notifications
from gpuhub.broker.db.tables.usage import cost_days, cost_records, lease_ends, usage_days, user_limits

__all__ = [
    "cordons",
    "cost_days",
    "cost_records",
    "deliveries",
    "destinations",
    "events",
    "gpu_faults",
    "gpu_modes",
    "gpu_records",
    "gpus",
    "held_gpus",
    "jobs",
    "lease_ends",
    "lease_gpus",
    "leases",
    "metadata",
    "node_power",
    "notifications",
    "output_shares",
    "reservations",
    "usage_days",
    "user_limits",
    "workers",
]
