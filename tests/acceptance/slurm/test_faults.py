"""Killed daemons of Slurm, a lost node, a killed hub and broker: a server is lost only when Slurm ends its job."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from gpuhub.config import settings
from gpuhub_closet import docker_daemons
from gpuhub_closet.slurm import slurm_daemons
from tests.acceptance.slurm.servers import find_lease, is_gone, lease_of, start, stop
from tests.acceptance.slurm.slurm_commands import SlurmObserver
from tests.support.hub.browser import INSTANCE, Product
from tests.support.hub.users import Client
from tests.support.product import ROOT, wait_for


@pytest.fixture(scope="module")
def anchor(ada: Client, observer: SlurmObserver) -> Iterator[str]:
    """A server's container that must survive every fault."""
    lease = start(ada, "anchor", "rtx5090")
    (seen,) = [seen for seen in observer.running() if seen.lease == lease["id"]]
    yield seen.id
    stop(ada, "anchor")


def answers(product: Product) -> bool:
    """Return whether the anchor's server answers."""
    with suppress(httpx.TransportError):
        answer = httpx.get(f"{product.address}/user/ada/anchor/api", trust_env=False, timeout=10)
        return answer.status_code == 200
    return False


def check_anchor(product: Product, observer: SlurmObserver, anchor: str, ada: Client) -> None:
    """Check that the anchor is the same container and its lease is open."""
    # A slow daemon or broker is retried; a lost notebook would stay lost.
    wait_for(lambda: anchor in {seen.id for seen in observer.running()}, "the notebook is there")
    wait_for(lambda: lease_of(ada, "anchor").get("state") == "active", "its lease is open")
    wait_for(lambda: answers(product), "it answers")


def kill(product: Product, name: str) -> None:
    """Kill a daemon with SIGKILL and wait until it runs again."""
    before = product.supervisor.pid(name)
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: product.supervisor.pid(name) not in (0, before), f"{name} is started again")


@pytest.mark.parametrize("name", ["slurmctld", "slurmd-rig1", "munged"])
def test_killed_slurm_daemon_ends_no_server(product, observer, queue, ada, ben, anchor, name):
    """The notebook keeps running without the daemon, and servers start again with it."""
    running = lease_of(ada, "anchor")["slurm_job"]
    queue.wait_saved(running)
    kill(product, name)
    check_anchor(product, observer, anchor, ada)
    start(ben, "after", "rtx5070")
    stop(ben, "after")
    check_anchor(product, observer, anchor, ada)
    assert queue.state(running) == "RUNNING"


def test_hub_and_broker_are_killed_while_a_server_is_queued(product, observer, queue, ada, ben, anchor):
    """The server's job is found again instead of submitted twice, and it starts when its turn comes."""
    job = queue.submit("ben", "--gres=gpu:rtx5060:1")
    wait_for(lambda: queue.state(job) == "RUNNING", "the plain job runs")
    ben.start("waiting", "rtx5060")
    wait_for(lambda: lease_of(ben, "waiting").get("slurm_job"), "the request is in Slurm's queue")
    waits = [row.id for row in queue.list_lease_jobs() if row.state == "PENDING"]
    for name in ("hub", "broker"):
        kill(product, name)
    wait_for(lambda: lease_of(ben, "waiting"), "hub and broker answer again", deadline_s=60)
    assert [row.id for row in queue.list_lease_jobs() if row.state == "PENDING"] == waits
    queue.ask("scancel", str(job), user="ben")
    wait_for(lambda: ben.is_ready("waiting"), "the server has started", deadline_s=90)
    assert lease_of(ben, "waiting")["slurm_job"] == waits[0]
    check_anchor(product, observer, anchor, ada)
    stop(ben, "waiting")


def test_node_loss_ends_only_its_server(product, observer, queue, ada, ben, anchor):
    """The node's server ends with a reason, others keep running, and the node takes work again when it returns."""
    lease = start(ben, "unlucky", "rtx5070")
    for name in ("slurmd-rig2", "rig2"):
        product.supervisor.stop(name)
    for pid in docker_daemons.find_processes(queue.plan, queue.plan.node("rig2")):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: queue.state(lease["slurm_job"]) != "RUNNING", "Slurm misses the node", deadline_s=120)
    for name in ("rig2", "slurmd-rig2"):
        product.supervisor.ensure_started(name)
    docker_daemons.wait_ready(queue.plan, product.paths)
    slurm_daemons.wait_ready(queue.plan, product.paths)
    wait_for(lambda: is_gone(ben, "unlucky"), "its server has ended", deadline_s=90)
    assert find_lease(ben, lease["id"])["reason"]
    check_anchor(product, observer, anchor, ada)
    start(ben, "lucky", "rtx5070")
    stop(ben, "lucky")


def test_backend_cannot_change_while_it_runs(product):
    """`make up` with another backend is refused with the remedy; without one it keeps the current backend."""
    before = {name: product.supervisor.pid(name) for name in product.supervisor.states()}
    command = [ROOT / ".venv/bin/gpuhub", "up", "--instance", INSTANCE, "--engine", "builtin"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "`sudo make down` first, then `sudo make up ENGINE=builtin`" in done.stderr
    assert {name: product.supervisor.pid(name) for name in product.supervisor.states()} == before
    assert settings.load(product.paths.closet_cluster_file).engine == "slurm"
