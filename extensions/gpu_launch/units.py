"""Sizes and spans of time as people write and read them."""

from __future__ import annotations

import re

from gpu_launch.errors import UsageError

_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([MGT])i?B?", re.IGNORECASE | re.ASCII)
_SPAN = re.compile(r"(\d{1,7})(s|m|h|d|w)", re.ASCII)
_MIB = {"M": 1, "G": 1024, "T": 1024**2}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_memory(flag: str, value: str) -> int:
    """Return the MiB in `24G`, `512M` or `1.5T`, factors of 1024.

    Raises:
        UsageError: for anything else, a number without a unit among it, which could mean either.
    """
    match = _SIZE.fullmatch(value)
    size = int(float(match[1]) * _MIB[match[2].upper()]) if match else 0
    if size < 1:
        raise UsageError(f"{flag} {value}: a size with its unit is needed, such as 24G or 512M.")
    return size


def parse_span(flag: str, value: str, *, least: int, most: int) -> int:
    """Return the seconds in `90s`, `30m`, `2h`, `1d` or `1w`.

    Raises:
        UsageError: for anything else, and for a span beyond the limits, which are in seconds.
    """
    match = _SPAN.fullmatch(value)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if match is None or not least <= seconds <= most:
        raise UsageError(
            f"{flag} {value}: a span of time with its unit is needed, such as 30m, 2h or 1d, "
            f"from {format_span(least)} to {format_span(most)}."
        )
    return seconds


def write_memory(mib: int) -> str:
    """Return a size that `parse_memory` reads: `24G`, `1536M`."""
    return f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M"


def write_span(seconds: int) -> str:
    """Return a span that `parse_span` reads: `2h`, `90s`."""
    unit = next(unit for unit in ("d", "h", "m", "s") if seconds % _SECONDS[unit] == 0 and (seconds or unit == "s"))
    return f"{seconds // _SECONDS[unit]}{unit}"


def format_memory(mib: int) -> str:
    """Return a size for a person: `24 GiB`, `512 MiB`."""
    return f"{mib / 1024:.3g} GiB" if mib >= 1024 else f"{mib} MiB"


def format_span(seconds: float) -> str:
    """Return a span of time for a person: `40 s`, `25 min`, `1 h 30 min`, `2 d`; the hub's pages have it alike."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    minutes, rest = divmod(rounded, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
