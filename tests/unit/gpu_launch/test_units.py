"""Sizes and spans of time."""

from __future__ import annotations

import pytest

from gpu_launch import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.6, "1 min"),
        (90, "1 min 30 s"),
        (600, "10 min"),
        (630, "10 min"),
        (5400, "1 h 30 min"),
        (7200, "2 h"),
        (48 * 3600, "2 d"),
        (50 * 3600, "2 d 2 h"),
    ],
)
def test_durations_are_formatted_as_on_the_hubs_pages(seconds, text):
    """The same span has the same text in the notebook and on the hub."""
    assert units.format_span(seconds) == text


@pytest.mark.parametrize("text", ["0s", "90s", "30m", "2h", "7d"])
def test_formatted_durations_can_be_parsed_again(text):
    """In the largest unit that fits."""
    assert units.write_span(units.parse_span("--keep", text, least=0, most=10**7)) == text


@pytest.mark.parametrize(("text", "written"), [("24G", "24G"), ("1.5T", "1536G"), ("512M", "512M"), ("1.5G", "1536M")])
def test_formatted_sizes_can_be_parsed_again(text, written):
    """In GiB where that is exact."""
    mib = units.parse_memory("--memory", text)
    assert units.write_memory(mib) == written
    assert units.parse_memory("--memory", written) == mib
