"""The audit log: refusals, and what is done to what is another's; never a token, and never more than it can bear."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker import audit
from gpuhub.broker.audit import AuditLog, AuditRecord, classify_outcome
from tests.support.broker.calls import ask, open_socket
from tests.support.broker.in_process import API, Running, Setting, asgi_broker
from tests.support.broker.rights import MODELS
from tests.support.clocks import StillClock


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """What was written, parsed."""
    told: list[dict[str, Any]] = []

    class ListHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(json.loads(record.getMessage()))

    keep = ListHandler()
    audit.log.addHandler(keep)
    before = audit.log.level
    audit.log.setLevel(logging.INFO)
    yield told
    audit.log.removeHandler(keep)
    audit.log.setLevel(before)


@pytest.fixture
def audited(setting: Setting) -> Setting:
    """The hub knows all callers of the table of rights."""
    setting.own_token = "head"
    setting.hub.models |= MODELS
    return setting


async def send(running: Running, token: str | None, method: str, path: str, body: Any = None) -> int:
    async with running.client(token) as client:
        return (await client.request(method, f"/api/v1{path}", json=body)).status_code


@pytest.mark.parametrize(
    ("token", "method", "path", "body", "told"),
    [
        ("ben", "GET", "/leases/{id}", None, ("ben", "user", "ada", "refused", 404)),
        ("ben", "DELETE", "/leases/{id}", None, ("ben", "user", "ada", "refused", 404)),
        ("ben", "POST", "/leases/{id}/extend", {"time_limit_s": 60}, ("ben", "user", "ada", "refused", 404)),
        ("ben", "POST", "/leases/{id}/force", None, ("ben", "user", None, "refused", 403)),
        ("ben", "GET", "/usage?owner=ada", None, ("ben", "user", "ada", "refused", 403)),
        ("ben", "POST", "/leases", {"profile": "cpu", "key": "x", "owner": "ada"},
         ("ben", "user", "ada", "refused", 403)),
        ("root-nb", "DELETE", "/leases/{id}", None, ("root", "user", "ada", "refused", 404)),
        ("reader", "POST", "/nodes/rig1/drain", {}, ("reader", "service", None, "refused", 403)),
        (None, "GET", "/leases/{id}", None, (audit.UNKNOWN, "", None, "refused", 401)),
        ("expired", "DELETE", "/leases/{id}", None, (audit.UNKNOWN, "", None, "refused", 401)),
        ("narrow", "GET", "/leases", None, ("ada", "", None, "refused", 403)),
        ("root", "GET", "/leases/{id}", None, ("root", "user", "ada", "done", 200)),
        ("root", "DELETE", "/leases/{id}", None, ("root", "user", "ada", "done", 200)),
        ("root", "POST", "/leases/{id}/force", None, ("root", "user", "ada", "failed", 409)),
        ("head", "POST", "/nodes/rig1/drain", {}, ("the head node's administrator", "service", None, "done", 200)),
        ("root", "POST", "/nodes/rig9/cordon", {}, ("root", "user", None, "failed", 404)),
    ],
)  # fmt: skip
async def test_audited_actions(
    audited: Setting, lines: list[dict[str, Any]], token: str | None, method: str, path: str, body: Any, told: Any
) -> None:
    """One line: when, who, from where, what, on which thing, whose it is, and how it went."""
    async with asgi_broker(audited) as running:
        lease = await ask(running, "ada")
        assert lines == []
        await send(running, token, method, path.format(**lease), body)
    (line,) = lines
    assert tuple(line[key] for key in ("who", "kind", "owner", "outcome", "status")) == told
    assert line["from"] == "127.0.0.1"
    assert line["action"].startswith(f"{method} /")
    assert line["object"] in {"", lease["id"], "rig1", "rig9"}
    assert line["time"].endswith("+00:00")


async def test_denied_terminal_is_audited(audited: Setting, lines: list[dict[str, Any]]) -> None:
    """WebSockets are no way around."""
    async with asgi_broker(audited) as running:
        async with running.client("ada") as client:
            job = (await client.post("/api/v1/jobs", json={"run_id": "run-000001"})).json()
        for token in ("ben", "root", None):
            await open_socket(running, f"/api/v1/jobs/{job['id']}/shell", token)
    assert [(line["who"], line["owner"], line["status"]) for line in lines] == [
        ("ben", "ada", 404),
        ("root", "ada", 403),
        (audit.UNKNOWN, None, 401),
    ]
    assert {line["action"] for line in lines} == {"WEBSOCKET /jobs/{job_id}/shell"}


async def test_own_actions_are_not_audited(audited: Setting, lines: list[dict[str, Any]]) -> None:
    """Owners, the spawner at its work, looks at the cluster and mistakes leave no line."""
    async with asgi_broker(audited) as running:
        lease = await ask(running, "spawner", owner="ada")
        await send(running, "spawner", "GET", f"/leases/{lease['id']}")
        for token in ("ada", "ada-nb", "root"):
            for path in ("/cluster", "/leases", "/jobs", "/usage", "/events", "/leases/none"):
                await send(running, token, "GET", path)
        await send(running, "ada", "POST", "/jobs", {"run_id": "x"})
        await send(running, "ada-nb", "DELETE", f"/leases/{lease['id']}")
        await send(running, None, "GET", "/no/such/route")
    assert lines == []


async def test_audit_log_contains_no_tokens(audited: Setting, lines: list[dict[str, Any]]) -> None:
    """Not even one that was sent where none belongs: only parts of known routes are written, and not much of them."""
    secret = "5ec8e7" * 11
    audited.hub.models[secret] = None
    async with asgi_broker(audited) as running, running.client(secret) as client:
        await client.get(f"{API}/leases/l1", params={"token": secret})
        await client.get("/api/v1/leases/l1", params={"token": secret})
        await client.get("/api/v1/leases", headers={"X-Token": secret})
        await client.get("/api/v1/jobs/" + "%C3%BC%0A" * 500)
    assert len(lines) == 3
    assert secret not in json.dumps(lines)
    assert max(len(line["object"]) for line in lines) <= 80


@pytest.mark.parametrize("status", [200, 201, 404, 409, 422, 429, 500, 503])
def test_spawner_is_audited_only_if_refused(status: int) -> None:
    """What it does is in the events."""
    spawner = AuditRecord(name="gpuhub-spawner", kind="service", any_owner=True, owner="ada")
    assert classify_outcome(spawner, "DELETE /leases/{lease_id}", status) is None
    assert classify_outcome(spawner, "POST /nodes/{name}/drain", 403) == "refused"


def line(**parts: str) -> dict[str, Any]:
    """One of Ben's."""
    return {
        "who": "ben",
        "from": "10.0.0.1",
        "action": "GET /leases/{lease_id}",
        "object": "l1",
        "outcome": "refused",
    } | parts


def test_repeated_audit_records_are_counted(lines: list[dict[str, Any]]) -> None:
    """A long poll that is refused a thousand times is two lines: the first, and how often it came again."""
    clock = StillClock()
    log = AuditLog(clock)
    for _ in range(1000):
        log.write(line())
    log.write(line(object="l2"))
    assert [one["object"] for one in lines] == ["l1", "l2"]
    clock.at += audit.REPEAT_S
    log.write(line(object="l3"))
    assert [(one["object"], one.get("again")) for one in lines[2:]] == [("l1", 999), ("l3", None)]


def test_audit_records_are_limited_for_each_caller(lines: list[dict[str, Any]]) -> None:
    """Strangers' objects count for nothing, each caller has a most of lines, and what was left out is said."""
    log = AuditLog(StillClock())
    for number in range(5000):
        log.write(line(who=audit.UNKNOWN, object=f"l{number}"))
        log.write(line(object=f"l{number}"))
    log.write(line(who="rita", outcome="done"))
    assert len(lines) == 1 + audit.MAX_LINES_PER_CALLER + 1
    assert lines[-1]["who"] == "rita"
    log.close()
    assert [(one["who"], one["action"], one["again"]) for one in lines[-2:]] == [
        (audit.UNKNOWN, "GET /leases/{lease_id}", 4999),
        ("ben", audit.DROPPED, 5000 - audit.MAX_LINES_PER_CALLER),
    ]


def test_audit_records_are_limited_in_total(lines: list[dict[str, Any]]) -> None:
    """However many callers there are, memory and log are bounded."""
    log = AuditLog(StillClock())
    for number in range(3 * audit.MAX_LINES):
        log.write(line(who=f"user{number}"))
    assert len(lines) == audit.MAX_LINES
    log.close()
    assert len(lines) == 2 * audit.MAX_LINES


def test_audit_file_is_private_and_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode 0600 whatever the umask, turned over when it is full, and nothing of it goes to the broker's own log."""
    monkeypatch.setattr(audit, "_FILE_BYTES", 1000)
    handler = audit.open_log(tmp_path / "audit.log")
    try:
        log = AuditLog(StillClock())
        for number in range(200):
            log.write(line(who=f"user{number}"))
        assert not audit.log.propagate
    finally:
        audit.log.removeHandler(handler)
        audit.log.propagate = True
        audit.log.setLevel(logging.NOTSET)
        handler.close()
    files = sorted(tmp_path.glob("audit.log*"))
    assert len(files) == 10
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert sum(file.stat().st_size for file in files) <= 10_000
    assert json.loads((tmp_path / "audit.log").read_text().splitlines()[-1])["who"] == "user199"
