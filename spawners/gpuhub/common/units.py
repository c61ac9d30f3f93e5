"""Sizes and time spans in the notation of cluster.toml, such as `16G` and `8h`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_SPAN = re.compile(r"(\d+)\s*(s|m|h|d|w)")
_FACTORS = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_size(value: object) -> int:
    """Return the bytes of text such as `512M`, `16G` or `1.5T` (factors of 1024).

    Raises:
        ValueError: for anything else, also for a number without a unit.
    """
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'{value!r} is not a size: write a number and a unit in quotes, such as "512M" or "16G"')
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def parse_span(value: object) -> int:
    """Return the seconds of text such as `90s`, `30m`, `8h`, `2d` or `1w`.

    Raises:
        ValueError: for anything else, and for zero.
    """
    match = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1]) == 0:
        raise ValueError(f'{value!r} is not a time span: write a number and a unit in quotes, such as "30m" or "8h"')
    return int(match[1]) * _SECONDS[match[2]]


def parse_span_or_zero(value: object) -> int:
    """Return the seconds of a span as `parse_span` does, and 0 for `0s`.

    Raises:
        ValueError: for anything else.
    """
    return 0 if value == "0s" else parse_span(value)


def format_size(size: int) -> str:
    """Return bytes in readable form: `16 GiB` for 17179869184."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= factor:
            number = size / factor
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
    return f"{size} B"


def format_bits(rate: float) -> str:
    """Return bytes per second as bits: `2.35 Gbit/s` for 293750000."""
    bits = rate * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def format_flops(rate: float) -> str:
    """Return floating-point operations per second: `61.2 TFLOP/s` for 61200000000000."""
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def format_span(seconds: float) -> str:
    """Return seconds in readable form: `1 h 30 min` for 5400."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    minutes, odd_seconds = divmod(rounded, 60)
    if minutes < 60:
        return f"{minutes} min {odd_seconds} s" if odd_seconds and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


#: Size in bytes, written as `"16G"`.
Size = Annotated[int, BeforeValidator(parse_size)]
#: Time span in seconds, written as `"8h"`; never zero.
Span = Annotated[int, BeforeValidator(parse_span)]
#: Time span in seconds, or `"0s"`.
Span0 = Annotated[int, BeforeValidator(parse_span_or_zero)]
