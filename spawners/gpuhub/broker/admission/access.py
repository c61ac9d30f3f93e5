"""Access of callers to leases and jobs: owners see their own, administrators and the hub's spawner see all."""

from __future__ import annotations

import asyncio

from gpuhub.broker import audit
from gpuhub.broker.state.core import BrokerState
from gpuhub.common.errors import NotFound
from gpuhub.domain.identity import Identity
from gpuhub.domain.models import JobRow, LeaseRow


async def find_lease(core: BrokerState, caller: Identity, lease_id: str) -> LeaseRow:
    """Return a lease, ended or not, from the ledger or the store.

    Raises:
        NotFound: the lease does not exist, or it belongs to another user.
    """
    lease = core.ledger.snapshot.leases.get(lease_id)
    if lease is None:
        lease = await asyncio.to_thread(core.store.get_lease, lease_id)
    if lease is not None:
        audit.note_owner(lease.owner)
    if lease is None or not (caller.sees_all or lease.owner == caller.name):
        raise NotFound(f"you have no lease {lease_id!r}")
    return lease


async def find_job(core: BrokerState, caller: Identity, job_id: str) -> JobRow:
    """Return a job, ended or not, from the ledger or the store.

    Raises:
        NotFound: the job does not exist, or it belongs to another user.
    """
    job = core.ledger.snapshot.jobs.get(job_id)
    if job is None:
        job = await asyncio.to_thread(core.store.get_job, job_id)
    if job is not None:
        audit.note_owner(job.owner)
    if job is None or not (caller.sees_all or job.owner == caller.name):
        raise NotFound(f"you have no job {job_id!r}")
    return job
