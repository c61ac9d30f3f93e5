"""Kills: processes of the product end at the worst moment."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from gpuhub.head.programs import BROKER, HUB
from tests.faults.bed import Bed, home
from tests.support.product import wait_for

Figure = Callable[[str, float], None]


@pytest.mark.case("K1")
@pytest.mark.fast
def test_hub_killed_while_the_request_waits(bed: Bed, figure: Figure) -> None:
    """The request keeps its place, and the start goes on by itself when the GPU is free."""
    bed.start("ada", "holds", "on1")
    bed.ask_start("ben", "waits", "on1")
    lease = wait_for(lambda: bed.lease_of("ben", "waits"), "ben's request is known")
    assert lease["state"] == "requested"
    figure("hub_back_s", bed.kill_and_wait(HUB))
    assert bed.lease_of("ben", "waits")["id"] == lease["id"]
    bed.stop("ada", "holds")
    seen = bed.wait_ready("ben", "waits", 120)
    assert seen.lease == lease["id"]


@pytest.mark.case("K1")
@pytest.mark.parametrize(
    ("on", "do"),
    [
        ("POST /containers/create", "hold"),
        ("POST /containers/create", "deaf"),
        ("POST /containers/[0-9a-f]+/start", "hold"),
        ("POST /containers/[0-9a-f]+/start", "deaf"),
        ("POST /networks/[0-9a-z]+/connect", "hold"),
    ],
    ids=["before-create", "created", "before-start", "started", "before-commit"],
)
def test_hub_killed_in_a_start(bed: Bed, on: str, do: str) -> None:
    """Whatever was made is adopted or removed; the user starts again and has one container."""
    with bed.trouble("rig1", on, do) as trouble:
        bed.ask_start("ada", "nb", "on1")
        trouble.wait_met()
        old = bed.kill(HUB)
    bed.wait_renewed(HUB, old)
    wait_for(lambda: _ready_or_again(bed, "ada", "nb", "on1"), "ada's server runs in the end", 150, every_s=1)
    own = [seen for seen in bed.observer.running() if seen.owner == "ada"]
    assert len(own) == 1, own


def _ready_or_again(bed: Bed, name: str, server: str, profile: str) -> bool:
    """Whether the server is ready; asked for where the hub has none."""
    client = bed.clients[name]
    servers = client.servers()
    if servers is None:
        return False
    found = servers.get(server)
    if found is None or not (found["ready"] or found["pending"]):
        client.start(server, profile)
        return False
    return bool(found["ready"]) and bed.container(name, server) is not None


@pytest.mark.case("K2")
@pytest.mark.fast
def test_hub_killed_with_servers_up(bed: Bed, figure: Figure) -> None:
    """All resume: the same containers, leases and GPUs."""
    _resume(bed, figure, 8)


@pytest.mark.case("K2")
def test_a_server_that_lies_keeps_no_hub_from_starting(bed: Bed) -> None:
    """What answers is the user's: a version that is none, which JupyterHub alone would not start with."""
    seen = bed.start("ada", "nb", "on1")
    assert bed.execute(seen, "sh", "-c", "printf nonsense > ~/.says-version")[0] == 0
    try:
        bed.kill_and_wait(HUB)
        wait_for(lambda: bed.clients["ada"].is_ready("nb"), "ada's server is ready", 60)
        assert bed.container("ada", "nb") == seen
    finally:
        (home(bed, "ada") / ".says-version").unlink()


@pytest.mark.case("L2")
def test_hub_restarts_with_many(bed: Bed, figure: Figure) -> None:
    """It answers within 5 s at any moment after it is back."""
    _resume(bed, figure, 12)


def _resume(bed: Bed, figure: Figure, count: int) -> None:
    wanted = [(name, f"s{number}") for number in range(4) for name in ("ada", "ben", "cyd", "dee")][:count]
    profiles = {("ada", "s0"): "on1", ("ben", "s0"): "on2", ("cyd", "s0"): "on3"}
    for name, server in wanted:
        bed.ask_start(name, server, profiles.get((name, server), "light"))
    before = {(name, server): bed.wait_ready(name, server, 180) for name, server in wanted}
    figure("hub_back_s", bed.kill_and_wait(HUB))
    slowest = 0.0
    end = time.monotonic() + 60

    def resumed() -> bool:
        nonlocal slowest
        began = time.monotonic()
        ready = [bed.clients[name].is_ready(server) for name, server in wanted]
        slowest = max(slowest, (time.monotonic() - began) / len(wanted))
        return all(ready)

    wait_for(resumed, "every server is ready again", 60)
    figure("servers_back_s", 60 - (end - time.monotonic()))
    figure("slowest_answer_s", slowest)
    assert slowest < 5
    after = {(name, server): bed.container(name, server) for name, server in wanted}
    assert after == before


@pytest.mark.case("K3")
def test_broker_killed_in_a_grant_and_a_release(bed: Bed, figure: Figure) -> None:
    """Asked for and ended right before the broker dies: both come to one outcome."""
    for number in range(3):
        server = f"s{number}"
        bed.ask_start("ada", server, "on1")
        if number:
            wait_for(lambda server=server: bed.lease_of("ada", server), "the request is known", every_s=0.01)
        figure("broker_back_s", bed.kill_and_wait(BROKER))
        wait_for(lambda server=server: _ready_or_again(bed, "ada", server, "on1"), "ada's server runs", 120, every_s=1)
        bed.clients["ada"].ask(bed.clients["ada"].hub, "DELETE", f"/users/ada/servers/{server}")
        if number:
            wait_for(lambda server=server: bed.lease_of("ada", server).get("state") != "active", "ends", every_s=0.01)
        figure("broker_back_s", bed.kill_and_wait(BROKER))
        bed.stop("ada", server)
        wait_for(lambda: bed.leases() == [], "the lease has ended", 90)


@pytest.mark.case("K4")
@pytest.mark.fast
def test_daemon_killed(bed: Bed, figure: Figure) -> None:
    """Its containers ended with it: the lease ends on the returned daemon's word, and the GPU is given again."""
    bed.start("ada", "nb", "on2")
    other = bed.start("ben", "nb", "on3")
    began = time.monotonic()
    bed.crash("rig2")
    wait_for(lambda: not bed.lease_of("ada", "nb"), "ada's lease ends", 90)
    figure("freed_s", time.monotonic() - began)
    assert bed.container("ben", "nb") == other
    wait_for(lambda: _ready_or_again(bed, "ada", "nb", "on2"), "ada's server runs again", 120, every_s=1)
    figure("given_again_s", time.monotonic() - began)


@pytest.mark.case("K5")
def test_notebook_killed(bed: Bed, figure: Figure) -> None:
    """The container's program is killed: lease and server end, and the GPU is free."""
    seen = bed.start("ada", "nb", "on1")
    began = time.monotonic()
    bed.execute(seen, "sh", "-c", "kill -9 -1")
    wait_for(lambda: not bed.lease_of("ada", "nb"), "the lease ends", 60)
    figure("freed_s", time.monotonic() - began)
    wait_for(lambda: not bed.clients["ada"].is_ready("nb"), "the hub notices", 60)


@pytest.mark.case("K6")
def test_worker_killed(bed: Bed, figure: Figure) -> None:
    """One of two workers' containers is killed: the job ends in time, and both GPUs return."""
    job = bed.job("ada", 2)
    worker = next(seen for seen in bed.observer.running() if seen.kind == "worker")
    began = time.monotonic()
    bed.execute(worker, "sh", "-c", "kill -9 -1")
    wait_for(lambda: bed.job_now("ada", job["id"]).get("state") == "ended" or _one_left(bed, job), "it is noticed", 60)
    figure("noticed_s", time.monotonic() - began)
    exits = [one["message"] for one in bed.job_now("ada", job["id"])["workers"] if one["state"] == "exited"]
    assert exits
    client = bed.clients["ada"]
    client.ask(client.broker, "DELETE", f"/jobs/{job['id']}")
    wait_for(bed.are_all_free, "both GPUs are free", 60)


def _one_left(bed: Bed, job: dict[str, object]) -> bool:
    workers = bed.job_now("ada", str(job["id"])).get("workers", ())
    return any(worker["state"] == "exited" for worker in workers)


@pytest.mark.case("K7")
def test_broker_stands_still(bed: Bed) -> None:
    """Longer than it waits for anybody; a container of an epoch that never was is removed when it goes on."""
    seen = bed.start("ada", "nb", "on1")
    job = bed.job("ben", 1)
    bed.kill(BROKER, signal.SIGSTOP)
    stranger = _old_epoch(bed, seen.lease)
    time.sleep(45)
    bed.kill(BROKER, signal.SIGCONT)
    wait_for(bed.is_live, "the broker answers", 30)
    wait_for(lambda: stranger not in {one.id for one in bed.observer.running()}, "the old epoch is removed", 60)
    assert bed.container("ada", "nb") == seen
    assert bed.job_now("ben", job["id"])["state"] == "running"


def _old_epoch(bed: Bed, lease: str) -> str:
    """A container of the lease's epoch before the first, with its GPU asked for."""
    with bed.client_of("rig1") as client:
        labels = {"gpuhub.instance": bed.paths.instance, "gpuhub.kind": "notebook", "gpuhub.lease": lease}
        labels |= {"gpuhub.epoch": "0", "gpuhub.owner": "ada"}
        made = client.create_container("gpuhub/light:faults", command=["sleep", "600"], labels=labels)
        client.start(made["Id"])
        return str(made["Id"])


@pytest.mark.case("K8")
@pytest.mark.fast
@pytest.mark.parametrize("program", [BROKER, HUB])
def test_a_second_one_is_refused(bed: Bed, program: str) -> None:
    """The same command again ends at once and says why; the first goes on."""
    seen = bed.start("ada", "nb", "on1")
    process = bed.paths.run / "supervisord.conf"
    command, environment = _program(process.read_text(), program)
    done = subprocess.run(
        command, env={**environment}, cwd=bed.paths.state, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "another" in (done.stdout + done.stderr)
    wait_for(bed.is_live, "the first goes on")
    assert bed.container("ada", "nb") == seen


def _program(text: str, program: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a program as supervisord has them."""
    import os
    import shlex

    section = text.split(f"[program:{program}]")[1].split("[program:")[0]
    values = dict(line.split("=", 1) for line in section.strip().splitlines() if "=" in line)
    pairs = (pair.split("=", 1) for pair in values["environment"].split(",") if "=" in pair)
    return shlex.split(values["command"]), {**os.environ, **{key: value.strip('"') for key, value in pairs}}
