"""What a hostile caller sends: forged owners, the same thing many times, numbers that are none, too much, too slowly."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from gpuhub.broker.admission import access
from gpuhub.broker.api import auth, middleware
from gpuhub.broker.api.auth import Authenticator
from gpuhub.broker_api.errors import HubUnreachable, NotKnown, TooManyRequests
from gpuhub.domain.clock import Clock
from gpuhub.domain.rate_limit import RateLimit
from tests.support.broker.calls import ask, open_socket, read
from tests.support.broker.in_process import ACCESS, Setting, asgi_broker, served_broker, until

FORGED = {
    "X-Forwarded-User": "root",
    "X-Remote-User": "root",
    "Remote-User": "root",
    "X-Forwarded-For": "127.0.0.1",
    "X-Forwarded-Host": "evil",
    "X-Real-IP": "127.0.0.1",
    "Forwarded": "for=127.0.0.1;by=root",
    "X-JupyterHub-User": "root",
    "X-HTTP-Method-Override": "DELETE",
    "X-Original-URL": "/services/broker/api/v1/nodes/rig1/drain",
    "Cookie": "jupyterhub-session-id=root; token=root",
}


async def test_only_the_token_identifies_the_caller(setting: Setting) -> None:
    """Headers that a proxy, or another product, would believe change nothing; nor does a token in a cookie or query."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        async with running.client("ben") as client:
            client.headers.update(FORGED)
            assert (await client.get("/api/v1/leases")).json() == []
            assert (await client.get(f"/api/v1/leases/{lease['id']}")).status_code == 404
            assert (await client.post("/api/v1/nodes/rig1/drain", json={})).status_code == 403
            made = await client.post("/api/v1/leases", json={"profile": "cpu", "key": "k"})
            assert made.json()["owner"] == "ben"
        async with running.client(None) as client:
            client.headers.update(FORGED)
            assert (await client.get("/api/v1/leases")).status_code == 401
            assert (await client.get("/api/v1/leases", params={"token": "root"})).status_code == 401
        assert {one["id"] for one in await read(running, "root", "/leases")} == {lease["id"], made.json()["id"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/leases", {"profile": "cpu", "key": "k", "user": "ada"}),
        ("/leases", {"profile": "cpu", "key": "k", "owner_name": "ada"}),
        ("/jobs", {"run_id": "run-000001", "owner": "ada"}),
        ("/jobs/arrays", {"job": {"run_id": "run-000001", "owner": "ada"}, "count": 2}),
    ],
)
async def test_unknown_owner_fields_are_refused(setting: Setting, path: str, body: Any) -> None:
    """A field that the API does not have is refused by its name, and not ignored."""
    async with asgi_broker(setting) as running, running.client("ben") as client:
        answer = await client.post(f"/api/v1{path}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "malformed-request")
        assert [name for name in ("user", "owner_name", "owner") if f"{name}: Extra inputs" in answer.json()["detail"]]
        assert await read(running, "root", "/leases") == []


async def test_concurrent_identical_requests_create_one_lease(setting: Setting) -> None:
    """Twenty replays of one creation, all on their way together: one lease, one job, one array."""
    asked = {
        "/leases": {"profile": "rtx5090", "key": "nb-1"},
        "/jobs": {"run_id": "run-000001"},
        "/jobs/arrays": {"job": {"run_id": "run-000002"}, "count": 2},
    }
    async with asgi_broker(setting) as running, running.client("ada") as client:
        for path, body in asked.items():
            answers = await asyncio.gather(*(client.post(f"/api/v1{path}", json=body) for _ in range(20)))
            assert {answer.status_code for answer in answers} == {201}
            ids = {json.dumps([one["id"] for one in made] if isinstance(made, list) else made["id"])
                   for made in (answer.json() for answer in answers)}  # fmt: skip
            assert len(ids) == 1, path
        assert len(await read(running, "ada", "/leases")) == 4
        assert len(await read(running, "ada", "/jobs")) == 3


async def test_request_keys_are_scoped_to_their_owner(setting: Setting) -> None:
    """Ben, who guessed ada's key, gets a lease of his own and learns nothing of hers."""
    async with asgi_broker(setting) as running:
        first = await ask(running, "ada", profile="cpu", key="same")
        second = await ask(running, "ben", profile="cpu", key="same")
    assert (first["owner"], second["owner"]) == ("ada", "ben")
    assert first["id"] != second["id"]


NUMBERS = (
    "nnodes",
    "nproc_per_node",
    "gpus",
    "min_nnodes",
    "least_memory_mib",
    "priority",
    "time_limit_s",
    "first_worker",
)


@pytest.mark.parametrize(
    "value", ["-101", "1e9", "1.5", "NaN", "Infinity", "-Infinity", '"1; rm -rf /"', "[1]", "{}", "1e400"]
)
async def test_invalid_numbers(setting: Setting, value: str) -> None:
    """Refused, naming the field, whatever JSON parsers make of it; nothing is kept."""
    async with asgi_broker(setting) as running, running.client("root") as client:
        for field in NUMBERS:
            body = f'{{"run_id": "run-000001", "{field}": {value}}}'
            answer = await client.post("/api/v1/jobs", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 422, answer.text
            assert f"{field}: " in answer.json()["detail"]
        assert await read(running, "root", "/jobs") == []


NAMES = [
    "..",
    ".",
    "../ada",
    "a/b",
    "$(id)",
    "a;b",
    "-rf",
    "Ada",
    "ä",
    "a\n",
    "\x00",
    "a b",
    "a" * 65,
    "a" * 5000,
    "~root",
    "",
]


@pytest.mark.parametrize("name", NAMES)
async def test_reserved_names(setting: Setting, name: str) -> None:
    """Owners, servers, profiles and runs: none of them gets as far as a path, a label or a container's name."""
    async with asgi_broker(setting) as running, running.client("spawner") as client:
        lease = {"profile": "cpu", "key": "k", "owner": "ada"}
        changes: list[dict[str, Any]] = [{"owner": name}, {"profile": name}, *([{"server": name}] if name else [])]
        for change in changes:
            answer = await client.post("/api/v1/leases", json=lease | change)
            assert answer.status_code == 422, (change, answer.text)
            assert len(answer.content) < 1000
        async with running.client("ada") as user:
            for change in ({"run_id": name}, {"joins": name}):
                answer = await user.post("/api/v1/jobs", json={"run_id": "run-000001"} | change)
                assert answer.status_code == 422, (change, answer.text)
        assert await read(running, "root", "/leases") == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != ""])
def test_users_with_reserved_names_are_refused(name: str) -> None:
    """Should an authenticator let one in, the broker does not."""
    with pytest.raises(auth.NotAllowed, match="POSIX"):
        auth.parse_identity({"kind": "user", "name": name, "scopes": [ACCESS]})


async def test_notebook_token_of_an_administrator_has_no_administrator_rights() -> None:
    """The scope decides, which a server's own token does not have, and not JupyterHub's flag for the user."""
    model: dict[str, Any] = {"kind": "user", "name": "root", "admin": True}
    own = "access:servers!server=root/"
    assert not auth.parse_identity({**model, "scopes": [ACCESS, own]}).is_admin
    assert not auth.parse_identity({**model, "scopes": [ACCESS, "access:servers", "admin:users"]}).is_admin
    assert auth.parse_identity({**model, "scopes": [ACCESS, auth.ADMIN_SCOPE, "access:servers!user=root"]}).is_admin


@pytest.mark.parametrize(
    "body",
    [b"[" * 1_000_000, b'{"a":' * 150_000, b"[" * 500_000 + b"]" * 500_000, b'"' + b"\\u0000" * 100_000 + b'"',
     b"\xff\xfe" * 1000, b"1" * 1_000_000, b'{"profile": "cpu", "key": "' + b"k" * 1_000_000 + b'"}'],
    ids=["open", "objects", "closed", "nulls", "bytes", "digits", "long"],
)  # fmt: skip
async def test_malicious_bodies_are_refused(setting: Setting, body: bytes) -> None:
    """They are refused in few words, and the broker continues."""
    async with asgi_broker(setting) as running, running.client("ada") as client:
        for path in ("/leases", "/jobs", "/jobs/arrays"):
            answer = await client.post(f"/api/v1{path}", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 422, answer.text[:300]
            assert len(answer.content) < 2000
        assert (await client.get("/api/v1/leases")).json() == []


async def test_slow_request_body_times_out(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends a byte now and then holds its connection for half a minute, and no longer."""
    monkeypatch.setattr(middleware, "RECEIVE_TIMEOUT_S", 0.2)
    begun = asyncio.Event()

    async def send_slowly() -> Any:
        yield b'{"profile": '
        begun.set()
        await asyncio.Event().wait()

    async with asgi_broker(setting) as running, running.client("ada") as client:
        answer = await client.post("/api/v1/leases", content=send_slowly())
    assert begun.is_set()
    assert (answer.status_code, answer.json()["code"]) == (408, "too-slow")


@pytest.mark.parametrize(
    "asked",
    ["worker=-1", "worker=1e9", "worker=NaN", "worker=1;rm", "cols=0", "cols=1001", "rows=-5", "rows=99999999999999999999",
     "command=%00", "command=" + "a" * 9000, "worker=0&worker=-1"],
)  # fmt: skip
async def test_invalid_terminal_requests_are_refused(setting: Setting, asked: str) -> None:
    """Denied as any request would be, without a word to a container; so are ids that are none."""
    async with asgi_broker(setting) as running:
        async with running.client("ada") as client:
            job = (await client.post("/api/v1/jobs", json={"run_id": "run-000001"})).json()["id"]
        for path in (f"/api/v1/jobs/{job}/shell?{asked}", f"/api/v1/jobs/{'x' * 5000}/shell", "/api/v1/jobs/%00/shell"):
            assert 400 <= await open_socket(running, path, "ada") < 500, path
        assert all(not node.execs.running for node in setting.nodes.values())


def test_broker_survives_oversized_and_malformed_requests(setting: Setting) -> None:
    """Over a real connection: long headers, broken lines, smuggled lengths; every one is refused or cut off.

    Headers without end are in test_server.py.
    """
    head = "GET /services/broker/api/v1/leases HTTP/1.1\r\nHost: x\r\n"
    broken = [
        head + "X: " + "a" * 1_000_000 + "\r\n\r\n",
        head + "".join(f"X-{number}: a\r\n" for number in range(20_000)) + "\r\n",
        head + "Authorization: token " + "a" * 60_000 + "\r\n\r\n",
        "GET /" + "a" * 200_000 + " HTTP/1.1\r\nHost: x\r\n\r\n",
        head + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        head + "Content-Length: -5\r\n\r\n",
        "\x00\x01\x02" * 1000,
        "POST /services/broker/api/v1/leases HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    ]
    with served_broker(setting) as running:
        port = int(running.url.split(":")[2].split("/")[0])
        for request in broken:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                first = send_raw(connection, request.encode())
                assert first.startswith((b"HTTP/1.1 4", b"")), first
                assert not first.startswith((b"HTTP/1.1 2", b"HTTP/1.1 5")), (request[:80], first[:200])
        assert running.send("GET", "/api/v1/leases").status_code == 200


def send_raw(connection: socket.socket, request: bytes) -> bytes:
    """What comes back first; nothing when the connection is cut."""
    try:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(4096)
    except (ConnectionError, OSError):
        return b""


# -- too much ---------------------------------------------------------------------------------------------------------


class CountingHub:
    """A hub that knows one token, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.at_once = self.most_at_once = 0
        self.is_down = False

    async def fetch_token_model(self, token: str) -> Mapping[str, Any] | None:
        self.asked += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.is_down:
            raise HubUnreachable("down")
        return {"kind": "user", "name": "ada", "scopes": [ACCESS]} if token == "ada" else None


async def test_unknown_tokens_are_rate_limited() -> None:
    """From one address a hundred at once and a few a second; others, and who is known, notice nothing."""
    now = [1000.0]
    hub = CountingHub()
    identities = Authenticator(hub, Clock())
    identities._wrong = auth.UnknownTokenLimiter(auth.WRONG_TOKENS, lambda: now[0])
    assert (await identities.identify("token ada", "10.0.0.9")).name == "ada"

    async def try_token(number: int) -> type[BaseException]:
        with pytest.raises((NotKnown, TooManyRequests)) as refused:
            await identities.identify(f"token guess{number}", "10.0.0.9")
        return refused.type

    found = await asyncio.gather(*(try_token(number) for number in range(10_000)))
    assert found.count(NotKnown) == auth.WRONG_TOKENS.burst
    assert hub.asked == 1 + auth.WRONG_TOKENS.burst
    assert hub.most_at_once <= auth._MAX_CHECKS
    assert (await identities.identify("token ada", "10.0.0.9")).name == "ada"
    with pytest.raises(NotKnown):
        await identities.identify("token other", "10.0.0.10")
    now[0] += 1
    again = [await try_token(number) for number in range(20_000, 20_010)]
    assert again.count(NotKnown) == auth.WRONG_TOKENS.per_second


async def test_unknown_tokens_do_not_evict_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there were, those that the hub knew are served while it is away; and memory is bounded."""
    monkeypatch.setattr(auth, "MAX_TOKENS", 50)
    hub = CountingHub()
    identities = Authenticator(hub, Clock())
    await identities.identify("token ada")
    for number in range(200):
        with pytest.raises(NotKnown):
            await identities.identify(f"token guess{number}", f"10.0.{number}.1")
    assert len(identities._unknown) == 50
    hub.is_down = True
    assert (await identities.identify("token ada")).name == "ada"


async def test_failed_checks_during_a_hub_outage_are_not_counted() -> None:
    """Tokens that could not be checked do not count as wrong."""
    hub = CountingHub()
    identities = Authenticator(hub, Clock())
    hub.is_down = True
    for number in range(int(auth.WRONG_TOKENS.burst) * 2):
        with pytest.raises(HubUnreachable):
            await identities.identify(f"token guess{number}", "10.0.0.9")
    hub.is_down = False
    assert (await identities.identify("token ada", "10.0.0.9")).name == "ada"


async def test_requests_of_a_user_are_rate_limited(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ada's loop is refused with a word when to come again; ben, administrators and the spawner are served."""
    monkeypatch.setattr(auth, "REQUESTS", RateLimit(burst=20, per_second=0.001))
    async with asgi_broker(setting) as running:
        async with running.client("ada") as client:
            answers = [await client.get("/api/v1/leases") for _ in range(30)]
        assert [answer.status_code for answer in answers] == [200] * 20 + [429] * 10
        assert answers[-1].json()["code"] == "too-many-requests"
        assert int(answers[-1].headers["Retry-After"]) > 0
        for token in ("ben", "root", "spawner"):
            async with running.client(token) as client:
                assert {(await client.get("/api/v1/leases")).status_code for _ in range(20)} == {200}


async def test_long_polls_of_a_user_are_limited(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long polls are bounded for each user, and come free again."""
    monkeypatch.setattr(access, "POLLS", access.StreamKind(description="polls", per_owner=3, total=10))
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        path = f"/leases/{lease['id']}"
        wait = {"wait_s": 20, "version": lease["version"]}
        waiting = [asyncio.ensure_future(read(running, "ada", path, **wait)) for _ in range(3)]
        total = running.app.state.broker._streams._total
        await until(lambda: total[access.POLLS] == 3, "all of them wait")
        refused = await read(running, "ada", path, 429, **wait)
        assert refused["code"] == "too-many-streams"
        assert (await read(running, "ada", path))["id"] == lease["id"]
        root = asyncio.ensure_future(read(running, "root", path, **wait))
        async with running.client("ada") as client:
            await client.delete(f"/api/v1{path}")
        assert {found["state"] for found in await asyncio.gather(*waiting, root)} <= {"releasing", "released"}
        assert total[access.POLLS] == 0
