"""Lines of ranks in a launch's output, where equal lines that come close together are merged into one."""

from __future__ import annotations

import re

_ONE = re.compile(r"\[rank \d+[^\]]*\] (?P<line>.*)")
_SEVERAL = re.compile(r"\[ranks [^\]]*×(?P<count>\d+)\] (?P<line>.*)")


def count_ranks(text: str, line: str) -> int:
    """Return the number of ranks that printed exactly this line."""
    total = 0
    for shown in text.splitlines():
        if (several := _SEVERAL.fullmatch(shown)) and several["line"] == line:
            total += int(several["count"])
        elif (single := _ONE.fullmatch(shown)) and single["line"] == line:
            total += 1
    return total
