"""Wire models of the lab's recipes."""

from __future__ import annotations

from gpuhub.broker_api.schemas.leases import WireModel


class RecipeView(WireModel):
    """A recipe of the lab: a task file with a head, which gpu-launch reads."""

    name: str
    #: The file, which may have mistakes.
    text: str
