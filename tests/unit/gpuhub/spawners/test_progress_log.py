"""Events of a start."""

from __future__ import annotations

import asyncio
from typing import Any

from gpuhub.spawners.progress_log import MAX_EVENTS, ProgressLog


async def collect(log: ProgressLog) -> list[dict[str, Any]]:
    return [event async for event in log.follow()]


async def test_later_viewers_see_earlier_events() -> None:
    """A page that is opened later gets the earlier events and then the new ones."""
    log = ProgressLog()
    early = asyncio.create_task(collect(log))
    log.add("one", percent=1)
    await asyncio.sleep(0)
    late = asyncio.create_task(collect(log))
    await asyncio.sleep(0)
    log.add("two", percent=2)
    log.close()
    assert [event["message"] for event in await early] == ["one", "two"]
    assert await early == await late


async def test_repeated_message_is_not_a_new_event() -> None:
    """A long poll without news adds no event."""
    log = ProgressLog()
    for _ in range(3):
        log.add("waiting", percent=5)
    log.close()
    assert len(await collect(log)) == 1


async def test_messages_are_escaped_and_html_is_not() -> None:
    """JupyterHub shows the HTML as it comes."""
    log = ProgressLog()
    log.add("<b>", percent=1)
    log.add("x", percent=1, html_text="<button>x</button>")
    log.close()
    assert [event["html_message"] for event in await collect(log)] == ["&lt;b&gt;", "<button>x</button>"]


async def test_only_the_last_events_are_kept() -> None:
    """A queue may move for days."""
    log = ProgressLog()
    for number in range(MAX_EVENTS * 3):
        log.add(str(number), percent=1)
    log.close()
    messages = [event["message"] for event in await collect(log)]
    assert messages == [str(number) for number in range(MAX_EVENTS * 2, MAX_EVENTS * 3)]
