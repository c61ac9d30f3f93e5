"""Floods from inside one container: connections, headers, requests, tokens and waiting work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpuhub.common import names
from gpuhub.firewall.rules import MAX_CONNECTIONS
from tests.hostile.scene import Scene
from tests.support.hub.users import log_in
from tests.support.product import wait_for

MIB = 2**20


@pytest.mark.parametrize("base", ["broker", "hub"])
@pytest.mark.parametrize("kind", ["header", "headers"])
def test_headers_have_an_end(scene: Scene, base: str, kind: str) -> None:
    """A header of 64 MiB is refused or cut off; what is still on its way then is thrown away."""
    with scene.everybody_works_on():
        found = scene.probe("connections", base=base, kind=kind, bytes=64 * MIB)
    closed = {"", "BrokenPipeError", "ConnectionResetError", "SSLEOFError", "SSLError"}
    assert found["answer"] in closed or found["answer"].startswith(("HTTP/1.1 400", "HTTP/1.1 431")), found


@pytest.mark.parametrize("base", ["broker", "hub"])
def test_idle_connections_shut_nobody_out(scene: Scene, base: str) -> None:
    """One container holds as many connections as its node lets it; all others are served."""
    with scene.everybody_works_on():
        found = scene.probe("connections", base=base, kind="idle", count=1500, seconds=10)
    assert 0 < found["opened"] <= MAX_CONNECTIONS, found
    assert found["opened"] + found["refused"] == 1500


def test_a_body_that_drips_is_given_up(scene: Scene) -> None:
    """Requests to broker and hub whose bodies never end are closed within their time."""

    def drip(base: str) -> float:
        return float(scene.probe("connections", base=base, kind="body", seconds=90)["seconds"])

    with scene.everybody_works_on(), ThreadPoolExecutor() as executor:
        seconds = list(executor.map(drip, ("broker", "hub")))
    assert max(seconds) < 85, seconds


def test_requests_without_end(scene: Scene) -> None:
    """Requests beyond the user's rate get 429; ada's are answered as before."""
    calls = [["GET", path, None] for path in ("/cluster", "/leases", "/jobs", "/events", "/usage", "/nodes")] * 50
    with scene.everybody_works_on():
        answers = scene.probe("api_calls", base="broker", calls=calls)
    statuses = {status for status, _ in answers}
    assert statuses <= {200, 429}, statuses
    assert 200 in statuses


def test_unknown_tokens_use_up_nobody_elses_rate(scene: Scene) -> None:
    """While one container tries tokens, somebody logs in anew and uses the new token at once."""
    with scene.everybody_works_on():
        calls = [["GET", "/leases", None]] * 400
        answers = scene.probe("api_calls", base="broker", calls=calls, headers={"Authorization": "token 0badc0de"})
        assert {status for status, _ in answers} <= {401, 429}
        fresh = log_in(scene.product.address, "ada", scene.product.password)
        status, answer = fresh.ask(fresh.broker, "GET", "/leases")
        fresh.close()
    assert status == 200, answer


def test_waiting_jobs_have_a_limit_and_cost_nobody_time(scene: Scene) -> None:
    """Arrays are taken up to the limit; then the dearest questions about them are asked again and again."""

    def array(number: int) -> list[Any]:
        # Ada's and ben's notebooks share the only card that these accept. Each requirement is one more to explain.
        needs = {"models": ["RTX 5090"], "least_memory_mib": 1000, "least_driver": "100", "least_capability": "1.0"}
        job = {"run_id": f"flood{number}", "detached": True, "batch": True, "priority": -1, **needs}
        return ["POST", "/jobs/arrays", {"job": job, "count": 168}]

    try:
        with scene.everybody_works_on():
            answers = scene.probe("api_calls", base="broker", calls=[array(number) for number in range(20)])
            assert {status for status, _ in answers} <= {200, 201, 422, 429}, answers[:3]
            assert answers[-1][0] == 429, answers[-1]
            leases = scene.ben.ask(scene.ben.broker, "GET", "/leases")[1]
            waiting = [row["id"] for row in leases if row["state"] == "requested"]
            assert waiting
            calls = [["GET", f"/leases/{lease}/why", None] for lease in waiting[-10:]] * 3
            calls += [["GET", path, None] for path in ("/jobs", "/leases", "/cluster")] * 5
            asked = scene.probe("api_calls", base="broker", calls=calls)
        assert {status for status, _ in asked} <= {200, 429, 503}
        assert sum(status == 200 for status, _ in asked) > 5
    finally:
        wait_for(lambda: _end_jobs_of(scene, "flood"), "the waiting jobs are gone", 120, every_s=2)


def _end_jobs_of(scene: Scene, prefix: str) -> bool:
    """Ask for the end of ben's jobs, as far as the limit on requests permits it, and return whether there are none."""
    jobs = _jobs_of(scene, prefix)
    for job in jobs:
        scene.ben.ask(scene.ben.broker, "DELETE", f"/jobs/{job}")
    return not jobs


def _jobs_of(scene: Scene, prefix: str) -> list[str]:
    status, jobs = scene.ben.ask(scene.ben.broker, "GET", "/jobs")
    return [job["id"] for job in jobs if job["run_id"].startswith(prefix)] if status == 200 else ["not known"]


def test_a_state_file_of_any_size(scene: Scene) -> None:
    """The state of ben's own job is his own file: one of 300 MiB costs the broker neither memory nor time."""
    job = scene.start_job("ben", "RTX 5060")
    folder = f"/home/ben/.gpu_launch/jobs/{job['run_id']}"
    try:
        path = f"/jobs/{job['id']}/state"
        status, _ = scene.ben.ask(scene.ben.broker, "GET", path)
        assert status == 200
        # The job's driver writes the file as well; its owner may stop it.
        (worker,) = scene.find_containers("ben", names.KIND_WORKER)
        stop = "for p in /proc/[0-9]*; do grep -q detached[.]driver $p/cmdline && kill -STOP ${p#/proc/}; done; true"
        assert scene.shell(stop, seen=worker)[0] == 0
        write = f"python3 -c \"open('{folder}/state.json', 'w').write('[' + '[],' * (100 * 2**20) + '0]')\""
        assert scene.shell(write)[0] == 0
        with scene.everybody_works_on():
            for _ in range(3):
                status, answer = scene.ben.ask(scene.ben.broker, "GET", path)
                assert status in {409, 413, 502}, (status, str(answer)[:200])
    finally:
        scene.ben.ask(scene.ben.broker, "DELETE", f"/jobs/{job['id']}")
        wait_for(lambda: not _jobs_of(scene, job["run_id"]), "ben's job is gone", 60)


def test_a_notebook_that_answers_without_end(scene: Scene) -> None:
    """A user's own start-up file turns the notebook server into one whose first answer has no end."""
    site = "/home/ben/.local/lib/python3.11/site-packages"
    assert scene.shell(f"mkdir -p {site}")[0] == 0
    scene.probe("endless_notebook", folder=site)
    try:
        with scene.everybody_works_on():
            scene.ben.start("endless", "cpu")
            wait_for(lambda: _is_settled(scene, "endless"), "the start is accepted or fails", 120)
            scene.ben.stop("endless")
            wait_for(lambda: "endless" not in (scene.ben.servers() or {"endless": 0}), "it is gone", 90)
    finally:
        assert scene.shell(f"rm -f {site}/usercustomize.py")[0] == 0
    assert scene.ben.is_ready("main")


def _is_settled(scene: Scene, server: str) -> bool:
    row = (scene.ben.servers() or {}).get(server) or {}
    return bool(row) and (bool(row.get("ready")) or not row.get("pending"))
