"""The page of notifications: its actions and its list."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from gpuhub.broker_api.schemas import DestinationView, UserNotificationKind
from gpuhub.common.errors import InvalidRequest
from gpuhub.web.notifications_page import KINDS, AddAction, parse_action, render_list
from tests.support.hub.fake_broker import NOW

VIEW = DestinationView(
    id="d1", name="<My phone>", label="ntfy", kinds=("granted",), created_at=NOW, waiting=0, sent_at=None,
    failed_at=None, error=None,
)  # fmt: skip


def encode(**action: Any) -> bytes:
    return json.dumps(action).encode()


def test_every_kind_has_a_text() -> None:
    """In the order of the page."""
    assert tuple(KINDS) == get_args(UserNotificationKind)


def test_actions() -> None:
    """As the page's script sends them."""
    action = parse_action(encode(do="add", destination={"url": "ntfys://topic-1", "name": "x", "kinds": ["granted"]}))
    assert isinstance(action, AddAction)
    assert "topic-1" not in repr(action)
    assert parse_action(encode(do="test", id="d0a1"))
    assert parse_action(encode(do="change", id="d0a1", kinds=[]))


@pytest.mark.parametrize(
    "body",
    [
        b"[", b"{}", encode(do="remove", id="../x"), encode(do="change", id="d1", kinds=["node-down"]),
        encode(do="add", destination={"url": "ntfys://s3cret topic", "kinds": []}),
        encode(do="add", destination={"url": "ntfys://s3cret\n", "kinds": []}),
        encode(do="add", destination={"url": "s3cret" * 1000, "kinds": []}),
        encode(do="add", destination={"url": "ntfys://s3cret", "kinds": [], "owner": "ben"}),
    ],
)  # fmt: skip
def test_other_requests_are_refused_without_quoting_them(body: bytes) -> None:
    """A destination's address is a secret."""
    with pytest.raises(InvalidRequest) as refusal:
        parse_action(body)
    assert "s3cret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "Nothing was sent yet"),
        ({"waiting": 1}, "Sending"),
        ({"sent_at": NOW}, "Last accepted at"),
        ({"failed_at": NOW, "error": "status 500"}, "Not accepted at"),
        ({"failed_at": NOW, "error": "status 500", "waiting": 1}, "Not accepted: status 500. It is tried again."),
    ],
)
def test_what_became_of_the_last_message(changes: dict[str, Any], text: str) -> None:
    """With names escaped."""
    html = render_list([VIEW.model_copy(update=changes)])
    assert text in html
    assert "&lt;My phone&gt;" in html
    assert "<My phone>" not in html
