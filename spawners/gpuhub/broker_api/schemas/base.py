"""Base class of the wire models, and the types that their fields share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gpuhub.common import names

#: Name or id: lower-case letters, digits and dashes, at most 64 characters.
Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")]
#: Id of a run, chosen by the client.
RunId = Annotated[str, StringConstraints(pattern=f"^{names.RUN_PATTERN}$")]
#: Name of a notebook server; empty for the default one.
ServerName = Annotated[str, StringConstraints(pattern=f"^({names.SERVER_PATTERN})?$")]
UserName = Annotated[str, StringConstraints(pattern=f"^{names.USERNAME_PATTERN}$")]
GroupName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
#: Idempotency key of a request, chosen by the client.
RequestKey = Annotated[str, StringConstraints(min_length=1, max_length=128)]
#: Name of a GPU model or node.
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
#: Time limit, seconds; at least a minute, at most 366 days.
TimeLimit = Annotated[int, Field(ge=60, le=366 * 86400)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=300)]


class WireModel(BaseModel):
    """Base of every wire model."""

    model_config = ConfigDict(frozen=True, extra="forbid")
