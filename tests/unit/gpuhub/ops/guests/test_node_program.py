"""The guest's own program: hours in which its owner lends it."""

from __future__ import annotations

import pytest

from gpuhub.ops.guests.node_program import Failure, is_lent, parse_hours


@pytest.mark.parametrize(
    ("wishes", "hour", "lent"),
    [
        ({}, 12, True),
        ({"paused": True}, 12, False),
        ({"hours": "22:00-08:00"}, 23, True),
        ({"hours": "22:00-08:00"}, 7, True),
        ({"hours": "22:00-08:00"}, 8, False),
        ({"hours": "22:00-08:00"}, 21, False),
        ({"hours": "9:00-17:00"}, 9, True),
        ({"hours": "9:00-17:00"}, 17, False),
        ({"hours": "22:00-08:00", "paused": True}, 23, False),
    ],
)
def test_hours_and_pauses(wishes: dict[str, object], hour: int, lent: bool) -> None:
    """Hours may pass midnight; a pause counts at all hours."""
    assert is_lent(wishes, hour * 60) is lent


@pytest.mark.parametrize("text", ["22-8", "25:00-08:00", "22:00-08:60", "08:00-08:00", "", "22:00-08:00; reboot"])
def test_what_are_no_hours_is_refused(text: str) -> None:
    """With what is right."""
    with pytest.raises(Failure, match="always"):
        parse_hours(text)
