"""Ranks' lines as a launch shows them: equal ones are folded when they come close together, which a busy machine decides."""

from __future__ import annotations

import re

_ONE = re.compile(r"\[rank \d+[^\]]*\] (?P<line>.*)")
_SEVERAL = re.compile(r"\[ranks [^\]]*×(?P<count>\d+)\] (?P<line>.*)")


def times(text: str, line: str) -> int:
    """How many ranks said exactly this line."""
    total = 0
    for shown in text.splitlines():
        if (several := _SEVERAL.fullmatch(shown)) and several["line"] == line:
            total += int(several["count"])
        elif (one := _ONE.fullmatch(shown)) and one["line"] == line:
            total += 1
    return total
