"""Operations on the limits of single users, for administrators."""

from __future__ import annotations

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker import audit
from gpuhub.broker.operations.admin import require_admin
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.views.serializers import build_user_limits
from gpuhub.broker_api.schemas.limits import COUNTED_BY_SCHEDULER, UserLimitsRequest, UserLimitsView
from gpuhub.common.errors import InvalidRequest, NotFound
from gpuhub.domain.models import Identity
from gpuhub.domain.owner_limits import OwnLimits

_WHAT = "set limits of users"


class LimitOperations:
    """What administrators may do with the limits of single users."""

    def __init__(self, core: BrokerState, backend: SchedulingBackend) -> None:
        self._core = core
        self._backend = backend

    def list_limits(self, caller: Identity) -> list[UserLimitsView]:
        """Return all limits that were set for single users, by name.

        Raises:
            NotAllowed: the caller is not an administrator.
        """
        require_admin(caller, "see limits of users")
        return [build_user_limits(limits) for _, limits in sorted(self._core.scheduler_sync.own_limits.items())]

    async def set_limits(self, caller: Identity, owner: str, request: UserLimitsRequest) -> UserLimitsView:
        """Set a user's limits in place of those of cluster.toml; what the user has already stays.

        Raises:
            NotAllowed: the caller is not an administrator.
            InvalidRequest: another scheduler enforces one of the limits.
        """
        audit.note_owner(owner)
        require_admin(caller, _WHAT)
        refused = sorted(COUNTED_BY_SCHEDULER & request.values.keys())
        if refused and self._backend.capabilities.external_jobs:
            raise InvalidRequest(
                f"{self._backend.title} counts GPUs and GPU-hours, also of jobs from outside gpuhub: set "
                f"{' and '.join(refused)} of {owner} there"
            )
        limits = OwnLimits(owner=owner, **request.model_dump(), by=caller.name, at=self._core.clock.now())
        await self._core.scheduler_sync.set_own_limits(owner, limits)
        values = ", ".join(f"{name} {value:g}" for name, value in request.values.items())
        reason = f": {request.reason}" if request.reason else ""
        self._core.add_event("user.limited", f"limits of {owner}, by {caller.name}: {values}{reason}", owner=owner)
        return build_user_limits(limits)

    async def clear_limits(self, caller: Identity, owner: str) -> None:
        """Give a user the limits of cluster.toml back.

        Raises:
            NotAllowed: the caller is not an administrator.
            NotFound: the user has no limits of their own.
        """
        audit.note_owner(owner)
        require_admin(caller, _WHAT)
        if owner not in self._core.scheduler_sync.own_limits:
            raise NotFound(f"{owner} has no limits of their own: those of cluster.toml count")
        await self._core.scheduler_sync.set_own_limits(owner, None)
        self._core.add_event(
            "user.unlimited", f"limits of {owner} are those of cluster.toml again, by {caller.name}", owner=owner
        )
