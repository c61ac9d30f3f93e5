"""GPUs that fail, in the simulated driver's words, which are NVIDIA's."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gpuhub.closet import cards, daemons, shell
from gpuhub.closet.cards import Fault
from tests.faults.bed import Bed
from tests.support.product import wait_for

Figure = Callable[[str, float], None]


@pytest.mark.case("G1")
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault.LOST, "GPU is lost"),
        pytest.param(Fault.FALLEN_OFF_BUS, "Unknown Error"),
        pytest.param(Fault.ECC, "uncorrectable memory error", marks=pytest.mark.fast),
        (Fault.REMAP_FAILED, "could not be replaced"),
    ],
)
def test_a_gpu_fails(bed: Bed, figure: Figure, fault: Fault, says: str) -> None:
    """It is named with its fault, its user's lease stays, and nobody gets it before it is mended."""
    bed.start("ada", "nb", "on2")
    began = time.monotonic()
    cards.set_fault(bed.paths, "rig2", 0, fault)
    wait_for(lambda: bed.gpu("rig2").get("state") == "failed", "the GPU is failed", 30)
    figure("detected_s", time.monotonic() - began)
    assert says in bed.gpu("rig2")["message"]
    assert says in bed.node("rig2")["message"]
    assert "GPU 0" in bed.node("rig2")["message"]
    assert bed.lease_of("ada", "nb")["state"] == "active"
    bed.stop("ada", "nb")
    bed.ask_start("ben", "nb", "on2")
    lease = wait_for(lambda: bed.lease_of("ben", "nb"), "ben's request is known")
    time.sleep(5)
    assert bed.lease_of("ben", "nb")["state"] == lease["state"] == "requested"
    cards.set_fault(bed.paths, "rig2", 0, Fault.NONE)
    bed.wait_ready("ben", "nb", 60)


@pytest.mark.case("G2")
def test_nvml_hangs(bed: Bed, figure: Figure) -> None:
    """The GPU is not given any more, and the broker answers as quickly as ever."""
    began = time.monotonic()
    cards.set_fault(bed.paths, "rig2", 0, Fault.HANG)
    slowest = 0.0

    def noticed() -> bool:
        nonlocal slowest
        asked = time.monotonic()
        state = bed.gpu("rig2").get("state")
        slowest = max(slowest, time.monotonic() - asked)
        return state not in {"free", None}

    wait_for(noticed, "the GPU is not given", 30)
    figure("detected_s", time.monotonic() - began)
    figure("slowest_answer_s", slowest)
    assert slowest < 2
    assert "NVML does not answer" in bed.node("rig2")["message"]
    bed.start("ada", "nb", "on3")
    cards.set_fault(bed.paths, "rig2", 0, Fault.NONE)
    wait_for(lambda: bed.gpu("rig2").get("state") == "free", "the GPU is free again", 60)


@pytest.mark.case("G3")
@pytest.mark.fast
def test_containers_lose_their_devices(bed: Bed, figure: Figure) -> None:
    """The owner is told to restart; the agent is made anew; after the restart all is well."""
    seen = bed.start("ada", "nb", "on2")
    first = bed.last_event()
    began = time.monotonic()
    take_devices(bed, "rig2")
    assert bed.execute(seen, "sh", "-c", ": <> /dev/nvidiactl")[0] != 0
    wait_for(lambda: bed.lease_of("ada", "nb").get("note"), "ada is told", 30)
    figure("told_s", time.monotonic() - began)
    assert "restart your server" in bed.lease_of("ada", "nb")["note"]
    assert [event["owner"] for event in bed.events("gpu.lost", after=first)] == ["ada"]
    wait_for(lambda: (node := bed.node("rig2")) and node["message"] is None, "the new agent reads", 60)
    figure("read_again_s", time.monotonic() - began)
    bed.stop("ada", "nb")
    again = bed.start("ada", "nb", "on2")
    assert bed.execute(again, "sh", "-c", ": <> /dev/nvidiactl")[0] == 0
    assert bed.lease_of("ada", "nb")["note"] is None


def take_devices(bed: Bed, node: str) -> None:
    """Every container there has a driver's device that its control group refuses, in place of the one it was given."""
    swap = "umask 0; rm -f /dev/nvidiactl && mknod /dev/nvidiactl c 195 255"
    with bed.client_of(node) as client:
        for one in client.containers(filters={"label": [f"gpuhub.instance={bed.paths.instance}"]}):
            pid = process_of(bed, node, client.inspect_container(one["Id"])["State"]["Pid"])
            shell.succeeds(("nsenter", "-t", str(pid), "--mount", "sh", "-c", swap))


def process_of(bed: Bed, node: str, inner: int) -> int:
    """The machine's own id of a process that the node's namespace calls `inner`."""
    for pid in daemons.processes(bed.plan, bed.plan.node(node)):
        status = Path(f"/proc/{pid}/status")
        with suppress(OSError):
            ids = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()[1:]
            if len(ids) > 1 and ids[1] == str(inner):
                return pid
    raise AssertionError(f"{node} has no process {inner}")


@pytest.mark.case("G4")
@pytest.mark.parametrize("left", [((4242, 3000),), ()], ids=["process", "memory"])
def test_something_is_left_on_a_gpu(bed: Bed, left: tuple[tuple[int, int], ...]) -> None:
    """After the lease has ended, the GPU is given to nobody before it is empty."""
    bed.start("ada", "nb", "on2")
    cards.set_live(bed.paths, bed.plan.node("rig2"), 0, cards.Live(memory_used_mib=3000, processes=left))
    bed.stop("ada", "nb")
    wait_for(lambda: bed.gpu("rig2").get("state") == "outside", "the GPU is in use from outside", 30)
    bed.ask_start("ben", "nb", "on2")
    wait_for(lambda: bed.lease_of("ben", "nb"), "ben's request is known")
    time.sleep(5)
    assert bed.lease_of("ben", "nb")["state"] == "requested"
    cards.set_live(bed.paths, bed.plan.node("rig2"), 0, cards.Live())
    bed.wait_ready("ben", "nb", 60)


@pytest.mark.case("G5")
def test_the_driver_was_upgraded(bed: Bed, figure: Figure) -> None:
    """NVML does not start: nothing is given there, and the administrator reads what to do."""
    began = time.monotonic()
    cards.set_fault(bed.paths, "rig2", 0, Fault.DRIVER_MISMATCH)
    # NVML stays open in the agent, as it would: what is started after the upgrade meets it.
    bed.crash("rig2")
    wait_for(lambda: "reboot needed" in (bed.node("rig2").get("message") or ""), "it is told", 60)
    figure("detected_s", time.monotonic() - began)
    assert bed.gpu("rig2")["state"] != "free"
    bed.start("ada", "nb", "on3")
    cards.set_fault(bed.paths, "rig2", 0, Fault.NONE)
    wait_for(lambda: bed.gpu("rig2").get("state") == "free", "the GPU is free again", 60)
