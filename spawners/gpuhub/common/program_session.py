"""Programs that run for a user elsewhere, with their input and output as streams."""

from __future__ import annotations

from typing import Protocol

#: The streams of a program's output.
STDOUT, STDERR = 1, 2


class ProgramSession(Protocol):
    """A running program. One task at a time may read, and one may send."""

    async def read(self) -> tuple[int, bytes] | None:
        """Return the next part as stream and data; None at the end, also when the connection is lost."""
        ...

    async def send(self, data: bytes) -> None:
        """Write to the program's input.

        Raises:
            NodeUnreachable: The program has ended, or the connection is lost.
        """
        ...

    def close(self) -> None:
        """Close the connection; the program sees the end of its input."""
        ...
