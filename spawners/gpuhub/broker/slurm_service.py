"""What the broker does for its callers where Slurm decides: the same, but Slurm is asked, or is who is to be told."""

from __future__ import annotations

from functools import partial

from gpuhub.broker import administration, extensions, leases, slurm_rules
from gpuhub.broker.auth import Identity
from gpuhub.broker.core import Core
from gpuhub.broker.gpu_time import GpuTimes
from gpuhub.broker.schemas import (
    Activation,
    ArrayRequest,
    CordonRequest,
    Extension,
    Job,
    JobRequest,
    Lease,
    LeaseRequest,
    NodeView,
    Purpose,
    Reservation,
    ReservationRequest,
    UsageView,
)
from gpuhub.broker.service import Broker
from gpuhub.broker.slurm_queue import SlurmQueue
from gpuhub.engines.slurm import SlurmEngine


class SlurmBroker(Broker):
    """The owner of every lease, each of which is a Slurm job."""

    def __init__(self, core: Core, engine: SlurmEngine, queue: SlurmQueue, gpu_times: GpuTimes) -> None:
        super().__init__(core, refuse=lambda lease: slurm_rules.refuse_wish(core.cluster, engine.site, lease))
        self._queue = queue
        self._gpu_times = gpu_times

    async def request_lease(self, who: Identity, request: LeaseRequest) -> Lease:
        """See `Broker.request_lease`; refused is also what Slurm cannot serve."""
        slurm_rules.refuse_notebook(self._core.cluster, request.profile)
        return await super().request_lease(who, request)

    async def request_job(self, who: Identity, request: JobRequest) -> Job:
        """See `Broker.request_job`; refused is also what Slurm cannot serve."""
        slurm_rules.refuse_job(self._core.cluster, request)
        return await super().request_job(who, request)

    async def request_array(self, who: Identity, request: ArrayRequest) -> list[Job]:
        """See `Broker.request_array`; refused is also what Slurm cannot serve."""
        slurm_rules.refuse_job(self._core.cluster, request.job)
        return await super().request_array(who, request)

    async def activate(self, who: Identity, lease_id: str, activation: Activation) -> Lease:
        """See `Broker.activate`; from here on the container is there, and the end of the Slurm job finds it.

        Raises:
            Conflict: the job has ended.
            SlurmUnreachable: nobody can tell at present.
        """
        lease = await self._looks.find_lease(who, lease_id)
        if lease.purpose is Purpose.NOTEBOOK and lease.state in leases.LIVE:
            await self._queue.refuse_ended(lease)
        return await super().activate(who, lease_id, activation)

    async def extend(self, who: Identity, lease_id: str, extension: Extension) -> Lease:
        """See `Broker.extend`; Slurm is asked first.

        Raises:
            SlurmRefused: with Slurm's word for it.
            SlurmUnreachable: nothing was changed, or nobody knows.
        """
        lease = await self._looks.find_lease(who, lease_id)
        await self._core.ledger.change(partial(extensions.check, self._core, lease_id, extension.time_limit_s))
        await self._queue.extend(lease, extension.time_limit_s)
        return await super().extend(who, lease_id, extension)

    async def usage(self, who: Identity, owner: str | None) -> list[UsageView]:
        """See `Broker.usage`; GPU-hours are Slurm's own count, where it counts them."""
        views = await super().usage(who, owner)
        return await self._gpu_times.fill(views, is_everybody=owner is None and who.sees_all)

    # -- for administrators, who say it to Slurm ------------------------------------------------------------------

    async def reserve(self, who: Identity, request: ReservationRequest) -> Reservation:
        """Refused.

        Raises:
            NotAllowed, InvalidRequest.
        """
        administration.refuse_others(who, "reserve GPUs")
        raise slurm_rules.no_reservations()

    async def cordon(self, who: Identity, node: str, request: CordonRequest) -> NodeView:
        """Refused.

        Raises:
            NotAllowed, InvalidRequest.
        """
        administration.refuse_others(who, "cordon nodes")
        raise slurm_rules.no_cordons(self._core.cluster, node)

    async def drain(self, who: Identity, node: str, request: CordonRequest) -> NodeView:
        """Refused.

        Raises:
            NotAllowed, InvalidRequest.
        """
        return await self.cordon(who, node, request)
