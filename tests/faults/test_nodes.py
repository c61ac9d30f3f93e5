"""Nodes that die and return, complete or with fewer GPUs."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpuhub.ops.deploy.programs import BROKER
from gpuhub_closet import docker_daemons, gpu_state, shell
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import gpu_uuid
from tests.faults.testbed.testbed import FaultTestbed
from tests.support.product import wait_for

Figure = Callable[[str, float], None]


@contextmanager
def power_off(testbed: FaultTestbed, node: str) -> Iterator[None]:
    """Power off the node, and start it at the end."""
    # In this order: supervisord would start the node again, and its daemon then prove what has ended.
    testbed.supervisor.kill(node)
    testbed.signal_daemon(node, signal.SIGKILL)
    shell.wait_until(lambda: not docker_daemons.is_answering(testbed.plan.node(node), testbed.paths), timeout_s=30)
    try:
        yield
    finally:
        testbed.supervisor.ensure_started(node)
        docker_daemons.wait_ready(testbed.plan, testbed.paths)


@pytest.mark.case("N1")
def test_a_node_dies_and_returns(testbed: FaultTestbed, figure: Figure) -> None:
    """The lease stays while the node is away; when it returns the container has ended, and the GPU is granted."""
    testbed.start("ada", "nb", "on2")
    other = testbed.start("ben", "nb", "on3")
    with power_off(testbed, "rig2"):
        began = time.monotonic()
        wait_for(lambda: testbed.node("rig2").get("state") == "unreachable", "rig2 is unreachable", 60)
        figure("detected_s", time.monotonic() - began)
        time.sleep(10)
        assert testbed.lease_of("ada", "nb")["state"] == "active"
    returned = time.monotonic()
    wait_for(lambda: not testbed.lease_of("ada", "nb"), "the lease ends", 60)
    figure("freed_s", time.monotonic() - returned)
    wait_for(lambda: testbed.gpu("rig2").get("state") == "free", "the GPU is free", 60)
    figure("free_s", time.monotonic() - returned)
    assert testbed.container("ben", "nb") == other
    wait_for(lambda: not testbed.clients["ada"].is_ready("nb"), "the hub notices", 60)
    testbed.start("ada", "again", "on2")


@pytest.mark.case("N3")
def test_a_kept_server_starts_again_after_its_node(testbed: FaultTestbed, figure: Figure) -> None:
    """It asks for its GPU again by itself, and is ready under the same address."""
    testbed.ask_start("ada", "nb", "on2", keep="yes")
    old = testbed.wait_ready("ada", "nb")
    with power_off(testbed, "rig2"):
        wait_for(lambda: testbed.node("rig2").get("state") == "unreachable", "rig2 is unreachable", 60)
    returned = time.monotonic()
    wait_for(
        lambda: (seen := testbed.container("ada", "nb")) is not None and seen.id != old.id, "another container", 90
    )
    new = testbed.wait_ready("ada", "nb", 90)
    figure("ready_s", time.monotonic() - returned)
    assert new.node == "rig2"
    assert testbed.lease_of("ada", "nb")["state"] == "active"


@pytest.mark.case("N2")
def test_a_node_returns_with_fewer_gpus(testbed: FaultTestbed) -> None:
    """Of two GPUs the missing one is failed and named, and the other one is granted."""
    folder = node_paths(testbed.paths, "rig2").gpus
    second = folder / "1"
    with power_off(testbed, "rig2"):
        shutil.copytree(folder / "0", second)
        card = gpu_state.format_gpu(
            testbed.plan.node("rig2").gpus[0], index=1, uuid=gpu_uuid(testbed.plan.instance, "rig2", 1)
        )
        (second / "card").write_text(card)
    try:
        wait_for(
            lambda: [gpu["state"] for gpu in testbed.node("rig2")["gpus"]] == ["free", "free"], "both are free", 60
        )
        with power_off(testbed, "rig2"):
            shutil.rmtree(second)
        wait_for(
            lambda: [gpu["state"] for gpu in testbed.node("rig2")["gpus"]] == ["free", "failed"], testbed.describe, 60
        )
        assert "no longer reports" in testbed.node("rig2")["gpus"][1]["message"]
        assert "GPU 1: " in testbed.node("rig2")["message"]
        assert testbed.start("ada", "nb", "on2").node == "rig2"
        testbed.ask_start("ben", "nb", "on2")
        wait_for(lambda: testbed.lease_of("ben", "nb").get("state") == "requested", "ben waits")
    finally:
        shutil.rmtree(second, ignore_errors=True)
        testbed.clear_servers()
        # The broker forgets a removed GPU at its next start.
        testbed.kill_and_wait(BROKER)
    wait_for(lambda: [gpu["state"] for gpu in testbed.node("rig2")["gpus"]] == ["free"], testbed.describe, 60)
