"""How many streams are open: of one owner, and in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpuhub.broker.refusals import TooManyStreams


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of stream, and the most that may be open."""

    #: For a person, in the plural.
    what: str
    each: int
    together: int


TRANSFERS = Kind(what="files being sent or fetched", each=2, together=32)
LOGS = Kind(what="logs being read", each=4, together=256)
STATES = Kind(what="states being read", each=4, together=64)
SHELLS = Kind(what="terminals", each=2, together=64)
POLLS = Kind(what="requests that wait for news", each=128, together=8192)


class Slots:
    """Counts them."""

    def __init__(self) -> None:
        self._open: Counter[tuple[Kind, str]] = Counter()
        self._total: Counter[Kind] = Counter()

    @contextmanager
    def take(self, kind: Kind, owner: str) -> Iterator[None]:
        """One more for as long as the context lasts.

        Raises:
            TooManyStreams: with the limit.
        """
        for count, most, who in (
            (self._open[kind, owner], kind.each, owner),
            (self._total[kind], kind.together, "all users together"),
        ):
            if count >= most:
                raise TooManyStreams(f"{who}: {most} {kind.what} at once are the most: end one, or try again later")
        self._open[kind, owner] += 1
        self._total[kind] += 1
        try:
            yield
        finally:
            self._open[kind, owner] -= 1
            self._total[kind] -= 1
            self._open += Counter()  # forgets owners with none
