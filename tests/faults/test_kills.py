"""Kills of the product's processes at the worst moments."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from gpuhub.ops.deploy.programs import BROKER, HUB
from tests.faults.testbed.testbed import FaultTestbed, home_of
from tests.support.product import wait_for

Figure = Callable[[str, float], None]


@pytest.mark.case("K1")
@pytest.mark.fast
def test_hub_killed_while_the_request_waits(testbed: FaultTestbed, figure: Figure) -> None:
    """The request keeps its place, and the start continues when the GPU is free."""
    testbed.start("ada", "holds", "on1")
    testbed.ask_start("ben", "waits", "on1")
    lease = wait_for(lambda: testbed.lease_of("ben", "waits"), "ben's request is known")
    assert lease["state"] == "requested"
    figure("hub_back_s", testbed.kill_and_wait(HUB))
    assert testbed.lease_of("ben", "waits")["id"] == lease["id"]
    testbed.stop("ada", "holds")
    seen = testbed.wait_ready("ben", "waits", 120)
    assert seen.lease == lease["id"]


@pytest.mark.case("K1")
@pytest.mark.parametrize(
    ("on", "do"),
    [
        ("POST /containers/create", "hold"),
        ("POST /containers/create", "drop_response"),
        ("POST /containers/[0-9a-f]+/start", "hold"),
        ("POST /containers/[0-9a-f]+/start", "drop_response"),
        ("POST /networks/[0-9a-z]+/connect", "hold"),
    ],
    ids=["before-create", "created", "before-start", "started", "before-commit"],
)
def test_hub_killed_in_a_start(testbed: FaultTestbed, on: str, do: str) -> None:
    """Containers of the start are adopted or removed; the user starts again and has one container."""
    with testbed.fault("rig1", on, do) as fault:
        testbed.ask_start("ada", "nb", "on1")
        fault.wait_matched()
        old = testbed.kill(HUB)
    testbed.wait_renewed(HUB, old)
    wait_for(lambda: _is_ready_or_restart(testbed, "ada", "nb", "on1"), "ada's server runs in the end", 150, every_s=1)
    own = [seen for seen in testbed.observer.running() if seen.owner == "ada"]
    assert len(own) == 1, own


def _is_ready_or_restart(testbed: FaultTestbed, name: str, server: str, profile: str) -> bool:
    """Return whether the server is ready; start it again when the hub has none."""
    client = testbed.clients[name]
    servers = client.servers()
    if servers is None:
        return False
    row = servers.get(server)
    if row is None or not (row["ready"] or row["pending"]):
        client.start(server, profile)
        return False
    return bool(row["ready"]) and testbed.container(name, server) is not None


@pytest.mark.case("K2")
@pytest.mark.fast
def test_hub_killed_with_servers_up(testbed: FaultTestbed, figure: Figure) -> None:
    """All servers resume with the same containers, leases and GPUs."""
    _resume(testbed, figure, 8)


@pytest.mark.case("K2")
def test_server_with_an_invalid_version_does_not_stop_the_hub(testbed: FaultTestbed) -> None:
    """A user's server that reports an invalid version does not keep the hub from starting, as it would in JupyterHub."""
    seen = testbed.start("ada", "nb", "on1")
    assert testbed.execute(seen, "sh", "-c", "printf nonsense > ~/.reported-version")[0] == 0
    try:
        testbed.kill_and_wait(HUB)
        wait_for(lambda: testbed.clients["ada"].is_ready("nb"), "ada's server is ready", 60)
        assert testbed.container("ada", "nb") == seen
    finally:
        (home_of(testbed, "ada") / ".reported-version").unlink()


@pytest.mark.case("L2")
def test_hub_restart_with_many_servers(testbed: FaultTestbed, figure: Figure) -> None:
    """The hub answers within 5 s at every moment after its restart."""
    _resume(testbed, figure, 12)


def _resume(testbed: FaultTestbed, figure: Figure, count: int) -> None:
    wanted = [(name, f"s{number}") for number in range(4) for name in ("ada", "ben", "cyd", "dee")][:count]
    profiles = {("ada", "s0"): "on1", ("ben", "s0"): "on2", ("cyd", "s0"): "on3"}
    for name, server in wanted:
        testbed.ask_start(name, server, profiles.get((name, server), "light"))
    before = {(name, server): testbed.wait_ready(name, server, 180) for name, server in wanted}
    figure("hub_back_s", testbed.kill_and_wait(HUB))
    slowest = 0.0
    end = time.monotonic() + 60

    def resumed() -> bool:
        nonlocal slowest
        began = time.monotonic()
        ready = [testbed.clients[name].is_ready(server) for name, server in wanted]
        slowest = max(slowest, (time.monotonic() - began) / len(wanted))
        return all(ready)

    wait_for(resumed, "every server is ready again", 60)
    figure("servers_back_s", 60 - (end - time.monotonic()))
    figure("slowest_answer_s", slowest)
    assert slowest < 5
    after = {(name, server): testbed.container(name, server) for name, server in wanted}
    assert after == before


@pytest.mark.case("K3")
def test_broker_killed_in_a_grant_and_a_release(testbed: FaultTestbed, figure: Figure) -> None:
    """A request and a release right before the kill have one outcome each."""
    for number in range(3):
        server = f"s{number}"
        testbed.ask_start("ada", server, "on1")
        if number:
            wait_for(lambda server=server: testbed.lease_of("ada", server), "the request is known", every_s=0.01)
        figure("broker_back_s", testbed.kill_and_wait(BROKER))
        wait_for(
            lambda server=server: _is_ready_or_restart(testbed, "ada", server, "on1"),
            "ada's server runs",
            120,
            every_s=1,
        )
        testbed.clients["ada"].ask(testbed.clients["ada"].hub, "DELETE", f"/users/ada/servers/{server}")
        if number:
            wait_for(
                lambda server=server: testbed.lease_of("ada", server).get("state") != "active", "ends", every_s=0.01
            )
        figure("broker_back_s", testbed.kill_and_wait(BROKER))
        testbed.stop("ada", server)
        wait_for(lambda: testbed.leases() == [], "the lease has ended", 90)


@pytest.mark.case("K4")
@pytest.mark.fast
def test_daemon_killed(testbed: FaultTestbed, figure: Figure) -> None:
    """The daemon's containers end with it: the lease ends when the daemon proves it, and the GPU is granted again."""
    testbed.start("ada", "nb", "on2")
    other = testbed.start("ben", "nb", "on3")
    began = time.monotonic()
    testbed.crash("rig2")
    wait_for(lambda: not testbed.lease_of("ada", "nb"), "ada's lease ends", 90)
    figure("freed_s", time.monotonic() - began)
    assert testbed.container("ben", "nb") == other
    wait_for(lambda: _is_ready_or_restart(testbed, "ada", "nb", "on2"), "ada's server runs again", 120, every_s=1)
    figure("granted_again_s", time.monotonic() - began)


@pytest.mark.case("K5")
def test_notebook_killed(testbed: FaultTestbed, figure: Figure) -> None:
    """Lease and server end with the container's process, and the GPU is free."""
    seen = testbed.start("ada", "nb", "on1")
    began = time.monotonic()
    testbed.execute(seen, "sh", "-c", "kill -9 -1")
    wait_for(lambda: not testbed.lease_of("ada", "nb"), "the lease ends", 60)
    figure("freed_s", time.monotonic() - began)
    wait_for(lambda: not testbed.clients["ada"].is_ready("nb"), "the hub notices", 60)


@pytest.mark.case("K6")
def test_worker_killed(testbed: FaultTestbed, figure: Figure) -> None:
    """When one of two workers' containers is killed, the job shows which; its end releases both GPUs."""
    job = testbed.submit_job("ada", 2)
    worker, other = (seen for seen in testbed.observer.running() if seen.kind == "worker")
    began = time.monotonic()
    testbed.execute(worker, "sh", "-c", "kill -9 -1")
    wait_for(lambda: _exited_workers(testbed, job), "it is noticed", 60)
    figure("noticed_s", time.monotonic() - began)
    assert [one["node"] for one in _exited_workers(testbed, job)] == [worker.node]
    assert other in testbed.observer.running()
    client = testbed.clients["ada"]
    client.ask(client.broker, "DELETE", f"/jobs/{job['id']}")
    wait_for(testbed.are_all_free, "both GPUs are free", 60)


def _exited_workers(testbed: FaultTestbed, job: dict[str, object]) -> list[dict[str, object]]:
    workers = testbed.find_job("ada", str(job["id"])).get("workers", ())
    return [worker for worker in workers if worker["state"] == "exited"]


@pytest.mark.case("K7")
def test_broker_is_suspended(testbed: FaultTestbed) -> None:
    """After a stop longer than any timeout, the broker removes a container of an unknown epoch."""
    seen = testbed.start("ada", "nb", "on1")
    job = testbed.submit_job("ben", 1)
    testbed.kill(BROKER, signal.SIGSTOP)
    stranger = _create_container_of_old_epoch(testbed, seen.lease)
    time.sleep(45)
    testbed.kill(BROKER, signal.SIGCONT)
    wait_for(testbed.is_live, "the broker answers", 30)
    wait_for(
        lambda: stranger not in {container.id for container in testbed.observer.running()},
        "the old epoch is removed",
        60,
    )
    assert testbed.container("ada", "nb") == seen
    assert testbed.find_job("ben", job["id"])["state"] == "running"


def _create_container_of_old_epoch(testbed: FaultTestbed, lease: str) -> str:
    """Create a container of the lease with an epoch before the first, with its GPU, and return its id."""
    with testbed.client_of("rig1") as client:
        labels = {"gpuhub.instance": testbed.paths.instance, "gpuhub.kind": "notebook", "gpuhub.lease": lease}
        labels |= {"gpuhub.epoch": "0", "gpuhub.owner": "ada"}
        created = client.create_container("gpuhub/light:faults", command=["sleep", "600"], labels=labels)
        client.start(created["Id"])
        return str(created["Id"])


@pytest.mark.case("K8")
@pytest.mark.fast
@pytest.mark.parametrize("program", [BROKER, HUB])
def test_second_instance_is_refused(testbed: FaultTestbed, program: str) -> None:
    """The same command again ends at once with a reason, and the first process keeps running."""
    seen = testbed.start("ada", "nb", "on1")
    process = testbed.paths.run / "supervisord.conf"
    command, environment = _read_program(process.read_text(), program)
    done = subprocess.run(
        command, env={**environment}, cwd=testbed.paths.state, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "another" in (done.stdout + done.stderr)
    wait_for(testbed.is_live, "the first process continues")
    assert testbed.container("ada", "nb") == seen


def _read_program(text: str, program: str) -> tuple[list[str], dict[str, str]]:
    """Return a program's command and environment as supervisord has them."""
    import os
    import shlex

    section = text.split(f"[program:{program}]")[1].split("[program:")[0]
    values = dict(line.split("=", 1) for line in section.strip().splitlines() if "=" in line)
    pairs = (pair.split("=", 1) for pair in values["environment"].split(",") if "=" in pair)
    return shlex.split(values["command"]), {**os.environ, **{key: value.strip('"') for key, value in pairs}}
