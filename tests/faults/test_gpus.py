"""GPUs that fail, with the messages of NVIDIA's driver from the simulated one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gpuhub_closet import docker_daemons, gpu_state, shell
from gpuhub_closet.gpu_state import GpuFault
from tests.faults.testbed.testbed import FaultTestbed
from tests.support.closet import practice_closet
from tests.support.product import wait_for

Figure = Callable[[str, float], None]


@pytest.mark.case("G1")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (GpuFault.LOST, "GPU is lost"),
        pytest.param(GpuFault.FALLEN_OFF_BUS, "Unknown Error"),
        pytest.param(GpuFault.ECC, "uncorrectable memory error", marks=pytest.mark.fast),
        (GpuFault.REMAP_FAILED, "could not be replaced"),
    ],
)
def test_a_gpu_fails(testbed: FaultTestbed, figure: Figure, fault: GpuFault, message: str) -> None:
    """The GPU is named with its fault, its user keeps the lease, and it is not granted before it recovers."""
    testbed.start("ada", "nb", "on2")
    began = time.monotonic()
    practice_closet.set_fault(testbed.paths, "rig2", 0, fault)
    wait_for(lambda: testbed.gpu("rig2").get("state") == "failed", "the GPU is failed", 30)
    figure("detected_s", time.monotonic() - began)
    assert message in testbed.gpu("rig2")["message"]
    assert message in testbed.node("rig2")["message"]
    assert "GPU 0" in testbed.node("rig2")["message"]
    assert testbed.lease_of("ada", "nb")["state"] == "active"
    testbed.stop("ada", "nb")
    testbed.ask_start("ben", "nb", "on2")
    lease = wait_for(lambda: testbed.lease_of("ben", "nb"), "ben's request is known")
    time.sleep(5)
    assert testbed.lease_of("ben", "nb")["state"] == lease["state"] == "requested"
    practice_closet.set_fault(testbed.paths, "rig2", 0, GpuFault.NONE)
    testbed.wait_ready("ben", "nb", 60)


@pytest.mark.case("G2")
def test_nvml_hangs(testbed: FaultTestbed, figure: Figure) -> None:
    """The GPU is not granted, and the broker answers as fast as usual."""
    began = time.monotonic()
    practice_closet.set_fault(testbed.paths, "rig2", 0, GpuFault.HANG)
    slowest = 0.0

    def noticed() -> bool:
        nonlocal slowest
        asked = time.monotonic()
        state = testbed.gpu("rig2").get("state")
        slowest = max(slowest, time.monotonic() - asked)
        return state not in {"free", None}

    wait_for(noticed, "the GPU is not given", 30)
    figure("detected_s", time.monotonic() - began)
    figure("slowest_answer_s", slowest)
    assert slowest < 2
    assert "NVML does not answer" in testbed.node("rig2")["message"]
    testbed.start("ada", "nb", "on3")
    practice_closet.set_fault(testbed.paths, "rig2", 0, GpuFault.NONE)
    wait_for(lambda: testbed.gpu("rig2").get("state") == "free", "the GPU is free again", 60)


@pytest.mark.case("G3")
@pytest.mark.fast
def test_containers_lose_their_devices(testbed: FaultTestbed, figure: Figure) -> None:
    """The owner is asked to restart, the agent is recreated, and the GPU is usable after the restart."""
    seen = testbed.start("ada", "nb", "on2")
    first = testbed.last_event()
    began = time.monotonic()
    take_devices(testbed, "rig2")
    assert testbed.execute(seen, "sh", "-c", ": <> /dev/nvidiactl")[0] != 0
    wait_for(lambda: testbed.lease_of("ada", "nb").get("note"), "ada is informed", 30)
    figure("reported_s", time.monotonic() - began)
    assert "restart your server" in testbed.lease_of("ada", "nb")["note"]
    assert [event["owner"] for event in testbed.events("gpu.lost", after=first)] == ["ada"]
    wait_for(lambda: (node := testbed.node("rig2")) and node["message"] is None, "the new agent reads", 60)
    figure("read_again_s", time.monotonic() - began)
    testbed.stop("ada", "nb")
    again = testbed.start("ada", "nb", "on2")
    assert testbed.execute(again, "sh", "-c", ": <> /dev/nvidiactl")[0] == 0
    assert testbed.lease_of("ada", "nb")["note"] is None


def take_devices(testbed: FaultTestbed, node: str) -> None:
    """Replace the driver's device in every container on the node by one that its control group refuses."""
    swap = "umask 0; rm -f /dev/nvidiactl && mknod /dev/nvidiactl c 195 255"
    with testbed.client_of(node) as client:
        for container in client.containers(filters={"label": [f"gpuhub.instance={testbed.paths.instance}"]}):
            pid = process_of(testbed, node, client.inspect_container(container["Id"])["State"]["Pid"])
            shell.is_successful(("nsenter", "-t", str(pid), "--mount", "sh", "-c", swap))


def process_of(testbed: FaultTestbed, node: str, inner: int) -> int:
    """Return the machine's id of the process that has id `inner` in the node's namespace."""
    for pid in docker_daemons.find_processes(testbed.plan, testbed.plan.node(node)):
        status = Path(f"/proc/{pid}/status")
        with suppress(OSError):
            ids = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()[1:]
            if len(ids) > 1 and ids[1] == str(inner):
                return pid
    raise AssertionError(f"{node} has no process {inner}")


@pytest.mark.case("G4")
@pytest.mark.parametrize("left", [((4242, 3000),), ()], ids=["process", "memory"])
def test_leftover_process_or_memory_on_a_gpu(testbed: FaultTestbed, left: tuple[tuple[int, int], ...]) -> None:
    """The GPU of an ended lease is not granted while a process or memory is left on it."""
    testbed.start("ada", "nb", "on2")
    practice_closet.set_gpu_load(
        testbed.paths, testbed.plan.node("rig2"), 0, gpu_state.GpuLoad(memory_used_mib=3000, processes=left)
    )
    testbed.stop("ada", "nb")
    wait_for(lambda: testbed.gpu("rig2").get("state") == "outside", "the GPU is in use from outside", 30)
    testbed.ask_start("ben", "nb", "on2")
    wait_for(lambda: testbed.lease_of("ben", "nb"), "ben's request is known")
    time.sleep(5)
    assert testbed.lease_of("ben", "nb")["state"] == "requested"
    practice_closet.set_gpu_load(testbed.paths, testbed.plan.node("rig2"), 0, gpu_state.GpuLoad())
    testbed.wait_ready("ben", "nb", 60)


@pytest.mark.case("G5")
def test_the_driver_was_upgraded(testbed: FaultTestbed, figure: Figure) -> None:
    """NVML does not start: no GPU of the node is granted, and the message asks for a reboot."""
    began = time.monotonic()
    practice_closet.set_fault(testbed.paths, "rig2", 0, GpuFault.DRIVER_MISMATCH)
    # As on a real machine NVML stays open in the agent; processes started after the upgrade fail.
    testbed.crash("rig2")
    wait_for(lambda: "reboot needed" in (testbed.node("rig2").get("message") or ""), "it is reported", 60)
    figure("detected_s", time.monotonic() - began)
    assert testbed.gpu("rig2")["state"] != "free"
    testbed.start("ada", "nb", "on3")
    practice_closet.set_fault(testbed.paths, "rig2", 0, GpuFault.NONE)
    wait_for(lambda: testbed.gpu("rig2").get("state") == "free", "the GPU is free again", 60)
