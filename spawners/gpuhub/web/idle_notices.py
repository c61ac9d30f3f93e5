"""Notices about a user's idle notebooks, on every page of the hub: which will be stopped when, and which was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from gpuhub.broker_api.schemas import EventView, LeaseView
from gpuhub.common.errors import GpuhubError
from gpuhub.common.units import format_span
from gpuhub.web.handlers import BrokerUserHandler
from gpuhub.web.text import capitalise, describe_gpus

#: Number of a user's newest events that are searched for a notebook that was stopped.
_EVENTS = 200
#: Time for which it is shown that a notebook was stopped.
_SHOWN = timedelta(days=3)
_RECLAIMED, _GRANTED = "lease.reclaimed", "lease.granted"


def build_warnings(leases: Iterable[LeaseView]) -> list[dict[str, Any]]:
    """Return what the page shows of the notebooks whose end is near: texts, the end, and how long they can be kept."""
    return [
        {
            "lease": lease.id,
            "text": f"{name_notebook(lease.subject)} with {describe_gpus(lease.gpus)}: {lease.idle.text}.",
            "stops_at": lease.idle.stops_at.isoformat(),
            "keep": f"Keep for {format_span(lease.idle.keep_s)}" if lease.idle.keep_s else "",
        }
        for lease in leases
        if lease.idle is not None and lease.idle.is_warned
    ]


def name_notebook(server: str) -> str:
    """Return the name of a notebook for its owner, at the beginning of a sentence."""
    return f"Your notebook {server!r}" if server else "Your notebook"


def find_stopped(events: Sequence[EventView], now: datetime) -> dict[str, str] | None:
    """Return text and time of the last notebook that was stopped because it was idle.

    Args:
        events: The user's own, oldest first.
        now: The current time, with a time zone.

    Returns:
        None if there is none, if it was days ago, or if the user has started something since.
    """
    last = next((event for event in reversed(events) if event.kind in {_RECLAIMED, _GRANTED}), None)
    if last is None or last.kind != _RECLAIMED or now - last.at > _SHOWN:
        return None
    # The event names the owner, for administrators.
    return {"text": capitalise(f"your {last.text.partition(' ')[2]}."), "at": last.at.isoformat()}


class IdleNoticesHandler(BrokerUserHandler):
    """GET: `{"warnings": […], "now": …}` about the user's own notebooks, with `?stopped` also `"stopped"`."""

    async def get(self) -> None:
        """Send the notices, or the broker's refusal."""
        user = self.require_user()
        self.check_scope()

        async def ask(broker: Any) -> dict[str, Any]:
            warnings, now = build_warnings(await broker.leases(owner=user.name)), datetime.now().astimezone()
            answer: dict[str, Any] = {"warnings": warnings, "now": now.isoformat()}
            if "stopped" in self.request.query_arguments:
                own = [event for event in await broker.events(limit=_EVENTS) if event.owner == user.name]
                answer["stopped"] = find_stopped(own, now)
            return answer

        try:
            self.finish_json(await self.call_as_user(user, ask))
        except GpuhubError as error:
            self.finish_error(error)
