"""What is known of nodes and GPUs, how readings change it, and the agent that makes them."""

from __future__ import annotations

import errno
import json
import os
import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common.gpu import GpuSpec
from gpuhub.config.head_address import find_head_address
from gpuhub.config.own_address import find_source_address
from gpuhub.nodes import agent, agent_container
from gpuhub.nodes.agent_container import (
    agent_script,
    build_container,
    build_hash,
    build_host_config,
    find_last_line,
)
from gpuhub.nodes.inventory import build_inventory
from gpuhub.nodes.status import STALE_S, AgentReading, GpuProcess, GpuReading, NodeStatus
from tests.support import clusters
from tests.support.broker.calls import ask, read
from tests.support.broker.in_process import Setting, asgi_broker, until
from tests.support.docker.simulated_nodes import SimulatedNode, build_cluster


def gpu(uuid: str = "GPU-1", index: int = 0, **changes: Any) -> GpuReading:
    return GpuReading(**{"uuid": uuid, "index": index, "model": "RTX 5090", "memory_mib": 32607, **changes})


def mig(slot: int, parent: str = "GPU-1", index: int = 0) -> GpuReading:
    return gpu(f"MIG-{parent}-{slot}", index, is_mig=True, parent=parent)


def line(n: int, *gpus: GpuReading, error: str | None = None, boot_id: str | None = "b1") -> AgentReading:
    return AgentReading(line_number=n, error=error, gpus=gpus, boot_id=boot_id, driver="580.95.05")


def read_once(*gpus: GpuReading) -> NodeStatus:
    return agent_container.record_agent_reading(NodeStatus(name="rig1"), line(1, *gpus), 100.0)


def test_agent_line_is_read_once() -> None:
    """A repeated line is not a new reading; its age counts from its first appearance."""
    node = agent_container.record_agent_reading(read_once(gpu()), line(1, gpu()), 110.0)
    assert (node.read_at, node.boot_id, node.driver, node.has_readings) == (100.0, "b1", "580.95.05", True)
    assert node.is_fresh(100.0 + STALE_S)
    assert not node.is_fresh(100.1 + STALE_S)


def test_reading_is_newer_than_the_previous_probe() -> None:
    """A new line was printed after the last poll; for the first line the time is unknown."""
    node = read_once(gpu())
    assert not node.is_read_after(0.0)
    node = agent_container.record_agent_reading(node, line(1, gpu()), 102.0)
    node = agent_container.record_agent_reading(node, line(2, gpu()), 104.0)
    assert node.is_read_after(102.0)
    assert not node.is_read_after(102.1)


def test_stale_line_after_a_failure_is_not_a_reading() -> None:
    """If the agent can be read again but its line is old, its GPUs count as not read."""
    node = agent_container.record_agent_failure(read_once(gpu()), "no image")
    assert (node.gpu_error, node.read_at) == ("no image", None)
    node = agent_container.record_agent_reading(node, line(1, gpu()), 110.0)
    assert (node.gpu_error, node.read_at) == (None, None)
    assert agent_container.record_agent_reading(node, line(2, gpu()), 112.0).read_at == 112.0


def test_failed_or_missing_gpu_is_kept_with_the_reason() -> None:
    """Until a reading without the fault it stays, with the reason."""
    node = read_once(gpu("a", 0), gpu("b", 1))
    broken = agent_container.record_agent_reading(node, line(2, gpu("", 0, error="GPU is lost"), gpu("b", 1)), 101.0)
    assert [(g.uuid, g.error) for g in broken.gpus] == [("a", "GPU is lost"), ("b", None)]
    fewer = agent_container.record_agent_reading(node, line(2, gpu("b", 1)), 101.0)
    assert [(g.uuid, g.is_listed) for g in fewer.gpus] == [("a", False), ("b", True)]
    mended = agent_container.record_agent_reading(fewer, line(3, gpu("a", 0), gpu("b", 1)), 102.0)
    assert [g.error for g in mended.gpus] == [None, None]


def test_nvml_failure_fails_every_gpu() -> None:
    """The cards still exist, and count for what can ever be granted."""
    node = agent_container.record_agent_reading(read_once(gpu()), line(2, error="NVML does not answer"), 101.0)
    assert [g.error for g in node.gpus] == ["NVML does not answer"]
    assert node.gpu_error == "NVML does not answer"
    inventory = build_inventory(build_cluster(), {}).with_node(node)
    assert inventory.cards()["rig1"] == (GpuSpec(model="RTX 5090", memory_mib=32607),)


def test_mig_reconfiguration_replaces_the_listed_devices() -> None:
    """MIG devices take the place of their GPU, other ones theirs, and the whole GPU that of all."""
    whole, other = gpu("GPU-1", 0), gpu("GPU-2", 1)
    split = agent_container.merge_readings([whole, other], [mig(0), mig(1), other])
    assert [g.uuid for g in split] == ["MIG-GPU-1-0", "MIG-GPU-1-1", "GPU-2"]
    again = agent_container.merge_readings(split, [mig(2), other])
    assert [g.uuid for g in again] == ["MIG-GPU-1-2", "GPU-2"]
    assert agent_container.merge_readings(again, [whole, other]) == (whole, other)
    lost = agent_container.merge_readings(split, [gpu("", 0, error="GPU is lost"), other])
    assert [g.error for g in lost] == ["GPU is lost", "GPU is lost", None]


GOOD = {
    "n": 3,
    "boot_id": "b1",
    "driver": "580.95.05",
    "disk_free": 7,
    "error": None,
    "gpus": [
        {
            "uuid": "a",
            "index": 0,
            "name": "NVIDIA GeForce RTX 5090",
            "memory_total_mib": 32607,
            "processes": [{"pid": 7, "memory_mib": 300}, {"pid": 8, "memory_mib": None}],
            "capability": [12, 0],
            "ecc_uncorrected": 2,
            "remap_failed": True,
            "error": None,
        }
    ],
}


def test_free_space_is_that_of_the_fuller_disk(tmp_path: Path) -> None:
    """What is reserved for root does not count as free."""
    space = os.statvfs(tmp_path)
    assert agent.read_disk_free((str(tmp_path), "/proc")) == 0
    assert 0 < agent.read_disk_free((str(tmp_path),)) <= space.f_blocks * space.f_frsize
    readings: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=agent.read_repeatedly, args=(readings, 60), daemon=True).start()
    assert readings.get(timeout=60)["disk_free"] > 0


def test_agent_line_is_parsed_completely() -> None:
    """Every field of a line arrives."""
    found = agent_container.parse_agent_line(json.dumps(GOOD).encode() + b"\n")
    assert found is not None
    assert (found.line_number, found.boot_id, found.driver) == (3, "b1", "580.95.05")
    assert found.disk_free == 7
    assert agent_container.record_agent_reading(NodeStatus(name="rig1"), found, 1.0).disk_free == 7
    (card,) = found.gpus
    assert (card.model, card.memory_mib, card.capability, card.is_mig) == ("RTX 5090", 32607, (12, 0), False)
    assert card.processes == (GpuProcess(pid=7, memory_mib=300), GpuProcess(pid=8, memory_mib=None))
    assert (card.ecc_uncorrected, card.remap_failed) == (2, True)


@pytest.mark.parametrize(
    "cut", [b"", b"\n", json.dumps(GOOD).encode()[:40], b"[]", b"null", b"Traceback", b"\xff", b"{}"]
)
def test_truncated_or_empty_lines_are_not_readings(cut: bytes) -> None:
    """Right after a rotation the log may end in the middle of a line."""
    assert agent_container.parse_agent_line(cut) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [(b"", b""), (b"half", b""), (b"one\n", b"one"), (b"one\ntwo\n", b"two"), (b"one\ntw", b"one")],
)
def test_last_complete_line_is_used(text: bytes, expected: bytes) -> None:
    """Docker cuts a long line into pieces of 16 KiB; one that has no end yet is not read."""
    assert find_last_line(text) == expected


def test_simulated_lines_match_the_agent_format() -> None:
    """The tests' nodes print lines as the agent does: GPUs, MIG devices, faults and processes."""
    node = SimulatedNode(name="rig1", cards=[("NVIDIA GeForce RTX 5090", 32607)] * 3)
    node.processes[0], node.ecc[0], node.gpu_errors[1] = [(7, 300)], 1, "GPU is lost"
    node.mig[2] = [("NVIDIA GeForce RTX 5090 MIG 1g.8gb", 8192)] * 2
    found = agent_container.parse_agent_line(node.print_line())
    assert found is not None
    assert [g.uuid for g in found.gpus] == ["GPU-rig1-0", "", "MIG-GPU-rig1-2-0", "MIG-GPU-rig1-2-1"]
    assert found.gpus[0].processes == (GpuProcess(pid=7, memory_mib=300),)
    assert [g.is_mig for g in found.gpus] == [False, False, True, True]


def test_gpu_reported_by_two_nodes_is_detected() -> None:
    """Two nodes that report one card have a problem, because a card cannot be in two machines."""
    inventory = build_inventory(build_cluster(), {"rig1": [gpu("a")]})
    inventory = inventory.with_node(NodeStatus(name="rig2", gpus=(gpu("a"), gpu("b", 1))))
    assert inventory.duplicate_uuids == {"a"}
    assert inventory.with_node(NodeStatus(name="rig2", gpus=(gpu("b", 1),))).duplicate_uuids == frozenset()


def test_replaced_models_are_forgotten_at_the_start() -> None:
    """What an earlier run read counts until the first reading, except GPUs that the settings no longer name."""
    kept = build_inventory(clusters.build_cluster(), {"rig1": [gpu("a")]}).nodes["rig1"]
    assert ([found.uuid for found in kept.gpus], kept.has_readings) == (["a"], True)
    replaced = build_inventory(clusters.build_cluster(), {"rig1": [gpu("a", model="RTX 4090")]})
    assert (replaced.nodes["rig1"].gpus, replaced.nodes["rig1"].has_readings) == ((), False)
    assert replaced.cards()["rig1"] == build_inventory(clusters.build_cluster(), {}).cards()["rig1"]


def test_agent_runs_without_gpuhub_and_without_privileges() -> None:
    """The script imports only the standard library and pynvml, and its container has only read access."""
    script = agent_script()
    assert "gpuhub" not in script.replace("gpuhub.", "").split('"""', 2)[2]
    compile(script, "agent", "exec")
    host = build_host_config()
    assert (host["network_mode"], host["cap_drop"], host["read_only"]) == ("none", ["ALL"], True)
    assert build_container("ghtest", "b", script)["user"] == "65534:65534"
    assert build_hash(script, "i1") != build_hash(script, "i2") != build_hash(script + " ", "i2")
    assert agent.PERIOD_S < agent.HANG_S < STALE_S


def test_agent_reports_a_hanging_nvml() -> None:
    """Without a reading the line has an error, and the next reading is printed when it arrives."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    assert agent.next_reading(waiting, hang_s=0.01) == {"driver": None, "error": "NVML does not answer", "gpus": []}
    waiting.put({"driver": "1", "error": None, "gpus": []})
    assert agent.next_reading(waiting, hang_s=0.01)["driver"] == "1"


def test_boot_id_is_read_from_the_kernel(tmp_path: Any) -> None:
    """Read from the kernel's file, and not known where there is none."""
    (tmp_path / "boot_id").write_text("0b4f\n")
    assert agent.read_boot_id(str(tmp_path / "boot_id")) == "0b4f"
    assert agent.read_boot_id(str(tmp_path / "none")) is None


async def test_agent_is_replaced_when_its_image_changes(setting: Setting) -> None:
    """An agent of another build is replaced; one of this build is kept."""
    node = setting.nodes["rig1"]
    node.run_container({"gpuhub.kind": "agent", "gpuhub.agent": "old"}, name="ghtest-agent")
    async with asgi_broker(setting):
        (agent_container,) = node.of_kind("agent")
    assert agent_container["Labels"]["gpuhub.agent"] != "old"
    async with asgi_broker(setting):
        assert node.of_kind("agent") == [agent_container]


async def test_node_without_container_toolkit_accepts_notebooks_without_gpu(setting: Setting) -> None:
    """The missing toolkit is reported; notebooks without GPU run there nevertheless."""
    for node in setting.nodes.values():
        node.has_toolkit = False
    async with asgi_broker(setting) as running:
        assert (await ask(running, "ada", profile="cpu"))["nodes"] == ["rig1"]
        view = await read(running, "ada", "/cluster")
    assert view["nodes"][0]["message"] == (
        "node rig1: its Docker has no NVIDIA container toolkit, so its GPUs cannot be used"
    )


async def test_cluster_view_shows_free_gpus_and_holders(setting: Setting) -> None:
    """Profiles count what a new request could get now: not what is held, nor what others wait for."""
    async with asgi_broker(setting) as running:
        await ask(running, "ada")
        await ask(running, "ben")
        view = await read(running, "cleo", "/cluster")
        profiles = {profile["name"]: profile for profile in view["profiles"]}
        assert {n: (p["total"], p["free"], p["starts_now"], p["ahead"]) for n, p in profiles.items()} == {
            "rtx5060": (1, 1, True, 0),
            "rtx5070": (1, 1, True, 0),
            "rtx5090": (1, 0, False, 1),
            "any": (3, 2, True, 0),
            "cpu": (0, 0, True, 0),
        }
        assert [h["owner"] for h in profiles["rtx5090"]["holders"]] == ["ada"]
        assert view["nodes"][0]["gpus"][0]["holder"]["owner"] == "ada"
        assert [(q["owner"], q["position"], q["wants"]) for q in view["queue"]] == [("ben", 1, "profile rtx5090")]
        await until(lambda: running.core.capacity.inventory.nodes["rig1"].line_number, "a line was read")


def test_head_node_address_is_the_setting_or_the_source_address() -> None:
    """A setting counts; a node on loopback does not reveal the address."""
    assert find_head_address(build_cluster(hub={"address": "10.1.2.3"})) == "10.1.2.3"
    assert find_source_address("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(("number", "is_lost"), [(errno.EPERM, True), (errno.EACCES, False), (errno.ENOENT, False)])
def test_lost_devices_are_detected_by_refused_access(
    monkeypatch: pytest.MonkeyPatch, number: int, is_lost: bool
) -> None:
    """A file's mode, or a device that is not there, is another matter."""

    def refuse(path: str, flags: int) -> int:
        raise OSError(number, os.strerror(number), path)

    assert not agent.has_lost_devices("/dev/null")
    monkeypatch.setattr(agent.os, "open", refuse)
    assert agent.has_lost_devices() is is_lost


def test_moved_gpu_belongs_only_to_its_new_node() -> None:
    """The old node keeps a GPU that it no longer reports as failed until another node reports it."""
    inventory = build_inventory(build_cluster(), {})
    for name in ("rig1", "rig2"):
        inventory = inventory.with_node(
            agent_container.record_agent_reading(NodeStatus(name=name), line(1, gpu(f"GPU-{name}")), 100.0)
        )
    inventory = inventory.with_node(agent_container.record_agent_reading(inventory.nodes["rig2"], line(2), 102.0))
    assert [found.is_listed for found in inventory.nodes["rig2"].gpus] == [False]
    moved = line(2, gpu("GPU-rig1"), gpu("GPU-rig2", 1))
    inventory = inventory.with_node(agent_container.record_agent_reading(inventory.nodes["rig1"], moved, 104.0))
    assert inventory.nodes["rig2"].gpus == ()
    assert inventory.nodes_reporting("GPU-rig2") == ("rig1",)
    assert inventory.duplicate_uuids == frozenset()
