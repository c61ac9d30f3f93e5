"""Operations on the power of nodes, for administrators."""

from __future__ import annotations

from typing import Protocol

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker.operations.admin import require_admin, require_node
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.views.views import view_node
from gpuhub.broker_api.schemas import NodeView, PowerRequest
from gpuhub.common.errors import InvalidRequest
from gpuhub.domain.models import Identity


class PowerSwitch(Protocol):
    """Wakes nodes and puts them to sleep, as the power controller does."""

    async def wake(self, node: str, by: str) -> None:
        """Wake a node."""
        ...

    async def put_to_sleep(self, node: str, by: str) -> None:
        """Put a node to sleep that nothing uses."""
        ...


class PowerOperations:
    """What administrators may do with the power of nodes."""

    def __init__(self, core: BrokerState, backend: SchedulingBackend, switch: PowerSwitch | None) -> None:
        """`switch` is None where another scheduler switches the nodes."""
        self._core = core
        self._backend = backend
        self._switch = switch

    async def switch(self, caller: Identity, node: str, request: PowerRequest) -> NodeView:
        """Wake a node, or put it to sleep; it answers, or stops answering, some time later.

        Raises:
            NotAllowed: the caller is not an administrator.
            NotFound: the node does not exist.
            InvalidRequest: cluster.toml does not say how the node is switched, or another scheduler does it.
            Conflict: it is on already, sleeps, or is used.
        """
        require_admin(caller, "switch nodes on and off")
        require_node(self._core, node)
        if self._switch is None:
            raise InvalidRequest(
                f"{self._backend.title} switches its nodes itself: `scontrol update NodeName={node} "
                f"State={'POWER_UP' if request.on else 'POWER_DOWN'}`"
            )
        if node not in self._core.capacity.power:
            raise InvalidRequest(f"node {node} stays on: cluster.toml has no power for it")
        await (self._switch.wake if request.on else self._switch.put_to_sleep)(node, caller.name)
        return view_node(self._core, self._backend, node)
