"""Terminals in workers over real WebSockets: gpu-launch's own courier on simulated nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import websocket

from gpuhub.broker.api import auth, streams
from gpuhub.broker.api.routes.terminal import check_origin, parse_resize
from gpuhub.broker.files.user_files import UserFiles
from gpuhub.common.errors import NotAllowed
from tests.support.broker.in_process import Running, Setting, served_broker
from tests.support.docker.simulated_nodes import wait_until


@pytest.fixture
def running(setting: Setting) -> Iterator[Running]:
    """A broker with a port."""
    with served_broker(setting) as found:
        yield found


@pytest.fixture
def job(running: Running) -> str:
    """Ada's job with one running worker."""
    made = running.send("POST", "/api/v1/jobs", json={"run_id": "run-000001", "detached": True})
    path = f"/api/v1/jobs/{made.json()['id']}"
    wait_until(lambda: running.send("GET", path).json()["state"] == "running", "the job runs")
    return str(made.json()["id"])


def connect(running: Running, job: str, who: str | None = "ada", **asked: Any) -> websocket.WebSocket:
    """Open a terminal; the library sends an Origin header as browsers do."""
    url = f"{running.url.replace('http', 'ws', 1)}/api/v1/jobs/{job}/shell?{urlencode(asked)}"
    header = [] if who is None else [f"Authorization: token {who}"]
    return websocket.create_connection(url, header=header, timeout=20)


@contextmanager
def terminal_of(running: Running, job: str, **asked: Any) -> Iterator[websocket.WebSocket]:
    """Open a terminal and close it afterwards, whatever the server did."""
    terminal = connect(running, job, **asked)
    try:
        yield terminal
    finally:
        terminal.shutdown()


def read_all(terminal: websocket.WebSocket) -> tuple[str, dict[str, Any]]:
    """Return the complete output and the final message."""
    shown = b""
    while True:
        kind, data = terminal.recv_data()
        if kind == websocket.ABNF.OPCODE_TEXT:
            return shown.decode(), json.loads(data)
        assert kind == websocket.ABNF.OPCODE_BINARY
        shown += data


def read_until(terminal: websocket.WebSocket, text: str) -> str:
    shown = ""
    while text not in shown:
        shown += terminal.recv_data()[1].decode()
    return shown


def programs(running: Running) -> list[Any]:
    return [one for node in running.setting.nodes.values() for one in node.execs.running]


@pytest.mark.parametrize(
    ("command", "code"), [("exit 3", 3), ("true", 0), ("kill -TERM $$", 143), ("no-such-thing", 127)]
)
def test_a_command_ends_with_its_exit_code(running: Running, job: str, command: str, code: int) -> None:
    """Exit codes are those of a shell, and the connection is closed afterwards."""
    with terminal_of(running, job, command=command) as terminal:
        assert read_all(terminal)[1] == {"exit": code}
        assert terminal.recv_data()[0] == websocket.ABNF.OPCODE_CLOSE
    wait_until(lambda: all(one.poll() is not None for one in programs(running)), "nothing is left")


def test_terminal_gets_keys_and_window_size(setting: Setting, running: Running, job: str) -> None:
    """A login shell in the home can be resized, and its last output is not lost."""
    with terminal_of(running, job, cols=97, rows=31) as terminal:
        terminal.send_binary(b"PS1=; stty size; pwd; echo sum-$((40+2)); shopt -q login_shell && echo a-$((1))-login\n")
        shown = read_until(terminal, "a-1-login\r\n")
        assert "31 97\r\n" in shown
        assert f"{setting.home('ada')}\r\n" in shown
        assert "sum-42\r\n" in shown
        terminal.send(json.dumps({"resize": [120, 40]}))
        terminal.send("nonsense")
        terminal.send_binary(b"stty size\n")
        read_until(terminal, "40 120\r\n")
        terminal.send_binary(b"seq 20000; exit 5\n")
        shown, last = read_all(terminal)
        assert "\r\n19999\r\n20000\r\n" in shown
        assert last == {"exit": 5}


def test_keys_after_the_end_lose_no_output(running: Running, job: str) -> None:
    """A slow client continues to type after the shell has ended, while output is still being sent."""
    with terminal_of(running, job, command="seq 300000; exit 5") as terminal:
        shown = b""
        while True:
            kind, data = terminal.recv_data()
            if kind == websocket.ABNF.OPCODE_TEXT:
                break
            shown += data
            terminal.send_binary(b"x")
        assert b"\r\n300000\r\n" in shown
        assert json.loads(data) == {"exit": 5}


def test_disconnect_ends_the_terminals_processes(tmp_path: Path, running: Running, job: str) -> None:
    """Processes that ignore SIGHUP end too, in the foreground and in the background."""
    pids = tmp_path / "pids"
    stubborn = (
        f"trap '' HUP TERM; (trap '' HUP; echo $BASHPID >> {pids}; sleep 1000; sleep 1000) & echo $$ >> {pids}; cat"
    )
    terminal = connect(running, job, command=stubborn)
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, "both run")
    terminal.shutdown()
    wait_until(lambda: not [pid for pid in pids.read_text().split() if _is_running(int(pid))], "both have ended")
    user_files: UserFiles = running.app.state.user_files
    wait_until(lambda: not user_files.streams._open, "the place is free")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_third_terminal_is_refused(running: Running, job: str) -> None:
    """A third terminal is refused until one is closed."""
    with terminal_of(running, job) as first, terminal_of(running, job):
        with pytest.raises(websocket.WebSocketBadStatusException) as refused:
            connect(running, job)
        assert refused.value.status_code == 429
        first.send_binary(b"exit\n")
        read_all(first)
        first.shutdown()
        wait_until(lambda: _can_open(running, job), "another may open")


def _can_open(running: Running, job: str) -> bool:
    try:
        connect(running, job, command="true").shutdown()
    except websocket.WebSocketBadStatusException:
        return False
    return True


@pytest.mark.parametrize(
    ("token", "status", "code"),
    [(None, 401, "not-known"), ("unknown", 401, "not-known"), ("narrow", 403, "not-allowed"),
     ("ben", 404, "not-found"), ("root", 403, "not-allowed"), ("spawner", 403, "not-allowed"),
     ("own-token", 403, "not-allowed")],
)  # fmt: skip
def test_only_the_owner_may_open_a_terminal(
    running: Running, job: str, token: str | None, status: int, code: str
) -> None:
    """Administrators and services are refused; other users do not learn that the job exists."""
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        connect(running, job, token)
    assert refused.value.status_code == status
    assert json.loads(refused.value.resp_body)["code"] == code
    assert programs(running) == []


def test_token_in_the_url_is_ignored(running: Running, job: str) -> None:
    """A token in the URL is ignored, because URLs are logged."""
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        connect(running, job, None, token="ada")
    assert refused.value.status_code == 401


def test_terminal_needs_a_running_worker(running: Running, job: str) -> None:
    """The error names the run."""
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        connect(running, job, worker=1)
    detail = json.loads(refused.value.resp_body)["detail"]
    assert detail == f"job {job} is running: worker 1 does not run; running workers: 0"
    running.send("DELETE", f"/api/v1/jobs/{job}")
    wait_until(lambda: running.send("GET", f"/api/v1/jobs/{job}").json()["state"] == "ended", "the job has ended")
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        connect(running, job)
    assert refused.value.status_code == 409


def test_cross_origin_requests_are_refused() -> None:
    """A request with an Origin header must come from this site."""
    check_origin(None, "hub.lan:8000")
    check_origin("https://hub.lan:8000", "hub.lan:8000")
    for origin in ("https://evil.lan", "https://hub.lan", "null", "https://hub.lan:8000.evil.lan"):
        with pytest.raises(NotAllowed):
            check_origin(origin, "hub.lan:8000")


@pytest.mark.parametrize(
    ("text", "size"),
    [('{"resize": [120, 40]}', (120, 40)), ('{"resize": [0, 40]}', None), ('{"resize": [true, 40]}', None),
     ('{"resize": [1, 2, 3]}', None), ("[]", None), ("", None), ('{"resize": [10000, 40]}', None),
     ('{"resize": [120, 40], "x": "%s"}' % ("x" * 100), None), ("[" * 100_000, None)],
)  # fmt: skip
def test_invalid_terminal_sizes_are_ignored(text: str, size: tuple[int, int] | None) -> None:
    """Invalid sizes are ignored."""
    assert parse_resize(text) == size


@pytest.fixture
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the broker check the callers of streams several times a second."""
    monkeypatch.setattr(streams, "RECHECK_S", 0.2)
    monkeypatch.setattr(auth, "KNOWN_TOKEN_S", 0.1)


@pytest.mark.usefixtures("frequent_checks")
def test_terminal_ends_with_its_callers_access(running: Running, job: str) -> None:
    """A terminal that is open ends when the hub no longer knows its token, and not while the hub does not answer."""
    with terminal_of(running, job) as terminal:
        running.setting.hub.is_down = True
        checked = running.setting.hub.checked
        wait_until(lambda: running.setting.hub.checked >= checked + 3, "the caller is checked again")
        terminal.send_binary(b"echo still-$((40 + 2))\n")
        read_until(terminal, "still-42")
        running.setting.hub.models["ada"] = None
        running.setting.hub.is_down = False
        _, last = read_all(terminal)
    assert last["exit"] == 255
    assert "revoked" in last["error"]
    wait_until(lambda: all(one.poll() is not None for one in programs(running)), "the shell has ended")


@pytest.mark.usefixtures("frequent_checks")
def test_followed_log_ends_with_its_callers_access(running: Running, job: str) -> None:
    """The connection is cut, so that the client does not take it for the end of the log."""
    headers = {"Authorization": "token ada"}
    path = f"{running.url}/api/v1/jobs/{job}/logs"
    with httpx.stream("GET", path, params={"follow": "true"}, headers=headers, timeout=30, trust_env=False) as log:
        assert log.status_code == 200
        running.setting.hub.models["ada"] = None
        with pytest.raises(httpx.RemoteProtocolError):
            log.read()
    wait_until(lambda: all(one.poll() is not None for one in programs(running)), "the courier's program has ended")


@pytest.mark.parametrize("key", ["", "ssh-rsa AAAA", 'command="id" ssh-ed25519 AAAA', "x\0"])
def test_ssh_takes_one_form_of_keys(running: Running, job: str, key: str) -> None:
    """The courier's own answer comes before the connection is accepted."""
    url = f"{running.url.replace('http', 'ws', 1)}/api/v1/jobs/{job}/ssh?{urlencode({'key': key})}"
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        websocket.create_connection(url, header=["Authorization: token ada"], timeout=20)
    assert refused.value.status_code == 422
    assert b"key" in refused.value.resp_body
