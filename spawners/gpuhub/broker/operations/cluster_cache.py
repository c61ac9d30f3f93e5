"""A cache of the cluster view as JSON, shared by all callers who see the same.

The view is expensive to build, and in a large cluster many clients request it all the time. There, a cached view is
served for a few times as long as it took to build; in a small cluster every change is visible at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker.operations import views
from gpuhub.broker.operations.cluster_view import MAX_STARTS_SHOWN
from gpuhub.broker.state.core import BrokerState
from gpuhub.domain.identity import Identity
from gpuhub.scheduler.interface import Quota

#: Maximum age of a view, since times and readings in it change, seconds.
MAX_AGE_S = 1.0
#: A view that is built faster than this is rebuilt at every change, seconds.
FAST_BUILD_S = 0.01
#: Maximum age of another view after a change, as a multiple of the time that it took to build.
AGE_PER_BUILD_TIME = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedView:
    text: bytes
    #: Objects that it was built from, which are replaced at every change, never edited.
    inputs: tuple[object, ...]
    #: When it was built; monotonic.
    built_at: float
    #: Processor time to build it, so that other load on the machine does not count; seconds.
    build_s: float


class ClusterViewCache:
    """Keeps the last view that was built for all users."""

    def __init__(self, core: BrokerState, backend: SchedulingBackend) -> None:
        self._core = core
        self._backend = backend
        self._built: _CachedView | None = None

    def render(self, caller: Identity) -> bytes:
        """Return the cluster as JSON, as shown to the caller."""
        if not self._sees_common_view(caller):
            return self._build(caller)
        core, now = self._core, self._core.clock.monotonic()
        inputs = (core.ledger.snapshot, core.capacity.inventory, core.capacity.cordons, core.capacity.reservations)
        built = self._built
        if built is None or not self._is_current(built, inputs, now):
            began = time.thread_time()
            text = self._build(None)
            built = _CachedView(text=text, inputs=inputs, built_at=now, build_s=time.thread_time() - began)
            self._built = built
        return built.text

    def _sees_common_view(self, caller: Identity) -> bool:
        """Return whether the caller sees the same as all users, without own limits, reservations or positions."""
        core = self._core
        if core.capacity.current_reservations or (
            caller.is_user and _is_limited(core.scheduler_sync.get_quota(caller.name))
        ):
            return False
        index = core.ledger.index
        return len(index.find("waiting")) <= MAX_STARTS_SHOWN or not index.find("waiting of", caller.name)

    def _is_current(self, built: _CachedView, inputs: tuple[object, ...], now: float) -> bool:
        age_s = now - built.built_at
        if all(old is new for old, new in zip(built.inputs, inputs, strict=True)):
            return age_s <= MAX_AGE_S
        # Cordons and reservations are decisions of administrators, who should see them at once.
        is_decided = any(old is not new for old, new in zip(built.inputs[2:], inputs[2:], strict=True))
        return not is_decided and built.build_s > FAST_BUILD_S and age_s <= AGE_PER_BUILD_TIME * built.build_s

    def _build(self, caller: Identity | None) -> bytes:
        # With thousands of GPUs, pydantic's own JSON takes a tenth of the time of json.dumps.
        return views.view_cluster(self._core, self._backend, caller).model_dump_json().encode()


def _is_limited(rights: Quota) -> bool:
    """Return whether limits may decide if a request of this user would start at once."""
    limits = (rights.per_user, *rights.per_group.values())
    return any(limit.max_gpus is not None or limit.gpu_hours_per_week is not None for limit in limits)
