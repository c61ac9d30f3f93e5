"""The user's interrupts, counted instead of raised, while something must not be broken off in its middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """How many interrupts have come in this block. They reach the main thread alone: in any other there are none."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield lambda: len(came)
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
