"""Shares of saved notebooks over HTTP: a broker with a port, and gpu-launch's own courier on simulated nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import nbformat
import psutil
import pytest

from gpu_launch.courier import notebook_page
from gpuhub.broker.admission import access
from gpuhub.broker.files import user_files
from gpuhub.broker.operations.notebook_shares import build_notebook_id
from gpuhub.broker.state import output_shares
from gpuhub.domain.clock import Clock
from tests.support.broker.in_process import Running, Setting, served_broker

PATH = "work/train.ipynb"


@pytest.fixture
def running(setting: Setting) -> Iterator[Running]:
    """A broker with a port."""
    with served_broker(setting) as found:
        yield found


def save(running: Running, source: str = "loss = 4.2", path: str = PATH, owner: str = "ada") -> Path:
    file = running.setting.home(owner) / path
    file.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(source)]), file)
    return file


def share(running: Running, viewer: str = "ben", token: str = "ada", path: str = PATH, **more: Any) -> httpx.Response:
    body = {"path": path, "for_s": 3600} | more
    return running.send("PUT", f"/api/v1/notebooks/shares/{viewer}", token, json=body)


def look(running: Running, shown: str, token: str = "ben") -> httpx.Response:
    return running.send("GET", f"/api/v1/shared/notebooks/{shown}", token)


def read(running: Running, shown: str, token: str = "ben") -> httpx.Response:
    return running.send("GET", f"/api/v1/shared/notebooks/{shown}/html", token)


def test_viewer_reads_this_notebook_and_nothing_else(running: Running) -> None:
    """When it was saved and what is in it; neither its folder nor another file."""
    file, other = save(running), build_notebook_id("ada", "work/other.ipynb")
    save(running, path="work/other.ipynb")
    made = share(running, path="./work//train.ipynb")
    assert made.status_code == 200, made.text
    shown = made.json()["id"]
    assert shown == build_notebook_id("ada", PATH)
    assert (made.json()["notebook"], made.json()["name"], made.json()["job"]) == (PATH, "train.ipynb", "")
    assert made.json()["path"] == f"/hub/gpuhub/shared-notebook/{shown}"
    found = look(running, shown).json()
    assert (found["name"], found["owner"], found["size"]) == ("train.ipynb", "ada", file.stat().st_size)
    assert abs(datetime.fromisoformat(found["saved_at"]).timestamp() - file.stat().st_mtime) < 0.002
    assert found["expires_at"] == made.json()["expires_at"]
    assert look(running, shown, "ada").json()["expires_at"] is None
    page = read(running, shown)
    assert "loss = 4.2" in page.text
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert read(running, shown, "ada").status_code == 200
    assert [row["notebook"] for row in running.send("GET", "/api/v1/shares", "ben").json()] == [""]
    for token in ("eve", "mia"):
        assert look(running, shown, token).status_code == read(running, shown, token).status_code == 404
    for token in ("root", "own-token", "spawner"):
        assert look(running, shown, token).status_code == read(running, shown, token).status_code == 403
    assert read(running, other).status_code == 404
    for method, path in (
        ("GET", f"/shared/{shown}/logs"),
        ("GET", f"/stream/shared/{shown}?for_s=0"),
        ("DELETE", f"/notebooks/{shown}/shares"),
        ("DELETE", f"/jobs/{shown}/shares"),
        ("GET", f"/shared/notebooks/{shown}%2f..%2f{other}"),
    ):
        assert running.send(method, f"/api/v1{path}", "ben").status_code == 404, path
    assert running.send("GET", f"/api/v1/shared/notebooks/{shown}?path=x", "ben").status_code == 422


def test_saved_again_it_is_read_again_and_removed_it_is_gone(running: Running) -> None:
    """Each answer has the file of that moment; a link in its place is not followed."""
    file = save(running)
    shown = share(running).json()["id"]
    before = look(running, shown).json()
    os.utime(save(running, "loss = 3.1"), (time.time() + 5, time.time() + 5))
    assert look(running, shown).json()["saved_at"] != before["saved_at"]
    assert "loss = 3.1" in read(running, shown).text
    secret = save(running, "secret", path="private/secret.ipynb")
    file.unlink()
    file.symlink_to(secret)
    refused = read(running, shown)
    assert (refused.status_code, "symbolic link" in refused.text, "secret" in refused.text) == (422, True, False)
    file.unlink()
    assert (read(running, shown).status_code, "there is no" in look(running, shown).text) == (404, True)


def test_owner_ends_shares_one_by_one_or_all(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """By user, all of the notebook, by time, and with the user."""
    save(running)
    save(running, owner="ben")
    for viewer in ("ben", "eve", "mia"):
        shown = share(running, viewer).json()["id"]
    of_ben = share(running, "eve", "ben").json()["id"]
    assert of_ben != shown
    ended = running.send("DELETE", f"/api/v1/notebooks/{shown}/shares/ben").json()
    assert [row["viewer"] for row in ended] == ["ben"]
    assert (read(running, shown).status_code, read(running, shown, "eve").status_code) == (404, 200)
    assert running.send("DELETE", f"/api/v1/notebooks/{shown}/shares/ben").json() == []
    assert running.send("DELETE", f"/api/v1/notebooks/{shown}/shares", "root").status_code == 403
    ended = running.send("DELETE", f"/api/v1/notebooks/{shown}/shares").json()
    assert [row["viewer"] for row in ended] == ["eve", "mia"]
    assert running.send("DELETE", f"/api/v1/notebooks/{shown}/shares").status_code == 404
    assert share(running).status_code == 200
    ended = running.send("DELETE", "/api/v1/shares?user=ben", "spawner").json()
    assert sorted((row["owner"], row["viewer"]) for row in ended) == [("ada", "ben"), ("ben", "eve")]
    assert share(running, for_s=60).status_code == 200
    monkeypatch.setattr(Clock, "now", lambda _: time.time() + 61)
    assert read(running, shown).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"path": "work/none.ipynb"}, 404, "there is no 'work/none.ipynb' in the home"),
        ({"path": "../ada/work/train.ipynb"}, 422, "is not below the home"),
        ({"path": "/etc/passwd"}, 422, "is not below the home"),
        ({"path": "work/train.py"}, 422, "must end with .ipynb"),
        ({"path": "work"}, 422, "must end with .ipynb"),
        ({"path": ""}, 422, "path"),
        ({"path": "x" * 1100}, 422, "path"),
        ({"path": 1}, 422, "path"),
        ({"path": PATH, "for_s": 59}, 422, "for_s"),
        ({"path": PATH, "write": True}, 422, "write"),
    ],
)
def test_wrong_requests_are_refused(running: Running, body: dict[str, Any], status: int, text: str) -> None:
    """With what is wrong, and nothing is shared."""
    save(running)
    answer = running.send("PUT", "/api/v1/notebooks/shares/ben", json=body)
    assert (answer.status_code, text in answer.text) == (status, True), answer.text
    assert running.send("GET", "/api/v1/shares").json() == []


@pytest.mark.parametrize(
    ("viewer", "status", "text"),
    [("ada", 422, "ada is the notebook's owner"), ("bne", 404, "the hub has no user 'bne'")],
)
def test_wrong_viewers_are_refused(running: Running, viewer: str, status: int, text: str) -> None:
    running.setting.hub.unknown_users = {"bne"}
    save(running)
    answer = share(running, viewer)
    assert (answer.status_code, text in answer.text) == (status, True), answer.text
    assert running.send("GET", "/api/v1/shares").json() == []


def find_renderers(running: Running) -> list[int]:
    """Return the ids of the processes that render a notebook now."""
    couriers = {one.pid for node in running.setting.nodes.values() for one in node.execs.running}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if process.ppid() in couriers and notebook_page.__name__ in process.cmdline():
                found.append(process.pid)
    return found


def test_an_owners_notebooks_are_rendered_one_at_a_time(running: Running) -> None:
    """However many viewers there are, each gets the page; more than a few are refused."""
    save(running)
    viewers = [f"user{number}" for number in range(access.SHARED_PAGES.per_owner + 1)]
    for viewer in viewers:
        shown = share(running, viewer).json()["id"]
    numbers = [0]
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(read, running, shown, viewer) for viewer in viewers]
        while not all(answer.done() for answer in answers):
            numbers.append(len(find_renderers(running)))
    assert sorted(answer.result().status_code for answer in answers) == [200] * (len(viewers) - 1) + [429]
    assert max(numbers) == 1
    assert read(running, shown, viewers[0]).status_code == 200


def test_numbers_and_sizes_are_limited(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Viewers of a notebook, shares of an owner, views at the same time, and the page."""
    save(running)
    monkeypatch.setattr(output_shares, "MAX_VIEWERS", 2)
    shown = share(running, "ben").json()["id"]
    assert share(running, "eve").status_code == 200
    refused = share(running, "mia")
    assert (refused.status_code, "2 users, which is the limit" in refused.text) == (409, True)
    with ExitStack() as views:
        for _ in range(access.SHARED_VIEWS.per_owner):
            views.enter_context(running.app.state.user_files.streams.acquire(access.SHARED_VIEWS, "eve"))
        assert look(running, shown, "eve").status_code == read(running, shown, "eve").status_code == 429
        assert read(running, shown, "ben").status_code == 200
    monkeypatch.setattr(user_files, "MAX_PAGE", 1000)
    with pytest.raises(httpx.HTTPError):
        read(running, shown)
