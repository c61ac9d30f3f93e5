"""Output shares over HTTP: a broker with a port, and gpu-launch's own courier on simulated nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuhub.broker.admission import access
from gpuhub.broker.api import auth, streams
from gpuhub.broker.state import output_shares
from gpuhub.domain.clock import Clock
from tests.support.broker.in_process import Running, Setting, served_broker
from tests.support.docker.simulated_nodes import wait_until

RUN = "run-000001"


@pytest.fixture
def running(setting: Setting) -> Iterator[Running]:
    """A broker with a port."""
    with served_broker(setting) as found:
        yield found


def submit(running: Running, run: str = RUN, owner: str = "ada", **more: Any) -> str:
    """Return the id of a detached job that runs."""
    body = {"run_id": run, "detached": True, "name": "train.py"} | more
    made = running.send("POST", "/api/v1/jobs", owner, json=body)
    assert made.status_code == 201, made.text
    path = f"/api/v1/jobs/{made.json()['id']}"
    wait_until(lambda: running.send("GET", path, owner).json()["state"] == "running", "the job runs")
    return str(made.json()["id"])


def write(running: Running, text: str, run: str = RUN, owner: str = "ada") -> Path:
    folder = running.setting.home(owner) / ".gpu_launch" / "jobs" / run
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "output.log"
    with file.open("a", encoding="utf-8") as log:
        log.write(text)
    return file


def share(running: Running, job: str, viewer: str = "ben", token: str = "ada", for_s: int = 3600) -> httpx.Response:
    return running.send("PUT", f"/api/v1/jobs/{job}/shares/{viewer}", token, json={"for_s": for_s})


def read(running: Running, job: str, token: str | None = "ben", **params: Any) -> httpx.Response:
    return running.send("GET", f"/api/v1/shared/{job}/logs", token, params=params)


def read_view(running: Running, job: str, token: str = "ben") -> httpx.Response:
    return running.send("GET", f"/api/v1/stream/shared/{job}", token, params={"for_s": 0})


class Follower:
    """A viewer's open stream in a thread: what came, and when it ended."""

    def __init__(self, running: Running, path: str, token: str = "ben", **params: Any) -> None:
        self.text, self.ended_at = "", 0.0
        self._request = (f"{running.url}{path}", token, params)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        url, token, params = self._request
        headers = {"Authorization": f"token {token}"}
        with httpx.stream("GET", url, headers=headers, params=params, trust_env=False, timeout=30) as answer:
            for part in answer.iter_text():
                self.text += part
        self.ended_at = time.monotonic()


def test_viewer_reads_what_is_shared_and_nothing_else(running: Running) -> None:
    """State, GPUs and output of this job; no files, terminals, other jobs, and nothing to change."""
    job, other = submit(running), submit(running, "run-000002")
    write(running, "epoch 1\n")
    assert read(running, job).status_code == 404
    made = share(running, job)
    assert made.status_code == 200, made.text
    shown = made.json()
    assert (shown["owner"], shown["viewer"], shown["path"]) == ("ada", "ben", f"/hub/gpuhub/shared/{job}")
    assert read(running, job).text == "epoch 1\n"
    assert read(running, job, tail=2).text == "1\n"
    assert read(running, job, "ada").text == "epoch 1\n"
    view = read_view(running, job).text
    assert '"owner":"ada"' in view
    assert '"state":"running"' in view
    assert '"gpus":"1 × RTX 50' in view
    for method, path in (
        ("GET", f"/jobs/{job}"),
        ("GET", f"/jobs/{job}/logs"),
        ("GET", f"/jobs/{job}/state"),
        ("DELETE", f"/jobs/{job}"),
        ("POST", f"/jobs/{job}/visits"),
        ("DELETE", f"/jobs/{job}/shares"),
        ("DELETE", f"/jobs/{job}/shares/ben"),
        ("GET", f"/shared/{other}/logs"),
        ("GET", f"/stream/shared/{other}?for_s=0"),
    ):
        assert running.send(method, f"/api/v1{path}", "ben").status_code == 404, path
    assert share(running, job, "eve", "ben").status_code == 404
    assert read(running, job, "eve").status_code == 404
    for token in ("root", "own-token", "spawner"):
        assert read(running, job, token).status_code == 403
    assert read(running, job, None).status_code == 401
    assert read(running, f"{job}%2f..%2f{other}").status_code == 404
    for wrong in ({"rank": 0}, {"offset": 1}, {"tail": -1}, {"tail": 2**21}):
        assert read(running, job, **wrong).status_code == 422


@pytest.mark.parametrize("which", ["", "/ben"])
def test_owner_ends_an_open_view_within_a_second(running: Running, which: str) -> None:
    """Output and state end; a later view is refused; others' shares continue."""
    job = submit(running)
    write(running, "one\n")
    for viewer in ("ben", "eve"):
        assert share(running, job, viewer).status_code == 200
    logs = Follower(running, f"/api/v1/shared/{job}/logs", follow="true")
    state = Follower(running, f"/api/v1/stream/shared/{job}")
    wait_until(lambda: "one" in logs.text and "shared" in state.text, "both streams have begun")
    write(running, "two\n")
    wait_until(lambda: "two" in logs.text, "the output is followed")
    ended = running.send("DELETE", f"/api/v1/jobs/{job}/shares{which}")
    at = time.monotonic()
    assert [row["viewer"] for row in ended.json()] == (["ben"] if which else ["ben", "eve"])
    for follower in (logs, state):
        follower.thread.join(10)
        assert 0 < follower.ended_at < at + 1
    write(running, "three\n")
    assert "three" not in logs.text
    assert read(running, job).status_code == read_view(running, job).status_code == 404
    assert read(running, job, "eve").status_code == (200 if which else 404)
    assert running.send("DELETE", f"/api/v1/jobs/{job}/shares{which}").json() == []


def test_share_expires(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open views end then, and the share is listed no more."""
    monkeypatch.setattr(output_shares, "CLOCK_CHECK_S", 0.1)
    job = submit(running)
    write(running, "one\n")
    assert share(running, job).status_code == 200
    logs = Follower(running, f"/api/v1/shared/{job}/logs", follow="true")
    wait_until(lambda: "one" in logs.text, "the stream has begun")
    monkeypatch.setattr(Clock, "now", lambda _: time.time() + 3601)
    logs.thread.join(10)
    assert logs.ended_at > 0
    assert share(running, job, "eve").status_code == 200
    assert read(running, job).status_code == 404
    assert [row["viewer"] for row in running.send("GET", "/api/v1/shares").json()] == ["eve"]
    assert [row.viewer for row in running.store.shares.load()] == ["eve"]


def test_shares_survive_a_restart_and_end_with_their_users(setting: Setting) -> None:
    """The store has them; the hub ends those of a removed user, as owner and as viewer."""
    with served_broker(setting) as running:
        job, bens = submit(running), submit(running, "run-000002", "ben")
        for viewer in ("ben", "eve"):
            assert share(running, job, viewer).status_code == 200
        assert share(running, bens, "eve", "ben").status_code == 200
    with served_broker(setting) as running:
        listed = {name: running.send("GET", "/api/v1/shares", name).json() for name in ("ada", "ben", "eve", "mia")}
        assert {name: len(rows) for name, rows in listed.items()} == {"ada": 2, "ben": 2, "eve": 2, "mia": 0}
        assert running.send("DELETE", "/api/v1/shares?user=ben", "ben").status_code == 403
        ended = running.send("DELETE", "/api/v1/shares?user=ben", "spawner").json()
        assert [(row["owner"], row["viewer"]) for row in ended] == [("ben", "eve"), ("ada", "ben")]
        assert [row["viewer"] for row in running.send("GET", "/api/v1/shares", "ada").json()] == ["eve"]


def test_viewer_without_access_loses_an_open_view(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any caller: when the hub knows the token no more."""
    monkeypatch.setattr(streams, "RECHECK_S", 0.2)
    monkeypatch.setattr(auth, "KNOWN_TOKEN_S", 0.1)
    job = submit(running)
    write(running, "one\n")
    assert share(running, job).status_code == 200
    logs = Follower(running, f"/api/v1/shared/{job}/logs", follow="true")
    wait_until(lambda: "one" in logs.text, "the stream has begun")
    running.setting.hub.models["ben"] = None
    logs.thread.join(10)
    assert logs.ended_at > 0


@pytest.mark.parametrize(
    ("viewer", "status", "text"),
    [
        ("ada", 422, "ada is the job's owner"),
        ("bne", 404, "the hub has no user 'bne'"),
        ("../ben", 404, ""),
        ("Ben%20X", 422, "viewer"),
        ("b" * 65, 422, "viewer"),
    ],
)
def test_wrong_viewers_are_refused(running: Running, viewer: str, status: int, text: str) -> None:
    """With what is wrong, and nothing is shared."""
    running.setting.hub.unknown_users = {"bne"}
    job = submit(running)
    answer = share(running, job, viewer)
    assert answer.status_code == status, answer.text
    assert text in answer.text
    assert running.send("GET", "/api/v1/shares").json() == []


@pytest.mark.parametrize("for_s", [0, 59, 90 * 86400 + 1, "2h", None, 1e9])
def test_wrong_times_are_refused(running: Running, for_s: Any) -> None:
    """From a minute to 90 days."""
    job = submit(running)
    assert share(running, job, for_s=for_s).status_code == 422
    assert running.send("PUT", f"/api/v1/jobs/{job}/shares/ben", json={"for_s": 60, "write": True}).status_code == 422


def test_launch_of_a_notebook_is_not_shared(running: Running) -> None:
    """Its output is in the notebook."""
    made = running.send("POST", "/api/v1/jobs", json={"run_id": RUN}).json()
    answer = share(running, made["id"])
    assert (answer.status_code, "its output is in its notebook" in answer.text) == (409, True)
    assert read(running, made["id"], "ada").status_code == 409


def test_numbers_of_shares_and_views_are_limited(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one job, of one owner, and open views of one viewer and of one owner's jobs."""
    job, other = submit(running), submit(running, "run-000002")
    monkeypatch.setattr(output_shares, "MAX_VIEWERS", 2)
    monkeypatch.setattr(output_shares, "MAX_SHARES", 3)
    for viewer in ("ben", "eve", "ben"):
        assert share(running, job, viewer).status_code == 200
    assert "2 users, which is the limit" in share(running, job, "mia").text
    assert share(running, other, "mia").status_code == 200
    assert "3 shares, which is the limit" in share(running, other, "ben").text
    write(running, "x\n")
    path = f"/api/v1/shared/{job}/logs"
    most = access.SHARED_VIEWS.per_owner
    followers = [Follower(running, path, follow="true") for _ in range(most)]
    wait_until(lambda: all(one.text for one in followers), "all views are open")
    refused = read(running, job)
    assert refused.status_code == 429
    assert f"ben: {most} shared outputs being read at once are the limit" in refused.text
    assert read(running, job, "eve").status_code == 200
    assert running.send("GET", f"/api/v1/jobs/{job}/logs").status_code == 200
    running.send("DELETE", f"/api/v1/jobs/{job}/shares")
    for one in followers:
        one.thread.join(10)
    # The broker closes a stream after its end has been sent.
    wait_until(lambda: running.app.state.user_files.streams._open == {}, "no view is counted")
