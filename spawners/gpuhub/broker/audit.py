"""Who was refused, and who did something to what is another's: one line of JSON each, in a log of its own."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuhub.broker.clock import Clock

#: The log's own logger: `open_log` gives it a file.
log = logging.getLogger("gpuhub.audit")

REFUSED, DONE, FAILED = "refused", "done", "failed"
#: Whoever has no token that the hub knows; no user can have this name.
UNKNOWN = "(unknown)"
#: In place of an action: so much of one caller was left out.
LEFT_OUT = "too much at once to tell"

#: What only administrators may do, as `METHOD /route`.
PRIVILEGED = frozenset(
    {
        "POST /leases/{lease_id}/force",
        "POST /nodes/{name}/cordon",
        "POST /nodes/{name}/drain",
        "POST /nodes/{name}/undrain",
        "POST /reservations",
        "DELETE /reservations/{reservation_id}",
    }
)

#: What the same caller does to the same thing again within so long is counted, and told with the next line, seconds.
REPEAT_S = 60.0
#: Different lines in `REPEAT_S` at most, about all callers and about one: a flood fills no disk, and hides nobody.
CAPACITY = 1000
EACH = 100
_MOST_CHARACTERS = 80
_FILE_BYTES = 10 * 1024**2
_FILES = 10


@dataclass(slots=True)
class Deed:
    """What becomes known of one request while it is served."""

    #: Who asks, by the hub's word; empty for nobody it knows.
    name: str = ""
    #: `user` or `service`; empty for whoever may not use the broker at all.
    kind: str = ""
    is_admin: bool = False
    #: Acts for each owner as a matter of course: the hub's spawner.
    any_owner: bool = False
    #: Whose lease, job or limits it is about; None for nobody's.
    owner: str | None = None


_deed: ContextVar[Deed | None] = ContextVar("deed", default=None)


def note_name(name: str) -> None:
    """The hub knows whose token this is, whatever it may do here."""
    if (deed := _deed.get()) is not None:
        deed.name = name


def note_caller(name: str, *, is_user: bool, is_admin: bool, any_owner: bool) -> None:
    """Who asks, and may use the broker."""
    if (deed := _deed.get()) is not None:
        deed.name, deed.kind = name, "user" if is_user else "service"
        deed.is_admin, deed.any_owner = is_admin, any_owner


def note_owner(owner: str) -> None:
    """Whose it is what was asked for, also where the caller is not told that it is there."""
    if (deed := _deed.get()) is not None:
        deed.owner = owner


def judge(deed: Deed, action: str, status: int) -> str | None:
    """`refused`, `done` or `failed`, as it is told; None for what is nobody else's business, and for what the hub's
    spawner does for owners, of which the events tell.
    """
    if status in {401, 403}:
        return REFUSED
    is_foreign = deed.owner is not None and deed.owner != deed.name
    if not deed.kind or deed.any_owner:
        return None
    if status == 404 and is_foreign and not deed.is_admin:
        return REFUSED
    if is_foreign or action in PRIVILEGED:
        return DONE if status < 400 else FAILED
    return None


class Audit:
    """Writes lines, and no more than the log can bear."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: What was told within `REPEAT_S`, oldest first: since when, its line, and how often it came again.
        self._told: OrderedDict[tuple[str, ...], tuple[float, dict[str, Any], int]] = OrderedDict()
        self._lines: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()

    def tell(self, line: Mapping[str, Any]) -> None:
        """One thing that somebody did, or was refused."""
        self._forget(self._clock.monotonic() - REPEAT_S)
        is_known = line["who"] != UNKNOWN
        # Whoever is not known may name anything.
        key = tuple(str(line[part]) for part in ("who", "from", "action", "outcome", *(["object"] if is_known else [])))
        if key in self._told:
            since, first, again = self._told[key]
            self._told[key] = (since, first, again + 1)
        elif len(self._told) < CAPACITY and self._lines[line["who"]] < EACH:
            self._told[key] = (self._clock.monotonic(), dict(line), 0)
            self._lines[line["who"]] += 1
            self._write(line)
        elif len(self._left_out) < CAPACITY or line["who"] in self._left_out:
            self._left_out[line["who"]] += 1

    def close(self) -> None:
        """Write what was only counted so far."""
        self._forget(self._clock.monotonic())

    def _forget(self, before: float) -> None:
        there = len(self._told)
        while self._told and next(iter(self._told.values()))[0] <= before:
            _, (_, line, again) = self._told.popitem(last=False)
            self._lines[line["who"]] -= 1
            if again:
                self._write({**line, "again": again})
        if len(self._told) == there:
            return
        self._lines += Counter()  # forgets who has none
        for who in [one for one in self._left_out if self._lines[one] < EACH]:
            self._write({"who": who, "action": LEFT_OUT, "again": self._left_out.pop(who)})

    def _write(self, line: Mapping[str, Any]) -> None:
        now = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds")
        log.info(json.dumps({"time": now, **line}))


class AuditTrail:
    """ASGI middleware: tells of each request what `judge` finds worth it, as soon as it is answered."""

    def __init__(self, app: ASGIApp, audit: Audit, prefix: str) -> None:
        self._app = app
        self._audit = audit
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, looking at how it is answered."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        deed = Deed()

        async def watch(message: Message) -> None:
            status = message.get("status")
            if status is not None and message["type"].endswith("http.response.start"):
                self._tell(scope, deed, int(status))
            await send(message)

        token = _deed.set(deed)
        try:
            await self._app(scope, receive, watch)
        finally:
            _deed.reset(token)

    def _tell(self, scope: Scope, deed: Deed, status: int) -> None:
        route = scope.get("route")
        path = str(getattr(route, "path", "")).rpartition(self._prefix)[2]
        action = f"{scope.get('method', 'WEBSOCKET')} {path}"
        outcome = judge(deed, action, status)
        if not path or outcome is None:
            return
        self._audit.tell(
            {
                "who": deed.name or UNKNOWN,
                "kind": deed.kind,
                "from": (scope.get("client") or ("",))[0],
                "action": action,
                "object": ",".join(map(str, scope.get("path_params", {}).values()))[:_MOST_CHARACTERS],
                "owner": deed.owner,
                "outcome": outcome,
                "status": status,
            }
        )


class _OwnFile(RotatingFileHandler):
    """A log that only root reads."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return TextIOWrapper(os.fdopen(descriptor, "ab"), encoding="utf-8", write_through=True)


def open_log(file: Path) -> logging.Handler:
    """Have the lines written to `file`, 100 MB of them at most; the caller closes what is returned."""
    handler = _OwnFile(file, maxBytes=_FILE_BYTES, backupCount=_FILES - 1)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return handler
