"""Visits: their number and their end."""

from __future__ import annotations

import pytest

from gpuhub.broker.ports import visits as module
from gpuhub.broker.ports.visits import MAX_VISITS_PER_USER, VISIT_S, Visits
from gpuhub.broker_api.errors import NotKnown


def test_visit_is_found_by_its_key_until_its_end() -> None:
    """For its own job alone."""
    now = [0.0]
    visits = Visits(lambda: now[0])
    key = visits.open("ben", "j1", "token x")
    assert visits.find("j1", key).user == "ben"
    for job, wrong in (("j2", key), ("j1", key[:-1]), ("j1", "\udc80")):
        with pytest.raises(NotKnown):
            visits.find(job, wrong)
    now[0] = VISIT_S
    with pytest.raises(NotKnown):
        visits.find("j1", key)
    visits.open("ben", "j1", "token x")
    assert len(visits._visits) == 1


def test_one_users_visits_end_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the same user ends; above the limit of all, the oldest of all."""
    visits = Visits(lambda: 0.0)
    first = visits.open("ada", "j1", "token a")
    keys = [visits.open("ben", "j1", "token b") for _ in range(MAX_VISITS_PER_USER + 1)]
    assert visits.find("j1", first)
    assert visits.find("j1", keys[1])
    with pytest.raises(NotKnown):
        visits.find("j1", keys[0])
    monkeypatch.setattr(module, "MAX_VISITS", len(visits._visits))
    visits.open("eve", "j1", "token e")
    with pytest.raises(NotKnown):
        visits.find("j1", first)
