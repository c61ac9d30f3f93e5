"""The outbox on real SQLite files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.db.outbox import MAX_DESTINATIONS, MAX_WAITING, DestinationRow, Outbox
from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker_api.schemas import NotificationKind
from gpuhub.common.errors import Conflict
from gpuhub.domain.models import EventRow, NotificationRow
from tests.unit.gpuhub.broker.db.test_store import build_request

ENDED, GRANTED = NotificationKind.JOB_ENDED, NotificationKind.GRANTED


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open_file(tmp_path / "broker.sqlite")
    yield opened
    opened.close()


def build_destination(number: int = 1, **changes: Any) -> DestinationRow:
    values = {
        "id": f"d{number}", "owner": "ada", "name": "", "label": "ntfy", "url": "…", "kinds": ("job-ended",),
        "created_at": float(number),
    }  # fmt: skip
    return DestinationRow(**{**values, **changes})


def build_event(key: str, kind: NotificationKind = ENDED, owner: str | None = "ada", **more: Any) -> EventRow:
    row = NotificationRow(kind=kind, key=key, title=key, body="text", owner=owner, **more)
    return EventRow(at=10.0, kind="job.ended", text="text", owner=owner, notifications=(row,))


def find_due(outbox: Outbox, now: float = 10.0) -> list[tuple[str, str]]:
    return [(due.destination, due.notification.key) for due in outbox.list_due(now, ())]


def test_each_destination_that_wants_it_gets_a_delivery(store: Store) -> None:
    """Of its owner alone; what concerns the machines goes to their owner alone."""
    store.outbox.machine_destinations = ("file:1", "file:2")
    for row in (
        build_destination(1),
        build_destination(2, kinds=("granted",)),
        build_destination(3, owner="ben"),
        build_destination(4, kinds=()),
    ):
        assert store.outbox.add_destination(row)
    store.save_events([build_event("a"), build_event("b", GRANTED), build_event("c", NotificationKind.NODE_DOWN, None)])
    assert find_due(store.outbox) == [("d1", "a"), ("d2", "b"), ("file:1", "c"), ("file:2", "c")]


def test_the_same_event_is_sent_once(store: Store) -> None:
    """Also if it is reported again, in the same transaction or after a restart."""
    store.outbox.add_destination(build_destination())
    store.save_events([build_event("a"), build_event("a")])
    store.save_events([build_event("a")])
    assert find_due(store.outbox) == [("d1", "a")]
    assert [row.key for row in store.outbox.list_notifications("ada", None, 10)] == ["a"]


def test_a_notification_is_stored_with_its_event_or_not_at_all(store: Store) -> None:
    """A transaction that fails leaves none."""
    store.outbox.add_destination(build_destination())
    lease = build_request("l1", 1)
    store.save(Changes(leases=[(None, lease)]))
    twice = build_request("l2", 2).evolve(key=lease.key)
    with pytest.raises(Conflict):
        store.save(Changes(leases=[(None, twice)], events=[build_event("a")]))
    assert find_due(store.outbox) == []
    store.save(Changes(leases=[(None, build_request("l3", 3))], events=[build_event("a")]))
    assert find_due(store.outbox) == [("d1", "a")]


def test_what_was_being_sent_at_a_crash_is_sent_again_and_marked(tmp_path: Path) -> None:
    """What was noted as sent is not."""
    store = Store.open_file(tmp_path / "broker.sqlite")
    store.outbox.add_destination(build_destination())
    store.save_events([build_event("sent"), build_event("cut"), build_event("new")])
    first, second, _ = store.outbox.list_due(10.0, ())
    store.outbox.claim([first.id, second.id])
    store.outbox.finish([first.id], "d1", 11.0)
    assert find_due(store.outbox) == [("d1", "new")]
    assert store.outbox.list_destinations("ada")[0][1] == 2
    store.close()
    again = Store.open_file(tmp_path / "broker.sqlite")
    try:
        assert again.outbox.recover() == 1
        due = again.outbox.list_due(12.0, ())
        assert [(row.notification.key, row.is_repeated, row.attempts) for row in due] == [
            ("cut", True, 1),
            ("new", False, 0),
        ]
    finally:
        again.close()


def test_failures_wait_and_are_shown(store: Store) -> None:
    """Until an attempt succeeds."""
    store.outbox.add_destination(build_destination())
    store.save_events([build_event("a"), build_event("b")])
    ids = [due.id for due in store.outbox.list_due(10.0, ())]
    store.outbox.claim(ids)
    store.outbox.fail(ids, "d1", 11.0, "status 500", next_at={ids[0]: 41.0, ids[1]: None})
    assert (find_due(store.outbox, 40.0), find_due(store.outbox, 41.0)) == ([], [("d1", "a")])
    row, waiting = store.outbox.list_destinations("ada")[0]
    assert (row.error, row.failed_at, waiting) == ("status 500", 11.0, 1)
    store.outbox.finish(ids[:1], "d1", 42.0)
    row, waiting = store.outbox.list_destinations("ada")[0]
    assert (row.error, row.failed_at, row.sent_at, waiting) == (None, None, 42.0, 0)


def test_a_flood_does_not_fill_the_outbox(store: Store) -> None:
    """The oldest of what waits for a destination is given up; others keep theirs."""
    store.outbox.add_destination(build_destination())
    store.outbox.add_destination(build_destination(2, owner="ben"))
    store.save_events([build_event("ben's", owner="ben")])
    store.save_events([build_event(f"{number:04}") for number in range(MAX_WAITING + 20)])
    due = find_due(store.outbox)
    assert len(due) == MAX_WAITING + 1
    assert due[:2] == [("d2", "ben's"), ("d1", "0020")]


def test_old_ones_are_given_up_and_deleted(store: Store) -> None:
    """When they are no longer worth reading."""
    store.outbox.add_destination(build_destination())
    store.save_events([build_event("soon", valid_s=5.0), build_event("late", valid_s=500.0)])
    assert store.outbox.expire(15.0) == 1
    assert find_due(store.outbox, 15.0) == [("d1", "late")]
    assert store.outbox.delete_old(100.0) == 1
    assert store.outbox.delete_old(1000.0) == 1
    assert store.outbox.list_notifications("ada", None, 10) == []


def test_destinations_are_limited_and_leave_nothing(store: Store) -> None:
    """A removed one takes what waits with it."""
    assert [store.outbox.add_destination(build_destination(number)) for number in range(MAX_DESTINATIONS + 1)] == [
        *[True] * MAX_DESTINATIONS,
        False,
    ]
    store.save_events([build_event("a")])
    for number in range(1, MAX_DESTINATIONS):
        store.outbox.delete_destination(f"d{number}")
    assert find_due(store.outbox) == [("d0", "a")]
    store.outbox.change_destination("d0", ["granted"])
    store.save_events([build_event("b"), build_event("c", GRANTED)])
    assert find_due(store.outbox) == [("d0", "a"), ("d0", "c")]


def test_open_problems_are_known_after_a_restart(store: Store) -> None:
    """By the last notification about each subject, however old it is."""
    down, up = {"subject": "node:rig1", "is_open": True}, {"subject": "node:rig1"}
    kind = NotificationKind.NODE_DOWN
    store.save_events(
        [build_event("1", kind, None, **down), build_event("2", kind, None, subject="gpu:x", is_open=True)]
    )
    assert store.outbox.find_open_subjects() == {"node:rig1", "gpu:x"}
    store.save_events([build_event("3", kind, None, **up)])
    assert store.outbox.find_open_subjects() == {"gpu:x"}
    assert store.outbox.delete_old(1e9) == 2
    assert store.outbox.find_open_subjects() == {"gpu:x"}


def test_users_read_their_own_notifications(store: Store) -> None:
    """In order, after a number; without one, the newest."""
    store.save_events([build_event(f"{number}") for number in range(5)] + [build_event("x", owner="ben")])
    keys = [(row.key, row.seq) for row in store.outbox.list_notifications("ada", None, 2)]
    assert keys == [("3", 4), ("4", 5)]
    assert [row.key for row in store.outbox.list_notifications("ada", 1, 2)] == ["1", "2"]
