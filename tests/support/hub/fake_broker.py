"""A broker in memory for the hub's side: first come, first served, one GPU a profile."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from gpuhub.backends.plugin import find_capabilities
from gpuhub.broker_api.schemas import (
    ClusterView,
    GpuState,
    GpuView,
    HolderView,
    LeasedGpuView,
    LeaseRequest,
    LeaseState,
    LeaseView,
    NodeState,
    NodeView,
    ProfileView,
    Purpose,
    QueueEntry,
    StagingView,
)
from gpuhub.common.errors import NotFound
from gpuhub.config.settings import ClusterSettings

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
LIVE = (LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.RELEASING)


class FakeBroker:
    """Keeps leases; grants a GPU of the profile's model when one is free."""

    def __init__(self, cluster: ClusterSettings, uuids: dict[str, list[str]] | None = None) -> None:
        self._cluster = cluster
        self._changed = asyncio.Condition()
        self.known: dict[str, LeaseView] = {}
        self.requests: list[LeaseRequest] = []
        self.staged: dict[str, str] = {}
        self.is_stage_polled = False
        self.gpus = [
            LeasedGpuView(
                uuid=uuids[node.name][0] if uuids else f"GPU-{node.name}",
                node=node.name,
                index=0,
                model=card.model,
                memory_mib=card.memory // 1024**2,
            )
            for node in cluster.nodes
            for card in node.gpus or ()
        ]

    async def request_lease(self, request: LeaseRequest) -> LeaseView:
        """Request a lease."""
        self.requests.append(request)
        lease = LeaseView(
            id=f"lease-{len(self.known) + 1}",
            owner=request.owner or "nobody",
            purpose=Purpose.NOTEBOOK,
            subject=request.server,
            profile=request.profile,
            persistent=request.persistent,
            state=LeaseState.REQUESTED,
            version=1,
            position=None,
            waiting_for=None,
            nodes=(),
            gpus=(),
            epoch=0,
            created_at=NOW,
            granted_at=None,
            expires_at=None,
            reason=None,
        )
        self.known[lease.id] = lease
        await self._settle()
        return self.known[lease.id]

    async def leases(self) -> Sequence[LeaseView]:
        """Return leases that have not ended."""
        return [lease for lease in self.known.values() if lease.state is not LeaseState.RELEASED]

    async def get_lease(self, lease_id: str, *, wait_s: float = 0, version: int | None = None) -> LeaseView:
        """Return one lease as soon as its version differs."""
        if lease_id not in self.known:
            raise NotFound(f"there is no lease {lease_id}")
        if wait_s and version is not None:
            async with self._changed:
                try:
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait_for(lambda: self.known[lease_id].version != version)
                except TimeoutError:
                    pass
        return self.known[lease_id]

    async def activate(self, lease_id: str, container_id: str) -> LeaseView:
        """Change the lease from granted to active."""
        return await self._change(lease_id, state=LeaseState.ACTIVE)

    async def stage(self, lease_id: str, *, wait_s: float = 0) -> StagingView:
        """Return the volumes of `staged`, as after a transfer; before, one text of progress."""
        if not self.is_stage_polled:
            self.is_stage_polled = True
            return StagingView(is_ready=False, message="Copying datasets/digits to rig1: 1 KiB of 2 KiB")
        return StagingView(is_ready=True, volumes=self.staged)

    async def release(self, lease_id: str) -> LeaseView:
        """End the lease at once."""
        if lease_id not in self.known:
            raise NotFound(f"there is no lease {lease_id}")
        return await self._change(
            lease_id, state=LeaseState.RELEASED, position=None, waiting_for=None, reason="It was given back."
        )

    async def cluster(self, groups: Collection[str] = ()) -> ClusterView:
        """Return the state of the whole cluster."""
        holders = {gpu.uuid: lease for lease in self.known.values() if lease.state in LIVE for gpu in lease.gpus}
        waiting = self._waiting()
        return ClusterView(
            nodes=tuple(self._node(node.name, holders) for node in self._cluster.nodes),
            profiles=tuple(self._profile(profile.name, holders) for profile in self._cluster.profiles),
            queue=tuple(
                QueueEntry(
                    lease=lease.id,
                    position=place,
                    owner=lease.owner,
                    purpose=Purpose.NOTEBOOK,
                    wants=f"profile {lease.profile}",
                    since=NOW,
                )
                for place, lease in enumerate(waiting, 1)
            ),
            engine=self._cluster.engine,
            capabilities=find_capabilities(self._cluster),
            waiting=len(waiting),
            now=NOW,
        )

    def _waiting(self) -> list[LeaseView]:
        return [lease for lease in self.known.values() if lease.state is LeaseState.REQUESTED]

    def _node(self, name: str, holders: dict[str, LeaseView]) -> NodeView:
        views = tuple(
            GpuView(
                **gpu.model_dump(exclude={"memory_cap_mib"}),
                state=GpuState.HELD if gpu.uuid in holders else GpuState.FREE,
                holder=self._holder(holders[gpu.uuid]) if gpu.uuid in holders else None,
                holders=(self._holder(holders[gpu.uuid]),) if gpu.uuid in holders else (),
                utilisation_percent=None,
                memory_used_mib=None,
            )
            for gpu in self.gpus
            if gpu.node == name
        )
        return NodeView(name=name, state=NodeState.UP, message=None, gpus=views)

    def _profile(self, name: str, holders: dict[str, LeaseView]) -> ProfileView:
        profile = self._cluster.profile(name)
        assert profile is not None
        fitting = [gpu for gpu in self.gpus if gpu.model == profile.gpu_model]
        free = [gpu for gpu in fitting if gpu.uuid not in holders]
        ahead = sum(lease.profile == name for lease in self._waiting())
        return ProfileView(
            name=name,
            title=profile.title,
            description=profile.description,
            gpu_count=profile.gpu_count,
            total=len(fitting),
            free=len(free),
            starts_now=not profile.gpu_count or bool(free),
            ahead=ahead,
            holders=tuple(self._holder(holders[gpu.uuid]) for gpu in fitting if gpu.uuid in holders),
        )

    def _holder(self, lease: LeaseView) -> HolderView:
        return HolderView(owner=lease.owner, purpose=Purpose.NOTEBOOK, since=lease.granted_at or NOW, until=None)

    async def _change(self, lease_id: str, **changes: object) -> LeaseView:
        old = self.known[lease_id]
        self.known[lease_id] = old.model_copy(update={**changes, "version": old.version + 1})
        await self._settle()
        return self.known[lease_id]

    async def _settle(self) -> None:
        """Grant requests in order, as far as GPUs are free, and give the others a reason to wait."""
        for lease in self._waiting():
            profile = self._cluster.profile(lease.profile or "")
            assert profile is not None
            held = {gpu.uuid for other in self.known.values() if other.state in LIVE for gpu in other.gpus}
            free = [gpu for gpu in self.gpus if gpu.model == profile.gpu_model and gpu.uuid not in held]
            if profile.gpu_count and not free:
                place = self._waiting().index(lease) + 1
                changes: dict[str, object] = {"position": place, "waiting_for": f"{lease.profile} is held."}
            else:
                chosen = tuple(free[: profile.gpu_count])
                node = chosen[0].node if chosen else self._cluster.nodes[0].name
                changes = {
                    "state": LeaseState.GRANTED,
                    "gpus": chosen,
                    "nodes": (node,),
                    "granted_at": NOW,
                    "position": None,
                    "waiting_for": None,
                    "epoch": lease.epoch + 1,
                }
            self.known[lease.id] = lease.model_copy(update={**changes, "version": lease.version + 1})
        async with self._changed:
            self._changed.notify_all()
