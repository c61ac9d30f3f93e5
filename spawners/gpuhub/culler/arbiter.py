"""The arbiter of jupyterhub-idle-culler: which server to stop is the broker's decision alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from gpuhub.common.errors import GpuhubError

log = logging.getLogger(__name__)


class ReclaimClient(Protocol):
    """The part of the broker's client that the arbiter uses."""

    async def reclaim(self, owner: str, server: str) -> bool:
        """Return whether the culler should stop a notebook now."""
        ...


class Arbiter:
    """Answers the culler's question about each server."""

    def __init__(self, broker: ReclaimClient) -> None:
        self._broker = broker

    async def decide(self, *, server: Mapping[str, Any], **_times: object) -> bool:
        """Return whether the culler should stop the server; never while the broker does not answer.

        The times that the culler measures are not used: a browser tab that is open counts as activity for the hub.

        Args:
            server: The hub's model of the server, such as `{"full_name": "ada/second", "name": "second", …}`.
        """
        owner = str(server["full_name"]).partition("/")[0]
        try:
            return await self._broker.reclaim(owner, str(server["name"]))
        except GpuhubError as error:
            log.warning("%s is asked about again: %s", server["full_name"], error)
            return False
