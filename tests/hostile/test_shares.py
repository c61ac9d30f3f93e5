"""Outputs of jobs, and notebooks, that another user does not share, or shares no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from gpuhub.broker.operations.notebook_shares import build_notebook_id
from tests.hostile.scene import Scene
from tests.support.product import wait_for

NOTEBOOK = "work/private.ipynb"
EMPTY_NOTEBOOK = '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'


@pytest.fixture(autouse=True)
def unshared(scene: Scene) -> Iterator[None]:
    """End all shares of ada's job after each test."""
    yield
    scene.ada.ask(scene.ada.broker, "DELETE", f"/jobs/{scene.job['id']}/shares")


def ask(scene: Scene, method: str, path: str) -> int:
    """Return the status of a request of ben's to the broker."""
    return int(scene.ben.ask(scene.ben.broker, method, path)[0])


def share(scene: Scene) -> None:
    """Share the output of ada's job with ben."""
    status, _ = scene.ada.ask(scene.ada.broker, "PUT", f"/jobs/{scene.job['id']}/shares/ben", {"for_s": 3600})
    assert status == 200


def in_adas_home(scene: Scene, command: str) -> None:
    """Run a command line of ada's in her notebook's container."""
    status, output = scene.shell(command, seen=scene.notebooks["ada"])
    assert status == 0, output


def save_notebook(scene: Scene) -> str:
    """Save a notebook in ada's home, and return its id at the broker."""
    in_adas_home(scene, f"mkdir -p ~/work && printf %s '{EMPTY_NOTEBOOK}' > ~/{NOTEBOOK}")
    return build_notebook_id("ada", NOTEBOOK)


def get(scene: Scene, path: str) -> int:
    """Return the status of a request of ben's whose path is sent as it is."""
    headers = {"Authorization": f"token {scene.ben.token}"}
    base = f"{scene.product.address}/services/broker/api/v1"
    return httpx.get(base + path, headers=headers, trust_env=False, timeout=30).status_code


def test_job_without_a_share(scene: Scene) -> None:
    """Ben sees nothing of it, and can give himself no share, nor end one of hers."""
    job = scene.job["id"]
    for method, path in (
        ("GET", f"/shared/{job}/logs"),
        ("GET", f"/stream/shared/{job}?for_s=0"),
        ("DELETE", f"/jobs/{job}/shares"),
        ("DELETE", f"/jobs/{job}/shares/ben"),
    ):
        assert ask(scene, method, path) == 404
    assert scene.ben.ask(scene.ben.broker, "PUT", f"/jobs/{job}/shares/ben", {"for_s": 3600})[0] == 404
    assert ask(scene, "DELETE", "/shares?user=ada") == 403
    for path in (f"/shared/{job}%2f..%2f{job}/logs", "/shared/../jobs/logs", f"/shared/{'j' * 5000}/logs"):
        assert get(scene, path) in {403, 404, 414, 422}


def test_share_opens_one_output_and_nothing_else(scene: Scene) -> None:
    """The job's files, states, terminals and ports stay ada's, and so do her other jobs."""
    job = scene.job["id"]
    share(scene)
    assert ask(scene, "GET", f"/shared/{job}/logs") == 200
    for method, path in (
        ("GET", f"/jobs/{job}"),
        ("GET", f"/jobs/{job}/logs"),
        ("GET", f"/jobs/{job}/state"),
        ("POST", f"/jobs/{job}/visits"),
        ("DELETE", f"/jobs/{job}"),
        ("DELETE", f"/jobs/{job}/shares/ben"),
        ("GET", f"/shared/{job[:-1]}/logs"),
    ):
        assert ask(scene, method, path) == 404
    for query in ("rank=0", "offset=0", "tail=-1", "tail=99999999", "path=../.ssh"):
        assert ask(scene, "GET", f"/shared/{job}/logs?{query}") == 422


def test_ended_share_ends_an_open_view(scene: Scene) -> None:
    """A stream that ben keeps open ends within a second or so, and the next is refused."""
    job = scene.job["id"]
    share(scene)
    url = f"{scene.product.address}/services/broker/api/v1/shared/{job}/logs?follow=true"
    opened, ended = threading.Event(), threading.Event()

    def view() -> None:
        headers = {"Authorization": f"token {scene.ben.token}"}
        with httpx.stream("GET", url, headers=headers, trust_env=False, timeout=120) as answer:
            assert answer.status_code == 200
            opened.set()
            for _ in answer.iter_bytes():
                pass
        ended.set()

    thread = threading.Thread(target=view)
    thread.start()
    wait_for(opened.is_set, "ben's view is open", 120)
    at = time.monotonic()
    assert scene.ada.ask(scene.ada.broker, "DELETE", f"/jobs/{job}/shares/ben")[0] == 200
    assert ended.wait(30)
    assert time.monotonic() - at < 2
    thread.join()
    assert ask(scene, "GET", f"/shared/{job}/logs") == 404


def test_page_of_the_hub_shows_no_more(scene: Scene) -> None:
    """Without a session it leads to the login, and a token is none."""
    url = f"{scene.product.address}/hub/gpuhub/shared/{scene.job['id']}"
    share(scene)
    assert httpx.get(url, trust_env=False, timeout=30).status_code == 302
    stream = f"{scene.product.address}/hub/gpuhub/shared-stream?job={scene.job['id']}"
    headers = {"Authorization": f"token {scene.ben.token}"}
    assert httpx.get(stream, headers=headers, trust_env=False, timeout=30).status_code == 403


def test_notebook_without_a_share(scene: Scene) -> None:
    """Ben sees nothing of it, whatever he knows of its place, and can give himself no share."""
    notebook = save_notebook(scene)
    for path in (f"/shared/notebooks/{notebook}", f"/shared/notebooks/{notebook}/html"):
        assert ask(scene, "GET", path) == 404
    assert ask(scene, "DELETE", f"/notebooks/{notebook}/shares") == 404
    for path in (NOTEBOOK, f"../ada/{NOTEBOOK}", f"/home/ada/{NOTEBOOK}", f"work/../../ada/{NOTEBOOK}"):
        status, _ = scene.ben.ask(scene.ben.broker, "PUT", "/notebooks/shares/eve", {"path": path, "for_s": 3600})
        assert status in {404, 422}
    for path in ("", "/state", "/frame"):
        url = f"{scene.product.address}/hub/gpuhub/shared-notebook/{notebook}{path}"
        headers = {"Authorization": f"token {scene.ben.token}"}
        assert httpx.get(url, headers=headers, trust_env=False, timeout=30).status_code in {302, 403}


def test_shared_notebook_opens_no_other_file(scene: Scene) -> None:
    """Neither another notebook, nor what ada's own link leads to, nor her files' names."""
    notebook = save_notebook(scene)
    body = {"path": NOTEBOOK, "for_s": 3600}
    assert scene.ada.ask(scene.ada.broker, "PUT", "/notebooks/shares/ben", body)[0] == 200
    assert ask(scene, "GET", f"/shared/notebooks/{notebook}/html") == 200
    other = build_notebook_id("ada", "work/other.ipynb")
    in_adas_home(scene, f"cp ~/{NOTEBOOK} ~/work/other.ipynb")
    for path in (
        f"/shared/notebooks/{other}",
        f"/shared/notebooks/{notebook}%2f..%2f{other}/html",
        f"/files?path={NOTEBOOK}",
        f"/shared/{notebook}/logs",
    ):
        assert get(scene, path) in {404, 422}, path
    in_adas_home(scene, f"mv ~/{NOTEBOOK} ~/work/moved.ipynb; ln -s ~/work/other.ipynb ~/{NOTEBOOK}")
    assert ask(scene, "GET", f"/shared/notebooks/{notebook}/html") == 422
    in_adas_home(scene, f"rm ~/{NOTEBOOK} ~/work/moved.ipynb ~/work/other.ipynb")
    assert scene.ada.ask(scene.ada.broker, "DELETE", f"/notebooks/{notebook}/shares")[0] == 200
    assert ask(scene, "GET", f"/shared/notebooks/{notebook}") == 404
