"""Text from tokens as they come: whole characters only, and nothing from the first stop string on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Character that a decoder writes for the bytes of an incomplete character.
_INCOMPLETE = "\ufffd"
#: Number of tokens without a whole character after which their bytes are not text.
_MOST_INCOMPLETE = 8
#: Number of a prompt's last tokens on which the text of the next one can depend.
_BEFORE = 4


class TextStream:
    """The text of one answer."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str], continued: Sequence[int] = ()) -> None:
        """`decode` returns the text of some tokens; the answer continues the text of `continued`.

        Llama's tokenizers leave out a space at the begin of what they decode.
        """
        self._decode, self._stops = decode, tuple(stops)
        self._tokens = list(continued[-_BEFORE:])
        #: Tokens before these are not decoded again: a token's text depends on a few before it.
        self._prefix, self._read = 0, len(self._tokens)
        self._held = ""
        self.is_stopped = False

    def feed(self, token: int) -> str:
        """Return the text that the token completes; after a stop string nothing more comes."""
        if self.is_stopped:
            return ""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        text = self._decode(self._tokens[self._prefix :])
        if text.endswith(_INCOMPLETE) and len(self._tokens) - self._read < _MOST_INCOMPLETE:
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return self._search(text[len(before) :])

    def finish(self) -> str:
        """Return what is left at the end of the answer."""
        if self.is_stopped:
            return ""
        before = self._decode(self._tokens[self._prefix : self._read])
        rest = self._search(self._decode(self._tokens[self._prefix :])[len(before) :])
        held, self._held = self._held, ""
        return rest if self.is_stopped else rest + held

    def _search(self, text: str) -> str:
        """Return the text up to a stop string; hold back what could begin one."""
        text, self._held = self._held + text, ""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            return text[: min(places)]
        for size in range(min(len(text), max(map(len, self._stops), default=1) - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        return text
