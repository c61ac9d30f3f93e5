"""Wire models of output shares: read-only views of a job's output, or of a saved notebook, for another user."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from gpuhub.broker_api.schemas.leases import WireModel

#: Maximum duration of a share, seconds.
MAX_SHARE_S = 90 * 86400
#: Default duration of a share, seconds.
USUAL_SHARE_S = 7 * 86400


class ShareRequest(WireModel):
    """Request to share a job's output."""

    #: Time until the share ends, seconds; at least a minute, at most 90 days.
    for_s: Annotated[int, Field(ge=60, le=MAX_SHARE_S)] = USUAL_SHARE_S


class NotebookShareRequest(ShareRequest):
    """Request to share a saved notebook."""

    #: The notebook's, below the home, such as `work/train.ipynb`.
    path: Annotated[str, Field(min_length=1, max_length=1024)]


class OutputShareView(WireModel):
    """A share, as its owner and its viewer see it."""

    #: Id of the job or notebook, equal in all its shares.
    id: str
    #: The job's id and run; empty for a notebook.
    job: str
    run_id: str
    #: Path of the notebook below the home, for its owner; empty for a job.
    notebook: str = ""
    #: Name of the job, which may be empty, or of the notebook's file.
    name: str
    owner: str
    viewer: str
    created_at: datetime
    expires_at: datetime
    #: The page of the hub that shows the job or notebook, below the hub's address.
    path: str


class SharedNotebookView(WireModel):
    """A saved notebook, as shown to a user with whom it is shared."""

    id: str
    #: Name of the notebook file.
    name: str
    owner: str
    saved_at: datetime
    #: Bytes of the file.
    size: int
    #: When the share ends; None for the owner.
    expires_at: datetime | None
