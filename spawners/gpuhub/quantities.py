"""Quantities as people write them in settings: `16G` of memory, `8h` of time."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_SPAN = re.compile(r"(\d+)\s*(s|m|h|d|w)")
_FACTORS = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_size(value: object) -> int:
    """Bytes from text such as `512M`, `16G` or `1.5T` (factors of 1024).

    Raises:
        ValueError: for anything else; a bare number is refused, since its unit would be a guess.
    """
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'{value!r} is no size: write a number and a unit in quotes, such as "512M" or "16G"')
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def parse_span(value: object) -> int:
    """Seconds from text such as `90s`, `30m`, `8h`, `2d` or `1w`.

    Raises:
        ValueError: for anything else, and for zero.
    """
    match = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1]) == 0:
        raise ValueError(f'{value!r} is no span of time: write a number and a unit in quotes, such as "30m" or "8h"')
    return int(match[1]) * _SECONDS[match[2]]


def parse_span_or_zero(value: object) -> int:
    """As `parse_span`, and `0s` for none at all.

    Raises:
        ValueError: for anything else.
    """
    return 0 if value == "0s" else parse_span(value)


def format_size(size: int) -> str:
    """Bytes as people write them: `format_size(17179869184)` is `16 GiB`."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= factor:
            number = size / factor
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
    return f"{size} B"


def format_span(seconds: float) -> str:
    """Seconds as people say them: `format_span(5400)` is `1 h 30 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


#: Bytes, written as `"16G"`.
Size = Annotated[int, BeforeValidator(parse_size)]
#: Seconds, written as `"8h"`.
Span = Annotated[int, BeforeValidator(parse_span)]
#: The same, or `"0s"`.
Span0 = Annotated[int, BeforeValidator(parse_span_or_zero)]
