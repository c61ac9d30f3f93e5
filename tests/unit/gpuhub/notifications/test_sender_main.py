"""What destinations get, as their own limits and formats demand."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import requests

from gpuhub.notifications import sender_main
from gpuhub.notifications.sender import OutgoingMessage, SendOrder
from gpuhub.notifications.services import SERVICES

TELEGRAM = "tgram://123456789:abcdefg_hijklmnop/12315544"
DISCORD = "discord://123456789012345678/abcdefghijklmnopqrstuvwxyz"


class OpenGuard:
    """Permits everything: nothing is connected to here."""

    refusal = None

    def permit(self, _allowed: object) -> None:
        return


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the bodies of requests, which are all accepted."""
    bodies: list[dict[str, Any]] = []

    def request(_session: object, *_arguments: object, **options: Any) -> requests.Response:
        bodies.append(json.loads(options["data"]))
        response = requests.Response()
        response.status_code = 200
        response._content = b'{"ok": true}'
        return response

    monkeypatch.setattr(requests.Session, "request", request)
    return bodies


def send(url: str, body: str) -> None:
    service = SERVICES[url.partition("://")[0]]
    order = SendOrder(url=url, allowed=None, message=OutgoingMessage(title="3 notifications of gpuhub", body=body))
    guard = cast("sender_main.Guard", OpenGuard())
    result = sender_main.run(order, sender_main._load_plugin(service), service, guard)
    assert result.outcome == "sent"


@pytest.mark.parametrize(("url", "key", "most"), [(DISCORD, "content", 2000), (TELEGRAM, "text", 4096)])
def test_text_is_as_long_as_the_destination_takes(sent: list[dict[str, Any]], url: str, key: str, most: int) -> None:
    """A longer one is refused as a whole: after many notifications at once none would arrive."""
    send(url, "\n".join(f"• Job sweep-{number} has ended: Done. {'It ran. ' * 40}" for number in range(20)))
    (message,) = sent
    text = message[key].removeprefix("<b>").replace("</b>", "")
    assert most - 100 < len(text) <= most
    assert text.endswith("…")


def test_short_text_stays_as_it_is(sent: list[dict[str, Any]]) -> None:
    send(DISCORD, "It waited 12 min.\nIt starts now.")
    assert sent[0]["content"].endswith("It waited 12 min.\nIt starts now.")


def test_text_is_not_taken_for_html(sent: list[dict[str, Any]]) -> None:
    """Telegram refuses a message with an opening bracket that is no tag's."""
    send(TELEGRAM, "Job lr<0.1&wd has ended.")
    assert sent[0]["text"].endswith("Job lr&lt;0.1&amp;wd has ended.")
