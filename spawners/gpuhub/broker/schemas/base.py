"""What all wire values are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gpuhub import names

Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")]
RunId = Annotated[str, StringConstraints(pattern=f"^{names.RUN_PATTERN}$")]
ServerName = Annotated[str, StringConstraints(pattern=f"^({names.SERVER_PATTERN})?$")]
UserName = Annotated[str, StringConstraints(pattern=f"^{names.USERNAME_PATTERN}$")]
GroupName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Model = Annotated[str, StringConstraints(min_length=1, max_length=64)]
#: Seconds; a year at most.
TimeLimit = Annotated[int, Field(ge=60, le=366 * 86400)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=300)]


class Wire(BaseModel):
    """Base of every wire value."""

    model_config = ConfigDict(frozen=True, extra="forbid")
