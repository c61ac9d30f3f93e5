"""Shows the displays of a single rank, in order with its lines, which come another way."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from gpu_launch.common.displays import Display, DisplayKind
from gpu_launch.output.display_tabs import RankDisplay

_STREAMS = ("stdout", "stderr")


class DisplayOrder:
    """Keeps a display until the output that was written before it has come.

    Displays of several ranks have a place of their own, and are never kept.
    """

    def __init__(self) -> None:
        self._received: Counter[str] = Counter()
        self._pending: deque[RankDisplay] = deque()

    def add(self, display: RankDisplay) -> None:
        """Take a display."""
        self._pending.append(display)

    def split(self, entry: list[Any]) -> Iterator[list[Any]]:
        """Return an entry of output in parts: one ends where a display follows. Each part counts when it is taken."""
        rank, stream, written_at, text, *skipped = entry
        if text is None:
            self._received[stream] += skipped[0]
            yield entry
            return
        data, index = text.encode("utf-8", "replace"), _STREAMS.index(stream)
        for shown in list(self._pending):
            size = shown.display.written[index] - self._received[stream]
            if shown.is_only_rank and 0 < size < len(data):
                self._received[stream] += size
                yield [rank, stream, written_at, data[:size].decode("utf-8", "replace")]
                data = data[size:]
                text = data.decode("utf-8", "replace")
        self._received[stream] += len(data)
        yield [rank, stream, written_at, text]

    def pop_due(self, *, everything: bool = False) -> list[RankDisplay]:
        """Return the displays that are to be shown now."""
        due = []
        while self._pending and (everything or self._is_due(self._pending[0])):
            due.append(self._pending.popleft())
        return due

    def _is_due(self, shown: RankDisplay) -> bool:
        before = zip(_STREAMS, shown.display.written, strict=True)
        return not shown.is_only_rank or all(self._received[stream] >= size for stream, size in before)


def publish_display(display: Display) -> None:
    """Show a display of the only rank below the cell, as if the notebook itself had made it."""
    from IPython.display import clear_output, publish_display_data

    if display.kind is DisplayKind.CLEAR:
        clear_output(wait=display.wait)
        return
    publish_display_data(
        data=dict(display.data),
        metadata=dict(display.metadata),
        transient={"display_id": display.display_id} if display.display_id else None,
        update=display.kind is DisplayKind.UPDATE,
    )
