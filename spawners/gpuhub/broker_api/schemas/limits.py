"""Wire models of limits that administrators set for single users."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from gpuhub.broker_api.schemas.leases import UserName, WireModel

#: Limits that another scheduler enforces where there is one, because it has work from outside gpuhub as well.
COUNTED_BY_SCHEDULER = frozenset({"max_gpus", "gpu_hours_per_week"})
#: Maximum `longest_lease` that can be set, seconds.
MAX_LEASE_S = 366 * 86400
_LIMITS = ("max_gpus", "gpu_hours_per_week", "max_waiting", "max_jobs", "longest_lease_s")


class UserLimits(WireModel):
    """Limits of one user in place of those of cluster.toml, which decides where a limit is None."""

    #: GPUs at once, notebooks and jobs together; a GPU share counts as one.
    max_gpus: Annotated[int, Field(ge=1, le=100_000)] | None = None
    #: GPU-hours in any seven days.
    gpu_hours_per_week: Annotated[float, Field(gt=0, le=1e9)] | None = None
    #: Number of waiting requests.
    max_waiting: Annotated[int, Field(ge=1, le=1000)] | None = None
    #: Number of jobs that have not ended.
    max_jobs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    #: Maximum duration of a lease, extensions included, seconds.
    longest_lease_s: Annotated[float, Field(ge=60, le=MAX_LEASE_S)] | None = None
    reason: Annotated[str, StringConstraints(max_length=300)] = ""

    @property
    def values(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return self.model_dump(include=set(_LIMITS), exclude_none=True)


class UserLimitsRequest(UserLimits):
    """Request to set limits of a user; it replaces those that were set before."""

    @model_validator(mode="after")
    def _has_limits(self) -> Self:
        if not self.values:
            raise ValueError(f"no limit is given: one of {', '.join(_LIMITS)} is needed")
        return self


class UserLimitsView(UserLimits):
    """A user's own limits, as shown to administrators and this user."""

    owner: UserName
    #: The administrator who set them.
    by: str
    at: datetime
