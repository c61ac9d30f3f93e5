"""Wire models of output shares: read-only views of a job's output for another user."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from gpuhub.broker_api.schemas.leases import WireModel

#: Longest and usual time of a share, seconds.
MAX_SHARE_S, USUAL_SHARE_S = 90 * 86400, 7 * 86400


class ShareRequest(WireModel):
    """Request to share a job's output."""

    #: Time until the share ends, seconds; at least a minute, at most 90 days.
    for_s: Annotated[int, Field(ge=60, le=MAX_SHARE_S)] = USUAL_SHARE_S


class OutputShareView(WireModel):
    """A share, as its owner and its viewer see it."""

    job: str
    run_id: str
    #: Name of the job; may be empty.
    name: str
    owner: str
    viewer: str
    created_at: datetime
    expires_at: datetime
    #: The page of the hub that shows the job, below the hub's address.
    path: str
