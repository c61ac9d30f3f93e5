"""Sizes and spans of time as people write them on a command line. Pure."""

from __future__ import annotations

import re

from gpu_launch.errors import UsageError

_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([MGT])i?B?", re.IGNORECASE | re.ASCII)
_SPAN = re.compile(r"(\d{1,7})(s|m|h|d|w)", re.ASCII)
_MIB = {"M": 1, "G": 1024, "T": 1024**2}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_memory(flag: str, value: str) -> int:
    """MiB from `24G`, `512M` or `1.5T`, factors of 1024. Raises UsageError; a bare number's unit would be a guess."""
    match = _SIZE.fullmatch(value)
    size = int(float(match[1]) * _MIB[match[2].upper()]) if match else 0
    if size < 1:
        raise UsageError(f"{flag} {value}: a size with its unit is needed, such as 24G or 512M.")
    return size


def parse_span(flag: str, value: str, *, least: int, most: int) -> int:
    """Seconds from `90s`, `30m`, `2h`, `1d` or `1w`. Raises UsageError for anything else and beyond the limits."""
    match = _SPAN.fullmatch(value)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if match is None or not least <= seconds <= most:
        raise UsageError(
            f"{flag} {value}: a span of time with its unit is needed, such as 30m, 2h or 1d, "
            f"from {format_span(least)} to {format_span(most)}."
        )
    return seconds


def format_memory(mib: int) -> str:
    """`24 GiB`, `512 MiB`."""
    return f"{mib / 1024:.3g} GiB" if mib >= 1024 else f"{mib} MiB"


def format_span(seconds: float) -> str:
    """Roughly, as one says it: `40 s`, `25 min`, `3 h`, `2 d`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} d"
