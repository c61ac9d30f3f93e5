"""Long polls: waiting for a change of one lease or job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gpuhub.broker.state.ledger import Ledger
from gpuhub.domain.clock import Clock, wait_event

#: Minimum duration of a long poll that answers with only a new position in the queue, seconds.
POSITION_DELAY_S = 2.0
#: Returns the current version of a lease or job, and whether it waits in the queue.
ReadVersion = Callable[[], Awaitable[tuple[int, bool]]]


async def wait_for_change(
    *,
    ledger: Ledger,
    clock: Clock,
    subject_id: str,
    read_version: ReadVersion,
    version: int | None,
    wait_s: float,
) -> None:
    """Wait until the version differs from `version`, for at most `wait_s` seconds.

    For a waiting request, a new version is mostly a new position in the queue. Its answer is delayed a little, since
    otherwise each grant would make all clients of a long queue send another request at once.

    Args:
        ledger: the broker's ledger.
        clock: the broker's clock.
        subject_id: the id of the lease or job.
        read_version: returns the current version.
        version: the version that the client has; None to return at once.
        wait_s: the longest wait, seconds.
    """
    began = clock.monotonic()
    while version is not None:
        changed = ledger.watch(subject_id)
        current, is_waiting = await read_version()
        if current != version and not is_waiting:
            return
        end = began + (wait_s if current == version else min(wait_s, POSITION_DELAY_S))
        left = end - clock.monotonic()
        if left <= 0:
            return
        # Changes of the position wake no poll: it is read again after `POSITION_DELAY_S`.
        await wait_event(changed, min(left, POSITION_DELAY_S) if is_waiting else left)
