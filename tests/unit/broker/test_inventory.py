"""What is known of nodes and GPUs, and how readings change it."""

from __future__ import annotations

import json
from typing import Any

from gpuhub.nodes import agent, inventory
from gpuhub.nodes.agent_container import agent_script, build_container, build_hash, build_host_config
from gpuhub.nodes.head import head_address, source_address
from gpuhub.nodes.inventory import AgentReading, GpuReading, Inventory, NodeRecord
from tests.support.brokers import Setting, asgi_broker, until
from tests.support.simulated import build_cluster
from tests.unit.broker.test_api import ask, read


def gpu(uuid: str = "GPU-1", index: int = 0, **changes: Any) -> GpuReading:
    return GpuReading(**{"uuid": uuid, "index": index, "model": "RTX 5090", "memory_mib": 32607, **changes})


def line(n: int, *gpus: GpuReading, error: str | None = None) -> AgentReading:
    return AgentReading(n=n, error=error, gpus=gpus)


def up(*gpus: GpuReading, name: str = "rig1") -> NodeRecord:
    record = inventory.answered(NodeRecord(name=name)).evolve(is_settled=True)
    return inventory.agent_read(record, line(1, *gpus), 100.0)


def of(*records: NodeRecord) -> Inventory:
    return Inventory({record.name: record for record in records}, {record.name: None for record in records})


def test_a_node_is_unreachable_after_three_failures_and_up_at_once() -> None:
    """One lost packet takes no node away; one good answer brings it back, to be looked at before it gets work."""
    node = up(gpu())
    for _ in range(2):
        node = inventory.failed(node, "no answer")
    assert node.takes_work()
    node = inventory.failed(node, "no answer")
    assert (node.is_up, node.takes_work()) == (False, False)
    assert of(node).message("rig1", 100.0) == "no answer"
    node = inventory.answered(node)
    assert (node.is_up, node.takes_work()) == (True, False)


def test_a_silent_agent_makes_its_gpus_unavailable() -> None:
    """The same line again and again is no reading; after fifteen seconds nothing is given there."""
    node = inventory.agent_read(up(gpu()), line(1, gpu()), 110.0)
    assert of(node).slots(115.0)[0].available
    assert not of(node).slots(115.1)[0].available
    assert of(node).message("rig1", 115.1) == "its GPU agent is silent"


def test_a_gpu_that_fails_or_vanishes_is_kept_and_named() -> None:
    """Neither is given, and the page says which and why."""
    node = up(gpu("a", 0), gpu("b", 1))
    broken = inventory.agent_read(node, line(2, gpu("", 0, error="GPU is lost"), gpu("b", 1)), 101.0)
    assert [(g.uuid, g.error) for g in broken.gpus] == [("a", "GPU is lost"), ("b", None)]
    assert [slot.available for slot in of(broken).slots(101.0)] == [False, True]
    assert of(broken).message("rig1", 101.0) == "GPU 0: GPU is lost"
    fewer = inventory.agent_read(node, line(2, gpu("b", 1)), 101.0)
    assert [(g.uuid, g.is_listed) for g in fewer.gpus] == [("a", False), ("b", True)]
    mended = inventory.agent_read(fewer, line(3, gpu("a", 0), gpu("b", 1)), 102.0)
    assert [g.error for g in mended.gpus] == [None, None]


def test_nvml_failing_as_a_whole_is_told() -> None:
    """The cards still exist; none is given."""
    node = inventory.agent_read(up(gpu()), line(2, error="NVML: Driver/library version mismatch"), 101.0)
    assert of(node).message("rig1", 101.0) == "NVML: Driver/library version mismatch"
    assert [slot.available for slot in of(node).slots(101.0)] == [False]
    assert of(node).cards() == {"rig1": (of(node).slots(101.0)[0].card,)}


def test_a_gpu_that_two_nodes_report_is_given_on_neither() -> None:
    """One card cannot be in two machines: something is wrong with the nodes."""
    both = of(up(gpu("a"), name="rig1"), up(gpu("a"), gpu("b", 1), name="rig2"))
    assert {slot.uuid: slot.available for slot in both.slots(100.0)} == {"a": False, "b": True}
    assert both.message("rig2", 100.0) == "another node reports the same GPU a"


def test_lines_cut_off_or_empty_are_no_reading() -> None:
    """Right after a rotation the log may end in the middle of a line."""
    good = json.dumps(
        {"n": 3, "error": None, "gpus": [{"uuid": "a", "index": 0, "name": "NVIDIA GeForce RTX 5090",
         "memory_total_mib": 32607, "error": None}]}
    )  # fmt: skip
    read_ = inventory.parse_agent_line(good.encode() + b"\n")
    assert read_ is not None
    assert (read_.n, read_.gpus[0].model, read_.gpus[0].memory_mib) == (3, "RTX 5090", 32607)
    for cut in (b"", b"\n", good.encode()[:20], b"[]", b"null", b"Traceback", b"\xff"):
        assert inventory.parse_agent_line(cut) is None


def test_the_agent_runs_without_gpuhub_and_without_rights() -> None:
    """Its script imports only the standard library and pynvml, and its container can do nothing but look."""
    script = agent_script()
    assert "gpuhub" not in script.replace("gpuhub.", "").split('"""', 2)[2]
    compile(script, "agent", "exec")
    host = build_host_config()
    assert (host["network_mode"], host["cap_drop"], host["read_only"]) == ("none", ["ALL"], True)
    assert build_container("ghtest", "b", script)["user"] == "65534:65534"
    assert build_hash(script, "i1") != build_hash(script, "i2") != build_hash(script + " ", "i2")
    assert agent.PERIOD_S < inventory.STALE_S


async def test_the_agent_is_replaced_when_its_image_changes(setting: Setting) -> None:
    """An agent of another build is removed and made anew; one of this build is kept."""
    node = setting.nodes["rig1"]
    node.run_container({"gpuhub.kind": "agent", "gpuhub.agent": "old"}, name="ghtest-agent")
    async with asgi_broker(setting):
        (agent_container,) = node.of_kind("agent")
    assert agent_container["Labels"]["gpuhub.agent"] != "old"
    async with asgi_broker(setting):
        assert node.of_kind("agent") == [agent_container]


async def test_a_node_without_the_toolkit_takes_notebooks_without_gpu(setting: Setting) -> None:
    """What is missing there is told; CPU-only notebooks go there all the same."""
    for node in setting.nodes.values():
        node.has_toolkit = False
    async with asgi_broker(setting) as running:
        assert (await ask(running, "ada", profile="cpu"))["nodes"] == ["rig1"]
        view = await read(running, "ada", "/cluster")
    assert view["nodes"][0]["message"] == (
        "node rig1: its Docker has no NVIDIA container toolkit, so no GPU can be given there"
    )


async def test_the_cluster_shows_what_is_free_and_who_holds_the_rest(setting: Setting) -> None:
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
        await until(lambda: running.core.inventory.nodes["rig1"].line, "a line was read")


def test_the_head_address_is_one_that_containers_reach() -> None:
    """A setting counts; a node on loopback is no way to find it."""
    assert head_address(build_cluster(hub={"address": "10.1.2.3"})) == "10.1.2.3"
    assert source_address("127.0.0.1") == "127.0.0.1"
