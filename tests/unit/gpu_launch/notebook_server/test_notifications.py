"""The feed of notifications in a notebook's server."""

from __future__ import annotations

from typing import Any

from gpu_launch.notebook_server.notifications import MAX_KEPT, NotificationFeed


def build(seq: int, kind: str = "job-ended") -> dict[str, Any]:
    return {"seq": seq, "kind": kind, "title": f"title {seq}", "body": ""}


def test_what_happened_before_the_notebook_is_not_shown():
    """The first answer has the newest ones, or none."""
    feed = NotificationFeed(None, None)
    feed.add([build(3), build(4)])
    assert feed.list_after(0) == []
    feed.add([build(5), build(6, "idle"), build(7, "test"), build(8)])
    assert [row["seq"] for row in feed.list_after(0)] == [5, 8]
    assert [row["seq"] for row in feed.list_after(5)] == [8]


def test_the_first_notification_of_a_user_is_shown():
    """Whose first answer is empty."""
    feed = NotificationFeed(None, None)
    feed.add([])
    feed.add([build(1)])
    assert [row["seq"] for row in feed.list_after(0)] == [1]


def test_few_are_kept():
    """The newest."""
    feed = NotificationFeed(None, None)
    feed.add([])
    feed.add([build(seq) for seq in range(1, 2 * MAX_KEPT)])
    assert len(feed.list_after(0)) == MAX_KEPT
    assert feed.list_after(0)[-1]["seq"] == 2 * MAX_KEPT - 1
