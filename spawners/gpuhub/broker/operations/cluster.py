"""Operations that show the cluster as a whole: nodes, usage, events and reservations."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.views import views
from gpuhub.broker.views.views import ClusterViewCache
from gpuhub.broker_api.schemas import EventView, NodeView, ReservationView, UsageView
from gpuhub.common.errors import NotAllowed
from gpuhub.domain import reservations as reservation_rules
from gpuhub.domain.models import Identity


class ClusterOperations:
    """What callers may see of the cluster."""

    def __init__(self, core: BrokerState, backend: SchedulingBackend) -> None:
        self._core = core
        self._backend = backend
        self._views = ClusterViewCache(core, backend)

    def nodes(self, caller: Identity) -> tuple[NodeView, ...]:
        """Return all nodes with their GPUs."""
        return views.view_nodes(self._core, self._backend, caller)

    def cluster_json(self, caller: Identity, groups: Collection[str] = ()) -> bytes:
        """Return the whole cluster as JSON, which may be some moments old in a large cluster.

        Args:
            groups: The groups of the user for whom a service asks.

        Raises:
            NotAllowed: Groups were named by a caller who cannot ask for other users.
        """
        if groups and not caller.any_owner:
            raise NotAllowed(f"{caller.name} may not set the groups of a user")
        return self._views.render(replace(caller, groups=frozenset(groups)) if groups else caller)

    def shared_cluster_json(self, caller: Identity) -> bytes:
        """Return the whole cluster as JSON, as all users in the caller's groups see it."""
        return self._views.render_shared(caller)

    async def usage(self, caller: Identity, owner: str | None) -> list[UsageView]:
        """Return usage and limits: the caller's own, or those of `owner` or all owners for an administrator.

        Raises:
            NotAllowed: the owner is another user, and the caller is not an administrator.
        """
        usage = views.view_usage(self._core, caller, owner)
        return await self._backend.count_usage(usage, is_everybody=owner is None and caller.sees_all)

    async def events(self, caller: Identity, after: int | None, limit: int) -> Iterator[EventView]:
        """Return events, oldest first: those about the caller, or all for an administrator."""
        rows = await self._core.read_events(after, limit, None if caller.sees_all else caller.name)
        return (views.view_event(row) for row in rows)

    def reservations(self) -> list[ReservationView]:
        """Return reservations that have not ended."""
        return [reservation_rules.build_reservation_view(row) for row in self._core.capacity.current_reservations]
