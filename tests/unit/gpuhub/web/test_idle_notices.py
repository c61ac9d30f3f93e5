"""Notices about idle notebooks on the hub's pages."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpuhub.broker_api.schemas import EventView, IdleReason, IdleView, LeaseView
from gpuhub.web.idle_notices import build_warnings, find_stopped
from tests.support.broker.factories import lease
from tests.support.hub.fake_broker import NOW

IDLE = IdleView(
    reason=IdleReason.INACTIVE, text="no activity for 50 min", since=NOW, stops_at=NOW, is_warned=True, keep_s=3600
)
#: As the broker writes it.
STOPPED = EventView(
    at=NOW,
    kind="lease.reclaimed",
    text="ada's notebook (RTX 5090 on rig1): stopped after 1 h without activity; files are kept",
    owner="ada",
)
GRANTED = STOPPED.model_copy(update={"kind": "lease.granted"})


def idle_lease(**changes: object) -> LeaseView:
    return lease("GPU-a").model_copy(update={"idle": IDLE.model_copy(update=changes)})


def test_warning_has_texts_end_and_button():
    """Named servers by their names; without time left to keep it there is no button."""
    [shown] = build_warnings([idle_lease(), lease("GPU-b")])
    assert shown["text"].endswith(": no activity for 50 min.")
    assert shown["text"].startswith("Your notebook")
    assert (shown["stops_at"], shown["keep"]) == (NOW.isoformat(), "Keep for 1 h")
    assert build_warnings([idle_lease(keep_s=0)])[0]["keep"] == ""
    named = idle_lease().model_copy(update={"subject": "second"})
    assert build_warnings([named])[0]["text"].startswith("Your notebook 'second' with ")


def test_idle_notebooks_without_a_warning_are_not_mentioned():
    """The countdown is long, or the owner keeps it."""
    assert build_warnings([idle_lease(is_warned=False)]) == []


@pytest.mark.parametrize(
    ("events", "days", "is_shown"),
    [
        ([STOPPED], 0.1, True),
        ([GRANTED, STOPPED], 0.1, True),
        ([STOPPED, GRANTED], 0.1, False),
        ([STOPPED], 4, False),
        ([GRANTED], 0.1, False),
        ([], 0.1, False),
    ],
)
def test_reason_is_shown_until_something_is_started(events: list[EventView], days: float, is_shown: bool):
    """Some days at most, and not after the user's next grant."""
    found = find_stopped(events, NOW + timedelta(days=days))
    assert (found is not None) is is_shown
    if found is not None:
        assert found["text"] == (
            "Your notebook (RTX 5090 on rig1): stopped after 1 h without activity; files are kept."
        )
        assert found["at"] == NOW.isoformat()
