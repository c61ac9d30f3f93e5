"""Sends one message to one destination, in a process of its own with few rights and a time limit."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuhub.common.errors import InvalidRequest
from gpuhub.notifications.services import check_url

log = logging.getLogger(__name__)

#: Time limit of one message with the start of its process, seconds.
SEND_TIMEOUT_S = 30.0
#: Time limit of a check that sends nothing, while a user waits, seconds.
CHECK_TIMEOUT_S = 8.0
_MAX_OUTPUT = 65536
#: Variables that the process gets; not proxies, which would connect in its place.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "TZ")


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OutgoingMessage(_Wire):
    """Title and text of a message."""

    title: str
    body: str


class SendOrder(_Wire):
    """What the process should do."""

    url: Annotated[str, Field(repr=False)]
    #: Private addresses that are permitted, as in cluster.toml; None permits all.
    allowed: tuple[str, ...] | None
    #: None: only check the URL.
    message: OutgoingMessage | None = None


class SendResult(_Wire):
    """What became of an order."""

    #: `sent`: the destination accepted it. `failed`: it did not, this time. `refused`, `invalid`: it never will.
    outcome: Literal["sent", "failed", "refused", "invalid"]
    #: Why not, for people, without anything of the URL but its host.
    reason: str = ""


async def send(order: SendOrder) -> SendResult:
    """Carry out an order, or return why not; the process has ended when this returns or is cancelled."""
    timeout_s = CHECK_TIMEOUT_S if order.message is None else SEND_TIMEOUT_S
    try:
        check_url(order.url, None)
    except InvalidRequest as error:
        return SendResult(outcome="invalid", reason=str(error))
    schema = order.url.partition("://")[0].lower()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "gpuhub.notifications.sender_main", schema, str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=_build_environment(_ENVIRONMENT),
        cwd="/",
        limit=_MAX_OUTPUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate(order.model_dump_json().encode())
    except TimeoutError:
        return SendResult(outcome="failed", reason=f"the destination did not answer within {timeout_s:.0f} s")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return SendResult.model_validate_json(output[:_MAX_OUTPUT])
    except ValidationError:
        # Its errors may quote the URL, so they are dropped.
        log.warning("the process that sends notifications ended with status %s", process.returncode)
        return SendResult(
            outcome="failed", reason="the message could not be sent; the administrator finds more in the log"
        )


def _build_environment(kept: Sequence[str]) -> dict[str, str]:
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return {**environment, "HOME": "/nonexistent", "LANG": "C.UTF-8"}
