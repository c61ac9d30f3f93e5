"""Servers of jobs through a broker with a port: a real server, and gpu-launch's own courier on simulated nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import websocket

from gpuhub.broker.api import auth, streams
from gpuhub.broker.api.routes import port_routes
from gpuhub.broker.files.user_files import UserFiles
from gpuhub.broker.ports import connections
from tests.support.broker.in_process import Running, Setting, served_broker, until
from tests.support.browser.chromium import chromium
from tests.support.docker.simulated_nodes import wait_until
from tests.support.hub.port_server import PortServer, endless_requests


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A broker with a port, for all tests that leave it as it was."""
    with served_broker(Setting(tmp_path_factory.mktemp("ports"))) as found:
        yield found


@pytest.fixture
def fresh(setting: Setting) -> Iterator[Running]:
    """A broker of one test."""
    with served_broker(setting) as found:
        yield found


def submit(running: Running, port: int | None, **more: Any) -> str:
    """Return the id of a job of ada's that runs."""
    made = running.send("POST", "/api/v1/jobs", json={"run_id": "run-000001", "detached": True, "port": port} | more)
    assert made.status_code == 201, made.text
    path = f"/api/v1/jobs/{made.json()['id']}"
    wait_until(lambda: running.send("GET", path).json()["state"] == "running", "the job runs")
    return str(made.json()["id"])


@pytest.fixture(scope="module")
def job(running: Running, module_server: PortServer) -> str:
    """Ada's job with a port that ben may use."""
    return submit(running, module_server.port, port_users=["ben"])


def programs(running: Running) -> list[Any]:
    return [one for node in running.setting.nodes.values() for one in node.execs.running if one.poll() is None]


def open_visit(running: Running, job: str, who: str = "ada") -> str:
    """Return the path of a visit below the broker's address."""
    answer = running.send("POST", f"/api/v1/jobs/{job}/visits", who)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["path"]).removeprefix("/services/broker")


def connect(running: Running, path: str, who: str | None = None) -> websocket.WebSocket:
    header = [] if who is None else [f"Authorization: Bearer {who}"]
    url = f"{running.url.replace('http', 'ws', 1)}{path}"
    return websocket.create_connection(url, header=header, timeout=20, suppress_origin=True)


@pytest.mark.parametrize("scheme", ["token", "Bearer"])
def test_program_with_a_token_reaches_the_server(running: Running, job: str, scheme: str) -> None:
    """Method, path, query and body arrive as they were sent."""
    answer = httpx.post(
        f"{running.url}/ports/{job}/echo?a=%2Fb&c", content=b"x" * 3_000_000,
        headers={"Authorization": f"{scheme} ben"}, trust_env=False, timeout=30,
    )  # fmt: skip
    assert answer.status_code == 200
    assert answer.text == "a=%2Fb&c|" + "x" * 3_000_000
    assert len(running.send("GET", f"/ports/{job}/large").content) == 16 * 65536 * 4


@pytest.mark.parametrize(
    ("token", "status"),
    [(None, 401), ("unknown", 401), ("narrow", 403), ("eve", 404), ("root", 403), ("spawner", 403), ("own-token", 403)],
)
def test_only_owner_and_named_users_reach_the_server(
    running: Running, server: PortServer, job: str, token: str | None, status: int
) -> None:
    """Others do not learn that the job exists; administrators are refused; nothing is started for them."""
    before = programs(running)
    for method, path in (("GET", f"/ports/{job}/"), ("POST", f"/api/v1/jobs/{job}/visits")):
        answer = running.send(method, path, token)
        assert answer.status_code == status
        assert answer.headers["Content-Type"] == "application/problem+json"
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        connect(running, f"/ports/{job}/socket", token)
    assert refused.value.status_code == status
    assert server.received == []
    assert [one for one in programs(running) if one not in before] == []


def test_secrets_stay_outside(running: Running, server: PortServer, job: str) -> None:
    """The server sees who visits it, and neither cookies nor tokens nor addresses that a client makes up."""
    secrets = {
        "Cookie": "jupyterhub-session-id=secret", "X-Forwarded-User": "root", "X-Forwarded-For": "1.2.3.4",
        "X-XSRFToken": "secret", "Referer": "https://hub.lan/user/ada/?token=secret", "Connection": "X-Hop",
        "X-Hop": "secret", "X-Own": "kept",
    }  # fmt: skip
    for path, who in ((f"/ports/{job}/echo", "ben"), (f"{open_visit(running, job, 'ben')}echo", None)):
        running.send("GET", path, who, headers=secrets)
    own = {"X-Own": "kept", "Authorization": "Bearer secret"}
    running.send("GET", f"{open_visit(running, job, 'ben')}echo", None, headers=own)
    assert len(server.received) == 3
    for received in server.received:
        assert "secret" not in json.dumps(received)
        assert (received["x-forwarded-user"], received["x-own"]) == ("ben", "kept")
        assert received["host"] == f"localhost:{server.port}"
        assert "1.2.3.4" not in json.dumps(received)


def test_response_cannot_change_what_the_browser_keeps_for_the_hub(running: Running, job: str) -> None:
    """Cookies, storage and passwords of the hub are out of reach, and the page is in a sandbox of its own."""
    for path, who in ((f"/ports/{job}/", "ada"), (open_visit(running, job), None)):
        answer = running.send("GET", path, who)
        for name in ("Set-Cookie", "Clear-Site-Data", "WWW-Authenticate", "X-Accel-Redirect",
                     "Access-Control-Allow-Origin"):  # fmt: skip
            assert name not in answer.headers
        assert answer.headers["X-App"] == "kept"
        assert answer.headers["Content-Security-Policy"].startswith("sandbox ")
        assert "allow-same-origin" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_page_may_read_its_own_addresses_alone(running: Running, job: str) -> None:
    """A sandboxed page has the origin `null`: its own server answers it, after a preflight too; other sites get nothing."""
    visit = open_visit(running, job)
    page = {"Origin": "null", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-own"}
    asked = running.send("OPTIONS", f"{visit}echo", None, headers=page)
    assert asked.status_code == 204
    assert asked.headers["Access-Control-Allow-Headers"] == "x-own"
    answer = running.send("POST", f"{visit}echo", None, headers={"Origin": "null"}, content=b"hi")
    assert (answer.text, answer.headers["Access-Control-Allow-Origin"]) == ("|hi", "null")
    other = running.send("GET", f"{visit}echo", None, headers={"Origin": "https://evil.lan"})
    assert "Access-Control-Allow-Origin" not in other.headers


def test_redirects_stay_below_the_servers_address(running: Running, server: PortServer, job: str) -> None:
    """The server knows only its own root; other sites stay other sites."""
    for location, sent in (
        ("", f"/services/broker/ports/{job}/echo?x=1"), ("echo", "echo"), ("//evil.lan/x", "//evil.lan/x"),
        (f"http://127.0.0.1:{server.port}/a?b", f"/services/broker/ports/{job}/a?b"),
    ):  # fmt: skip
        answer = running.send("GET", f"/ports/{job}/away/{location.replace('?', '%3F')}", follow_redirects=False)
        assert answer.headers["Location"] == sent


def test_stream_is_passed_on_as_it_comes_and_ends_with_its_client(
    running: Running, server: PortServer, job: str
) -> None:
    """A client that goes away ends the request at the job's server."""
    url = f"{running.url}/ports/{job}/ticks"
    with httpx.stream("GET", url, headers={"Authorization": "token ada"}, trust_env=False, timeout=20) as answer:
        assert next(answer.iter_text()).startswith("data: 0")
    wait_until(lambda: server.cut == ["/ticks"], "the server notices")
    user_files: UserFiles = running.app.state.user_files
    wait_until(lambda: not user_files.streams._open, "the place is free")


def test_websocket_is_passed_on(running: Running, job: str) -> None:
    """Messages, subprotocol, close codes and the server's refusals arrive."""
    before = programs(running)
    header = "Authorization: Bearer ben"
    for path, options in (
        (f"/ports/{job}/socket", {"header": [header], "suppress_origin": True}),
        (f"{open_visit(running, job, 'ben')}socket", {"origin": "null"}),
    ):
        url = f"{running.url.replace('http', 'ws', 1)}{path}"
        socket = websocket.create_connection(url, timeout=20, subprotocols=["a", "b"], **options)
        assert socket.getsubprotocol() == "b"
        socket.send("x" * 100_000)
        assert socket.recv() == "x" * 100_000 + " ben"
        socket.send("bye")
        assert socket.recv_data()[0] == websocket.ABNF.OPCODE_CLOSE
        socket.shutdown()
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        connect(running, f"/ports/{job}/nothing", "ada")
    assert refused.value.status_code == 503
    wait_until(lambda: len(programs(running)) <= len(before), "connections of ended WebSockets are closed")


def test_pages_of_other_sites_open_no_websocket(running: Running, job: str) -> None:
    """Not even with the address of a visit."""
    url = running.url.replace("http", "ws", 1)
    for path, header, origin in ((f"/ports/{job}/socket", ["Authorization: token ada"], "null"),
                                 (f"{open_visit(running, job)}socket", [], "https://evil.lan")):  # fmt: skip
        with pytest.raises(websocket.WebSocketBadStatusException) as refused:
            websocket.create_connection(f"{url}{path}", header=header, origin=origin, timeout=20)
        assert refused.value.status_code == 403


def test_browser_is_sent_through_the_hub(running: Running, job: str) -> None:
    """Without a token, and with a key that is over; the rest of the address is kept. Programs get an error."""
    for path in (f"/ports/{job}/a%20b?c=d", f"/visits/{job}/wrong/a%20b?c=d"):
        answer = running.send("GET", path, None, headers={"Sec-Fetch-Mode": "navigate"}, follow_redirects=False)
        assert answer.status_code == 303
        assert answer.headers["Location"] == f"/hub/gpuhub/ports/{job}?to=%2Fa%2520b%3Fc%3Dd"
        assert running.send("GET", path, None, headers={"Sec-Fetch-Mode": "cors"}).status_code == 401


def test_visit_is_for_one_job_and_ends_with_its_token(
    fresh: Running, server: PortServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is asked again whether it knows the token with which the visit was opened."""
    job = submit(fresh, server.port, port_users=["ben"])
    monkeypatch.setattr(auth, "KNOWN_TOKEN_S", 0.0)
    visit = open_visit(fresh, job, "ben")
    assert fresh.send("GET", f"{visit}echo", None).status_code == 200
    other = submit(fresh, server.port, run_id="run-000002")
    assert fresh.send("GET", f"{visit.replace(job, other)}echo", None).status_code == 401
    fresh.setting.hub.models["ben"] = None
    assert fresh.send("GET", f"{visit}echo", None).status_code == 401


def test_waiting_page_tries_again(fresh: Running, server: PortServer) -> None:
    """A server that does not listen yet is no error for a person; a program gets the reason and when to try again."""
    job = submit(fresh, server.port, port_users=["ben"])
    closed = submit(fresh, 1, run_id="run-000002")
    answer = fresh.send("GET", f"/ports/{closed}/")
    assert answer.status_code == 503
    assert answer.json()["detail"] == "nothing listens on port 1 of the job yet"
    assert "Retry-After" in answer.headers
    page = fresh.send("GET", open_visit(fresh, closed), None, headers={"Sec-Fetch-Mode": "navigate"})
    assert (page.status_code, page.headers["Refresh"]) == (503, str(port_routes._REFRESH_S))
    fresh.send("DELETE", f"/api/v1/jobs/{job}")
    wait_until(lambda: fresh.send("GET", f"/ports/{job}/").status_code == 409, "the port ends with the job")


def test_jobs_without_a_port_have_none(running: Running) -> None:
    """And a port is refused where it means nothing."""
    job = submit(running, None, run_id="run-000009")
    assert running.send("GET", f"/ports/{job}/").json()["detail"] == f"job {job} has no port: submit it with --port"
    for wrong in ({"port": 0}, {"port": 70000}, {"port_users": ["ben"]}, {"port": 80, "detached": False},
                  {"port": 80, "port_users": ["x y"]}, {"port": 80, "port_users": [f"u{n}" for n in range(33)]}):  # fmt: skip
        body = {"run_id": "run-000003", "detached": True} | wrong
        assert running.send("POST", "/api/v1/jobs", json=body).status_code == 422
    array = {"job": {"run_id": "run-000003", "detached": True, "port": 80}, "count": 2}
    assert running.send("POST", "/api/v1/jobs/arrays", json=array).status_code == 422


def test_port_is_for_users_of_the_hub(running: Running) -> None:
    """A misspelt name is refused, instead of waiting for someone who takes it."""
    running.setting.hub.unknown_users.add("bne")
    body = {"run_id": "run-000004", "detached": True, "port": 80, "port_users": ["ben", "bne"]}
    refused = running.send("POST", "/api/v1/jobs", json=body)
    assert refused.status_code == 404
    assert refused.json()["detail"] == "the hub has no user 'bne': a user exists there after the first login"


def test_port_survives_a_restart_of_the_broker(setting: Setting, server: PortServer) -> None:
    """Who may use it is in the store; visits are opened again."""
    with served_broker(setting) as running:
        job = submit(running, server.port, port_users=["ben", "ada", "ben"])
        visit = open_visit(running, job)
    with served_broker(setting) as running:
        assert running.send("GET", f"/ports/{job}/echo", "ben").status_code == 200
        assert running.send("GET", f"/api/v1/jobs/{job}").json()["port_users"] == ["ben"]
        assert running.send("GET", visit, None).status_code == 401


def test_connections_are_kept_and_then_closed(
    fresh: Running, server: PortServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests one after another share a process in the container, which ends when no request comes."""
    job = submit(fresh, server.port, port_users=["ben"])
    for _ in range(20):
        assert fresh.send("GET", f"/ports/{job}/echo").status_code == 200
    assert sum(len(node.execs.running) for node in fresh.setting.nodes.values()) == 1
    monkeypatch.setattr(connections, "IDLE_S", 0.0)
    monkeypatch.setattr(connections, "_SWEEP_S", 0.01)
    wait_until(lambda: programs(fresh) == [], "the process has ended", deadline_s=30)


async def test_one_visitor_cannot_take_all_connections(running: Running, job: str) -> None:
    """Of as many requests as a server has connections a part runs; the others wait for one of the visitor's to end."""
    url = f"{running.url}/ports/{job}"
    async with endless_requests(url, "ben", connections.MAX_CONNECTIONS) as responses:
        await until(lambda: len(responses) == connections.MAX_OF_VISITOR, "a part of them runs")
        answer = await asyncio.to_thread(running.send, "GET", f"/ports/{job}/echo")
        assert (answer.status_code, len(responses)) == (200, connections.MAX_OF_VISITOR)
        await responses[0].aclose()
        await until(lambda: len(responses) == connections.MAX_OF_VISITOR + 1, "the next one runs")
    await until(lambda: not running.app.state.user_files.streams._open, "all have ended")


async def test_requests_that_wait_too_long_are_refused(
    running: Running, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the visitor's name, the limit and the remedy."""
    async with endless_requests(f"{running.url}/ports/{job}", "ben", connections.MAX_OF_VISITOR) as responses:
        await until(lambda: len(responses) == connections.MAX_OF_VISITOR, "they run")
        monkeypatch.setattr(connections, "MAX_WAIT_S", 0.2)
        answer = await asyncio.to_thread(running.send, "GET", f"/ports/{job}/echo", "ben")
    await until(lambda: not running.app.state.user_files.streams._open, "all have ended")
    assert answer.status_code == 503
    assert answer.json()["detail"].startswith("ben has 8 requests to this server already, which is the limit: wait")


def test_one_visitor_cannot_take_all_places(running: Running, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit of requests at the same time, further ones are refused until one ends."""
    monkeypatch.setattr(
        port_routes.access, "PORTS", port_routes.access.StreamKind(description="requests", per_owner=1, total=9)
    )
    url, header = f"{running.url}/ports/{job}/ticks", {"Authorization": "token ben"}
    with httpx.stream("GET", url, headers=header, trust_env=False, timeout=20) as first:
        assert first.status_code == 200
        assert running.send("GET", f"/ports/{job}/echo", "ben").status_code == 429
        assert running.send("GET", f"/ports/{job}/echo", "ada").status_code == 200


def test_open_websocket_ends_with_its_visitors_access(
    fresh: Running, server: PortServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revoked token ends what is open."""
    job = submit(fresh, server.port, port_users=["ben"])
    monkeypatch.setattr(streams, "RECHECK_S", 0.2)
    monkeypatch.setattr(auth, "KNOWN_TOKEN_S", 0.1)
    socket = connect(fresh, f"/ports/{job}/socket", "ben")
    fresh.setting.hub.models["ben"] = None
    kind, data = socket.recv_data()
    assert (kind, data[:2]) == (websocket.ABNF.OPCODE_CLOSE, (1008).to_bytes(2, "big"))
    socket.shutdown()


@pytest.mark.browser
def test_page_works_in_a_browser_and_is_alone(running: Running, server: PortServer, job: str) -> None:
    """Scripts, styles, requests and WebSockets of a page work; the cookies and pages of the hub are out of its reach."""
    with chromium() as browser:
        context = browser.new_context()
        origin = running.url.removesuffix("/services/broker")
        context.add_cookies([{"name": "jupyterhub-session-id", "value": "secret", "url": origin}])
        page = context.new_page()
        page.goto(f"{running.url}{open_visit(running, job, 'ben')}")
        page.wait_for_function("document.title === 'done'")
        found = json.loads(page.inner_text("#out"))
        color = page.evaluate("getComputedStyle(document.getElementById('out')).color")
        assert page.evaluate("window.origin") == "null"
        cookies = {cookie["name"]: cookie["value"] for cookie in context.cookies()}
    assert found == {"json": "|hi", "stolen": "", "stored": "1", "hub": "TypeError", "socket": "hello ben"}
    assert (color, cookies) == ("rgb(1, 2, 3)", {"jupyterhub-session-id": "secret"})
    assert "secret" not in json.dumps(server.received)
