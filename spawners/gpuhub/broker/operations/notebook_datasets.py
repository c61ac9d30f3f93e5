"""Copies of datasets for notebooks: the spawner asks for them between the grant of a lease and the container."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuhub.broker.admission import access
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas import LeaseState, Purpose, StagingView
from gpuhub.common.errors import Conflict, NotAllowed
from gpuhub.domain.models import Identity, LeaseRow
from gpuhub.domain.reconcile import START_GRACE_S


class Report(Protocol):
    """Takes a text about the transfer."""

    def __call__(self, text: str, /) -> None: ...


class Stage(Protocol):
    """Brings copies of datasets to nodes, and returns their volumes by dataset."""

    async def __call__(
        self, datasets: Sequence[str], nodes: Sequence[str], report: Report | None = None
    ) -> dict[str, str]: ...


@dataclass(slots=True)
class _Transfer:
    task: asyncio.Task[dict[str, str]]
    message: str = ""


class LeaseStaging:
    """Transfers for granted leases of notebooks, each of which runs on while no spawner waits for it."""

    def __init__(self, core: BrokerState, stage: Stage) -> None:
        self._core = core
        self._stage = stage
        self._transfers: dict[str, _Transfer] = {}
        #: When the spawner last learned that the datasets are there, by lease; monotonic.
        self._ready: dict[str, float] = {}

    async def stage(self, caller: Identity, lease_id: str, wait_s: float) -> StagingView:
        """Bring the datasets of a granted lease to its node; return after `wait_s` seconds at the latest.

        Raises:
            NotFound: The lease does not exist, or it belongs to another user.
            NotAllowed: The caller is not the hub's spawner.
            Conflict: It is not a notebook's, or not granted.
            GpuhubError: A dataset cannot be copied.
        """
        lease = await access.find_lease(self._core, caller, lease_id)
        if not caller.any_owner:
            raise NotAllowed("only the hub's spawner copies the datasets of a notebook")
        self._core.heartbeats.record(lease_id)
        if lease.purpose is not Purpose.NOTEBOOK or lease.state is not LeaseState.GRANTED:
            raise Conflict(
                f"lease {lease_id} is {lease.state}: a notebook's datasets are copied between grant and start"
            )
        if not lease.resources.stage:
            return StagingView(is_ready=True)
        transfer = self._transfers.get(lease_id) or self._begin(lease)
        await asyncio.wait([transfer.task], timeout=wait_s)
        if not transfer.task.done():
            return StagingView(is_ready=False, message=transfer.message)
        self._transfers.pop(lease_id, None)
        self._ready[lease_id] = self._core.clock.monotonic()
        return StagingView(is_ready=True, volumes=transfer.task.result())

    def find_starting(self) -> frozenset[str]:
        """Return the granted leases whose datasets are copied now, or were a moment ago: no container exists yet.

        What ends meanwhile waits for nothing: its container could not be started any more.
        """
        since = self._core.clock.monotonic() - START_GRACE_S
        self._ready = {lease: at for lease, at in self._ready.items() if at > since}
        running = {lease for lease, transfer in self._transfers.items() if not transfer.task.done()}
        leases = self._core.ledger.snapshot.leases
        return frozenset(
            lease
            for lease in running | self._ready.keys()
            if lease in leases and leases[lease].state is LeaseState.GRANTED
        )

    async def close(self) -> None:
        """Cancel all transfers."""
        tasks = [transfer.task for transfer in self._transfers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, lease: LeaseRow) -> _Transfer:
        # Results that no spawner fetched, because the user gave up.
        self._transfers = {
            known: transfer for known, transfer in self._transfers.items() if known in self._core.ledger.snapshot.leases
        }
        transfer = _Transfer(
            task=asyncio.ensure_future(self._stage(lease.resources.stage, lease.nodes, self._set(lease)))
        )
        # The error of a transfer for which no spawner waits any more is not one of the program.
        transfer.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._transfers[lease.id] = transfer
        return transfer

    def _set(self, lease: LeaseRow) -> Report:
        def report(text: str, /) -> None:
            transfer = self._transfers.get(lease.id)
            if transfer is not None:
                transfer.message = text

        return report
