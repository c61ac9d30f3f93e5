"""The request for the stacks of a run, and the answer, as files in the run's folder.

Only the owner of the home can write the request and read the answer, which the launch or the driver of the job writes.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any

from gpu_launch.common import run_folder
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.errors import LaunchFailed
from gpu_launch.output import stacks
from gpu_launch.output.stacks import RankStacks

#: Seconds to wait for an answer: the launch checks for requests every second.
ANSWER_S = 20.0
_POLL_S = 0.2  # seconds
_TOKEN = re.compile(r"[0-9a-f]{16}")
#: Uploads create the file before they write it.
_PART = re.compile(r"[0-9a-f]{0,15}")


def build_request() -> str:
    """Return the content of a new request, which its answer repeats."""
    return secrets.token_hex(8)


def pop(run: RunFolder) -> str | None:
    """Return the pending request and remove it; None if there is none, or if it is still being written."""
    try:
        with run.stacks_request.open(encoding="utf-8") as file:
            text = file.read(64).strip()
        if _PART.fullmatch(text):
            return None
        run.stacks_request.unlink()
    except (OSError, UnicodeDecodeError):
        return None
    return text if _TOKEN.fullmatch(text) else None


def answer(run: RunFolder, request: str, found: Collection[RankStacks]) -> None:
    """Write the answer to a request.

    Raises:
        OSError: The disk or the quota is full.
    """
    run_folder.write_secret_json(
        run.stacks,
        {
            "request": request,
            "text": stacks.format_stacks(found),
            "full": stacks.format_stacks(found, full=True),
            "groups": stacks.build_json(found),
        },
    )


def parse(data: bytes, request: str) -> dict[str, Any] | None:
    """Return the answer in `data`; None for one to an earlier request."""
    try:
        found: dict[str, Any] = json.loads(data)
    except ValueError:
        return None
    return found if found.get("request") == request else None


def await_answer(read: Callable[[], bytes | None], request: str, *, run_id: str, limit_s: float | None = None) -> Any:
    """Return the answer as soon as `read` returns it.

    Raises:
        LaunchFailed: There is none in time.
    """
    limit_s = ANSWER_S if limit_s is None else limit_s
    deadline = time.monotonic() + limit_s
    while True:
        data = read()
        found = None if data is None else parse(data, request)
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise LaunchFailed(
                f"{run_id} did not answer within {limit_s:.0f} s: its ranks are not running yet, or what started them "
                "is gone."
            )
        time.sleep(_POLL_S)


def ask(run: RunFolder, *, limit_s: float | None = None) -> Any:
    """Ask for the stacks of a run in the own home, and return the answer.

    Raises:
        LaunchFailed: The request cannot be written, or there is no answer in time.
    """
    request = build_request()

    def read() -> bytes | None:
        with contextlib.suppress(OSError):
            return run.stacks.read_bytes()
        return None

    try:
        run_folder.write_private(run.stacks_request, request.encode())
    except OSError as error:
        raise LaunchFailed(f"{run.stacks_request} cannot be written: {error.strerror or error}.") from None
    try:
        return await_answer(read, request, run_id=run.run_id, limit_s=limit_s)
    finally:
        run.stacks_request.unlink(missing_ok=True)
        run.stacks.unlink(missing_ok=True)
