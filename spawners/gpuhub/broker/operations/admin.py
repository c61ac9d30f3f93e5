"""Operations for administrators: cordons, drains, failed GPUs and reservations."""

from __future__ import annotations

from collections.abc import Mapping

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker.state import chains, mutations
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.state.transaction import Transaction
from gpuhub.broker.views.views import view_node
from gpuhub.broker_api.schemas import (
    CordonRequest,
    JobState,
    NodeView,
    ReservationRequest,
    ReservationView,
)
from gpuhub.common.errors import Conflict, InvalidRequest, NotAllowed, NotFound
from gpuhub.domain import lease_states
from gpuhub.domain import reservations as reservation_rules
from gpuhub.domain.models import Identity
from gpuhub.nodes.gpu_health import find_gpu_failure
from gpuhub.nodes.status import Cordon, describe_cordon


def require_admin(caller: Identity, what: str) -> None:
    """Refuse a caller who is not an administrator.

    Raises:
        NotAllowed: names the action that only administrators may do.
    """
    if not caller.is_admin:
        raise NotAllowed(f"{caller.name} is not an administrator: only administrators may {what}")


def require_node(core: BrokerState, node: str) -> None:
    """Refuse a name that no node has.

    Raises:
        NotFound: names the nodes that there are.
    """
    if node not in core.capacity.inventory.nodes:
        raise NotFound(f"there is no node {node!r}; there are: {', '.join(core.capacity.inventory.nodes)}")


class AdminOperations:
    """What administrators may do with nodes, GPUs and reservations."""

    def __init__(self, core: BrokerState, backend: SchedulingBackend) -> None:
        self._core, self._backend = core, backend

    async def cordon(self, caller: Identity, node: str, request: CordonRequest) -> NodeView:
        """Cordon a node: it takes no new work, and what runs there continues.

        Raises:
            NotAllowed: the caller is not an administrator.
            NotFound: the node does not exist.
            InvalidRequest: The backend would continue to give the node; the text says how to cordon it there.
        """
        return await self._cordon(caller, node, request, is_drain=False)

    async def drain(self, caller: Identity, node: str, request: CordonRequest) -> NodeView:
        """Drain a node: it takes no new work, and what runs there ends after the grace period.

        Raises:
            NotAllowed, NotFound, InvalidRequest: as `cordon` does.
        """
        return await self._cordon(caller, node, request, is_drain=True)

    async def undrain(self, caller: Identity, node: str) -> NodeView:
        """End a cordon or drain; leases that the drain shortened get their time limits back.

        Raises:
            NotAllowed: the caller is not an administrator.
            NotFound: the node does not exist.
        """
        require_admin(caller, "cordon nodes")
        require_node(self._core, node)
        before = self._core.capacity.cordons.get(node)
        await self._core.cordon(node, None)
        if before is not None:
            self._core.add_event("node.uncordoned", f"node {node} takes work again, by {caller.name}", node=node)
            await self._core.ledger.change(
                lambda transaction: _restore_times(transaction, node, self._core.capacity.cordons)
            )
        return view_node(self._core, self._backend, node)

    async def accept_gpu(self, caller: Identity, node: str, index: int) -> NodeView:
        """Grant a GPU with faults again, because an administrator confirms that it was reset or checked.

        Raises:
            NotAllowed: the caller is not an administrator.
            NotFound: the node or the GPU does not exist.
            Conflict: the GPU has no fault that needs it; a defect that readings show ends with a reading without it.
        """
        require_admin(caller, "accept failed GPUs")
        require_node(self._core, node)
        gpus = [gpu for gpu in self._core.capacity.inventory.nodes[node].gpus if gpu.index == index]
        if not gpus:
            raise NotFound(f"node {node} has no GPU {index}")
        if not await self._core.accept_gpu(node, gpus[0], caller.name):
            failure = find_gpu_failure(gpus[0])
            why = "is not blocked" if failure is None else f"is blocked as long as it reports a defect: {failure}"
            raise Conflict(f"GPU {index} of {node} {why}")
        self._core.add_event("gpu.accepted", f"GPU {index} of {node} is accepted again by {caller.name}", node=node)
        return view_node(self._core, self._backend, node)

    async def reserve(self, caller: Identity, request: ReservationRequest) -> ReservationView:
        """Reserve GPUs for some users in a period.

        Raises:
            NotAllowed: the caller is not an administrator.
            InvalidRequest: a node or GPU does not exist, or the period is not valid.
            Conflict: another reservation has some of the GPUs.
        """
        require_admin(caller, "reserve GPUs")
        if not self._backend.capabilities.reservations:
            raise InvalidRequest(self._backend.describe_reservation())
        row = reservation_rules.build_reservation(
            request, by=caller.name, inventory=self._core.capacity.inventory, now=self._core.clock.now()
        )
        reservation_rules.check_overlap(row, self._core.capacity.current_reservations, self._core.capacity.inventory)
        await self._core.add_reservation(row)
        self._core.add_event("reservation.made", f"reservation {row.name!r} was made by {caller.name}")
        return reservation_rules.build_reservation_view(row)

    async def cancel_reservation(self, caller: Identity, reservation_id: str) -> None:
        """Cancel a reservation.

        Raises:
            NotAllowed: the caller is not an administrator.
            NotFound: the reservation does not exist.
        """
        require_admin(caller, "cancel reservations")
        row = next((one for one in self._core.capacity.current_reservations if one.id == reservation_id), None)
        if row is None:
            raise NotFound(f"there is no reservation {reservation_id!r}")
        await self._core.remove_reservation(reservation_id)
        self._core.add_event("reservation.cancelled", f"reservation {row.name!r} was cancelled by {caller.name}")

    async def _cordon(self, caller: Identity, node: str, request: CordonRequest, *, is_drain: bool) -> NodeView:
        require_admin(caller, "cordon nodes")
        if not self._backend.capabilities.cordons:
            raise InvalidRequest(self._backend.describe_cordon(node))
        require_node(self._core, node)
        row = Cordon(
            node=node,
            state="draining" if is_drain else "cordoned",
            by=caller.name,
            reason=request.reason,
            at=self._core.clock.now(),
            grace_s=request.grace_s if is_drain else 0,
        )
        await self._core.cordon(node, row)
        self._core.add_event(f"node.{row.state}", f"node {node} is {describe_cordon(row)}", node=node)
        if is_drain:
            if request.requeue:
                await self._core.ledger.change(mutations.preempt_jobs(node, request.grace_s))
            await self._core.ledger.change(lambda transaction: _shorten_leases(transaction, row))
        return view_node(self._core, self._backend, node)


def _shorten_leases(transaction: Transaction, row: Cordon) -> None:
    for lease_id in sorted(transaction.index.find("node", row.node)):
        lease = transaction.leases[lease_id]
        job_id = transaction.index.find_one("job of lease", lease_id)
        if job_id is not None and transaction.jobs[job_id].state is JobState.PREEMPTING:
            # It has its own deadline, after which it waits again.
            continue
        transaction.put_lease(
            lease_states.shorten(lease, transaction.now + row.grace_s, f"node {row.node} is {describe_cordon(row)}")
        )


def _restore_times(transaction: Transaction, node: str, others: Mapping[str, Cordon]) -> None:
    for lease_id in sorted(transaction.index.find("node", node)):
        lease = transaction.leases[lease_id]
        if not any(name in others and others[name].is_draining for name in lease.nodes):
            transaction.put_lease(lease_states.restore_time(lease))
            job_id = transaction.index.find_one("job of lease", lease_id)
            array = None if job_id is None else transaction.jobs[job_id].array
            if array is not None:
                # The end of an auxiliary task of a job group was no drain's.
                chains.end_auxiliary(transaction, lease.owner, array)
