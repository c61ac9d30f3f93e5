"""Nodes that an administrator lets take no new work. Pure; times are seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """One node's cordon; `draining` when what runs there is being ended as well."""

    node: str
    state: Literal["cordoned", "draining"] = "cordoned"
    by: str
    reason: str = ""
    at: float
    #: For a drain: how long what runs there may go on, seconds.
    grace_s: int = 0

    @property
    def is_draining(self) -> bool:
        """Whether leases there are to end."""
        return self.state == "draining"


def describe(cordon: Cordon) -> str:
    """For a person: `cordoned by root: new fans`."""
    text = f"{cordon.state} by {cordon.by}"
    return f"{text}: {cordon.reason}" if cordon.reason else text
