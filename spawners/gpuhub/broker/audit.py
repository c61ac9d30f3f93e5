"""The audit log: refused requests, and actions on objects of other owners, one line of JSON each."""

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

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuhub.domain.clock import Clock

#: Logger of the audit lines; `open_log` gives it a file.
log = logging.getLogger("gpuhub.audit")

REFUSED, DONE, FAILED = "refused", "done", "failed"
#: Name of callers without a token that the hub knows; no user can have it.
UNKNOWN = "(unknown)"
#: Action of a line that counts how many lines about one caller were dropped.
DROPPED = "too many lines at once"

#: Actions for administrators only, as `METHOD /route`.
PRIVILEGED = frozenset(
    {
        "POST /leases/{lease_id}/force",
        "POST /nodes/{name}/cordon",
        "POST /nodes/{name}/drain",
        "POST /nodes/{name}/gpus/{index}/accept",
        "POST /nodes/{name}/power",
        "POST /nodes/{name}/undrain",
        "POST /reservations",
        "PUT /bench",
        "GET /limits",
        "PUT /limits/{owner}",
        "DELETE /limits/{owner}",
        "DELETE /reservations/{reservation_id}",
        "POST /services/{name}/restart",
        "GET /services/{name}/logs",
    }
)

#: Time for which repetitions of a caller's action on the same object are counted instead of written, seconds.
REPEAT_S = 60.0
#: Maximum number of different lines in `REPEAT_S`, so that a flood cannot fill the disk.
MAX_LINES = 1000
#: Maximum number of different lines of one caller in `REPEAT_S`, so that a flood cannot hide other callers.
MAX_LINES_PER_CALLER = 100
_MAX_CHARACTERS = 80
_FILE_BYTES = 10 * 1024**2
_FILES = 10


@dataclass(slots=True)
class AuditRecord:
    """The facts about one request that are collected while it is served."""

    #: Name of the caller, as the hub identifies it; empty if unknown.
    name: str = ""
    #: `user` or `service`; empty for a caller who may not use the broker.
    kind: str = ""
    is_admin: bool = False
    #: Whether the caller acts for all owners, as the hub's spawner does.
    any_owner: bool = False
    #: Owner of the lease, job or limits in question; None for none.
    owner: str | None = None
    #: Why a service did it, for administrators; empty if the line says it all.
    reason: str = ""


_current_record: ContextVar[AuditRecord | None] = ContextVar("audit_record", default=None)


def note_name(name: str) -> None:
    """Record the caller's name, whether or not the caller may use the broker."""
    if (record := _current_record.get()) is not None:
        record.name = name


def note_caller(name: str, *, is_user: bool, is_admin: bool, any_owner: bool) -> None:
    """Record a caller who may use the broker."""
    if (record := _current_record.get()) is not None:
        record.name, record.kind = name, "user" if is_user else "service"
        record.is_admin, record.any_owner = is_admin, any_owner


def note_owner(owner: str) -> None:
    """Record the owner of the requested object, also where the caller may not know that it exists."""
    if (record := _current_record.get()) is not None:
        record.owner = owner


def note_reason(reason: str) -> None:
    """Record why a service does what it asks for."""
    if (record := _current_record.get()) is not None:
        record.reason = reason


def client_address(scope: Scope) -> str:
    """Return the address of the client; for a request through the head node's proxy, that of the proxy's client.

    `server` removes the header from the requests of all other clients.
    """
    client = scope.get("client") or ("",)
    return Headers(scope=scope).get("x-forwarded-for") or str(client[0])


def classify_outcome(record: AuditRecord, action: str, status: int) -> str | None:
    """Return `refused`, `done` or `failed`; None for a request that is not logged.

    Actions of callers on their own objects are not logged, nor are those of the hub's spawner, which cause events.
    """
    if status in {401, 403}:
        return REFUSED
    is_foreign = record.owner is not None and record.owner != record.name
    if not record.kind or record.any_owner:
        return None
    if status == 404 and is_foreign and not record.is_admin:
        return REFUSED
    if is_foreign or action in PRIVILEGED:
        return DONE if status < 400 else FAILED
    return None


class AuditLog:
    """Writes lines at a limited rate, and counts repetitions and dropped lines."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Lines of the last `REPEAT_S`, oldest first: when it was written, the line, and its number of repetitions.
        self._recent: OrderedDict[tuple[str, ...], tuple[float, dict[str, Any], int]] = OrderedDict()
        self._lines: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one line, or count it as a repetition."""
        self._forget(self._clock.monotonic() - REPEAT_S)
        is_known = line["who"] != UNKNOWN
        # An unknown caller could name any number of objects.
        key = tuple(str(line[part]) for part in ("who", "from", "action", "outcome", *(["object"] if is_known else [])))
        if key in self._recent:
            since, first, repetitions = self._recent[key]
            self._recent[key] = (since, first, repetitions + 1)
        elif len(self._recent) < MAX_LINES and self._lines[line["who"]] < MAX_LINES_PER_CALLER:
            self._recent[key] = (self._clock.monotonic(), dict(line), 0)
            self._lines[line["who"]] += 1
            self._emit(line)
        elif len(self._dropped) < MAX_LINES or line["who"] in self._dropped:
            self._dropped[line["who"]] += 1

    def close(self) -> None:
        """Write the counts of repetitions and dropped lines."""
        self._forget(self._clock.monotonic())

    def _forget(self, before: float) -> None:
        count = len(self._recent)
        while self._recent and next(iter(self._recent.values()))[0] <= before:
            _, (_, line, repetitions) = self._recent.popitem(last=False)
            self._lines[line["who"]] -= 1
            if repetitions:
                self._emit({**line, "again": repetitions})
        if len(self._recent) == count:
            return
        self._lines += Counter()  # drops callers with a count of zero
        for who in [name for name in self._dropped if self._lines[name] < MAX_LINES_PER_CALLER]:
            self._emit({"who": who, "action": DROPPED, "again": self._dropped.pop(who)})

    def _emit(self, line: Mapping[str, Any]) -> None:
        now = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds")
        log.info(json.dumps({"time": now, **line}))


class AuditMiddleware:
    """ASGI middleware that logs each request that `classify_outcome` selects, as soon as it is answered."""

    def __init__(self, app: ASGIApp, audit: AuditLog, prefix: str) -> None:
        self._app = app
        self._audit = audit
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        record = AuditRecord()

        async def watch(message: Message) -> None:
            status = message.get("status")
            if status is not None and message["type"].endswith("http.response.start"):
                self._write(scope, record, int(status))
            await send(message)

        token = _current_record.set(record)
        try:
            await self._app(scope, receive, watch)
        finally:
            _current_record.reset(token)

    def _write(self, scope: Scope, record: AuditRecord, status: int) -> None:
        route = scope.get("route")
        path = str(getattr(route, "path", "")).rpartition(self._prefix)[2]
        action = f"{scope.get('method', 'WEBSOCKET')} {path}"
        outcome = classify_outcome(record, action, status)
        if not path or outcome is None:
            return
        self._audit.write(
            {
                "who": record.name or UNKNOWN,
                "kind": record.kind,
                "from": client_address(scope),
                "action": action,
                "object": ",".join(map(str, scope.get("path_params", {}).values()))[:_MAX_CHARACTERS],
                "owner": record.owner,
                "outcome": outcome,
                "status": status,
                **({"reason": record.reason} if record.reason else {}),
            }
        )


class _PrivateLogFile(RotatingFileHandler):
    """A log file that only root can read."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return TextIOWrapper(os.fdopen(descriptor, "ab"), encoding="utf-8", write_through=True)


def open_log(file: Path) -> logging.Handler:
    """Write the lines to `file`, at most 100 MB with its rotated copies; the caller closes the returned handler."""
    handler = _PrivateLogFile(file, maxBytes=_FILE_BYTES, backupCount=_FILES - 1)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return handler
