"""Loops of the controllers, which must outlive every failure: their steps, their restart and their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gpuhub.common.errors import GpuhubError

log = logging.getLogger(__name__)

_STOP_TRIES = 3
_RESTART_S = 1.0


async def keep_running(subject: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run for ever: a loop that died silently would leave GPUs held."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("%s failed unexpectedly and is started again", subject)
        await asyncio.sleep(_RESTART_S)


async def run_step(subject: str, step: Callable[[], Awaitable[None]]) -> None:
    """Run one step of a loop and log its failure, with the subject, so that the loop continues."""
    try:
        await step()
    except GpuhubError as error:
        log.warning("%s: %s", subject, error)
    except Exception:
        log.exception("%s: unexpected failure", subject)


async def stop(loops: list[asyncio.Task[None]]) -> None:
    """Cancel loops; again where the cancellation got lost on its way, as in wait_for before Python 3.12."""
    for _ in range(_STOP_TRIES):
        for loop in loops:
            loop.cancel()
        _, alive = await asyncio.wait(loops, timeout=1)
        if not alive:
            return
    log.warning("a loop of the broker does not stop; the broker ends without it")
