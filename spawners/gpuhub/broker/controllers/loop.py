"""One step of a controller's loop, whose failure must not end the loop."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from gpuhub.common.errors import GpuhubError

log = logging.getLogger(__name__)


async def run_step(subject: str, step: Callable[[], Awaitable[None]]) -> None:
    """Run one step of a loop and log its failure, with the subject, so that the loop continues."""
    try:
        await step()
    except GpuhubError as error:
        log.warning("%s: %s", subject, error)
    except Exception:
        log.exception("%s: unexpected failure", subject)
