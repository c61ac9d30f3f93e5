"""How much of the ranks' output has come: a cell is over when all that it printed is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import zmq

from gpu_launch.output import Sink
from gpu_launch.standing.control import Control


class Heard:
    """Counts bytes of output by rank and stream. Pure."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[int, str]] = Counter()
        self._wanted: dict[tuple[int, str], int] = {}

    def take(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Messages of agents."""
        for message in messages:
            for rank, stream, _ns, text, *passed in message.get("entries", ()):
                self._bytes[rank, stream] += passed[0] if text is None else len(text.encode("utf-8", "replace"))

    def want(self, rank: int, written: Iterable[int]) -> None:
        """A rank has written so many bytes to stdout and stderr in all."""
        for stream, size in zip(("stdout", "stderr"), written, strict=True):
            self._wanted[rank, stream] = size

    @property
    def total(self) -> int:
        """All that has come, in bytes."""
        return sum(self._bytes.values())

    def is_all(self) -> bool:
        """Whether everything is here that ranks said they had written."""
        return all(self._bytes[stream] >= size for stream, size in self._wanted.items())


class HearingSink(Sink):
    """The notebook's end of the ranks' output, with a count of it. Its wait ends early for what comes on `control`."""

    def __init__(self, address: str, control: Control) -> None:
        super().__init__(address)
        self.heard = Heard()
        self._control = control
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        control.register(self._poller)

    def receive(self, wait_ms: int, *, most: int = 100) -> list[dict[str, Any]]:
        """As Sink."""
        if wait_ms and not self._control.has_news:
            self._control.has_news = any(found is not self._socket for found, _ in self._poller.poll(wait_ms))
            wait_ms = 0
        messages = super().receive(wait_ms, most=most)
        self.heard.take(messages)
        return messages
