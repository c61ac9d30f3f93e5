"""The local terminal while a remote one is shown in it: raw mode on POSIX systems, single keys on Windows."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator

#: Seconds between checks for a new window size and for the other side's end.
_TICK_S = 0.1


def get_size() -> tuple[int, int]:
    """Return columns and rows."""
    terminal_size = shutil.get_terminal_size((80, 24))
    return max(1, terminal_size.columns), max(1, terminal_size.lines)


@contextlib.contextmanager
def raw_mode() -> Iterator[None]:
    """Switch to raw mode: keys arrive at once and are not echoed. The old mode is always restored."""
    if os.name == "nt" or not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # Keep what was typed before: it is input for the other side.
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def read_keys(send: Callable[[bytes], None], on_tick: Callable[[], None], is_over: threading.Event) -> None:
    """Send typed keys, or the content of stdin, until it ends or `is_over` is set."""
    if os.name == "nt" and sys.stdin.isatty():
        _read_windows(send, on_tick, is_over)
    elif os.name == "nt":
        _read_all(send, on_tick, is_over)
    else:
        _read_posix(send, on_tick, is_over)


def _read_posix(send: Callable[[bytes], None], on_tick: Callable[[], None], is_over: threading.Event) -> None:
    import select

    descriptor, last = sys.stdin.fileno(), b"\n"
    while not is_over.is_set():
        ready, _, _ = select.select([descriptor], [], [], _TICK_S)
        on_tick()
        if not ready:
            continue
        if not (data := os.read(descriptor, 65536)):
            _send_end(send, is_over, is_at_line_start=last.endswith(b"\n"))
            return
        send(data)
        last = data


def _read_all(send: Callable[[bytes], None], on_tick: Callable[[], None], is_over: threading.Event) -> None:
    """Read a pipe on Windows, where select does not support pipes."""
    last = b"\n"
    while not is_over.is_set() and (data := os.read(sys.stdin.fileno(), 65536)):
        on_tick()
        send(data)
        last = data
    _send_end(send, is_over, is_at_line_start=last.endswith(b"\n"))


def _send_end(send: Callable[[bytes], None], is_over: threading.Event, *, is_at_line_start: bool) -> None:
    """Send the end of piped input as a terminal does, then wait for the command's end."""
    # Within a line the first Ctrl-D only submits the line's beginning.
    send(b"\x04" if is_at_line_start else b"\x04\x04")
    is_over.wait()


#: Key codes of Windows for keys without a character, and the sequences that terminals send for them.
_WINDOWS_KEYS = {
    "H": "\x1b[A", "P": "\x1b[B", "M": "\x1b[C", "K": "\x1b[D", "G": "\x1b[H", "O": "\x1b[F",
    "I": "\x1b[5~", "Q": "\x1b[6~", "R": "\x1b[2~", "S": "\x1b[3~",
}  # fmt: skip


def _read_windows(send: Callable[[bytes], None], on_tick: Callable[[], None], is_over: threading.Event) -> None:
    import msvcrt

    while not is_over.is_set():
        on_tick()
        if not msvcrt.kbhit():  # type: ignore[attr-defined]
            is_over.wait(0.02)
            continue
        key: str = msvcrt.getwch()  # type: ignore[attr-defined]
        if key in ("\x00", "\xe0"):
            key = _WINDOWS_KEYS.get(msvcrt.getwch(), "")  # type: ignore[attr-defined]
        send(key.encode())
