"""The keeper on simulated nodes: what it finds out, what it does, and what it must not conclude."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.controllers import deadlines
from gpuhub.broker.controllers.nodes import node_controller, node_probe
from gpuhub.broker.state import mutations
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, NodeSilent, NodeUnreachable
from gpuhub.config.settings import SchedulingSettings
from gpuhub.domain import job_states
from gpuhub.domain.models import JobRow
from gpuhub.nodes.agent import DEVICES_LOST
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, list_event_texts, until
from tests.support.docker.simulated_nodes import build_cluster

GIB = 1024**3

pytestmark = pytest.mark.usefixtures("_short_periods")


@pytest.fixture
def _short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks in quick succession."""
    monkeypatch.setattr(node_controller, "POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(node_controller, "RETRY_POLL_PERIOD_S", 0.05)
    monkeypatch.setattr(deadlines, "CHECK_PERIOD_S", 0.05)


@pytest.fixture
def _short_probe_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that hangs is soon given up."""
    monkeypatch.setattr(node_probe, "PROBE_TIMEOUT_S", 0.2)


async def wait_for_event(running: Running, kind: str) -> str:
    """The first such event, as soon as there is one."""
    found: list[str] = await until(partial(list_event_texts, running, kind), f"{kind} is told")
    return found[0]


def get_node_status(running: Running, name: str = "rig1") -> Any:
    return running.core.capacity.inventory.nodes[name]


async def read_gpu(running: Running, name: str = "rig1") -> Any:
    view = await read(running, "root", "/cluster")
    return next(node for node in view["nodes"] if node["name"] == name)["gpus"][0]


async def wait_for_gpu_state(running: Running, state: str, name: str = "rig1") -> Any:
    async def read_gpu_in_state() -> Any:
        found = await read_gpu(running, name)
        return found if found["state"] == state else None

    return await until(read_gpu_in_state, f"the GPU of {name} is {state}")


async def start_job(running: Running, **changes: Any) -> Any:
    body = {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1, "models": ["RTX 5090"], "batch": True}
    job = await post(running, "ada", "/jobs", {**body, **changes}, 201)
    return await wait_for_state(running, f"/jobs/{job['id']}", "running")


# -- nodes -------------------------------------------------------------------------------------------------------------


async def test_node_with_a_full_disk_takes_no_work_and_comes_back(setting: Setting) -> None:
    """What runs there continues; a request that waits starts as soon as clearly more than the floor is free."""
    rig2 = setting.nodes["rig2"]
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", profile="rtx5070")
        await run_notebook(running, lease)
        rig2.disk_free = 5 * GIB - 1
        text = await wait_for_event(running, "node.disk")
        assert text == "node rig2: disk full: less than 5 GiB are free on the disk of Docker there"
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"
        await delete(running, "ada", f"/leases/{lease['id']}")
        await wait_for_state(running, f"/leases/{lease['id']}", "released")
        waiting = await ask(running, "ben", profile="rtx5070")
        rig2.disk_free = 5 * GIB + 1
        await until(lambda: get_node_status(running, "rig2").disk_free == rig2.disk_free, "the border is read")
        assert (await read(running, "ben", f"/leases/{waiting['id']}"))["state"] == "requested"
        rig2.disk_free = 6 * GIB
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted", token="ben")
        assert len(await list_event_texts(running, "node.disk")) == 2


@pytest.mark.usefixtures("_short_probe_timeout")
@pytest.mark.parametrize("how", ["is_hung", "is_reachable"])
async def test_notebook_survives_an_unreachable_node(setting: Setting, how: str) -> None:
    """It is unreachable soon, others continue meanwhile, and when it answers again all is as it was."""
    rig1 = setting.nodes["rig1"]
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        container = await run_notebook(running, lease)
        setattr(rig1, how, how == "is_hung")
        await until(lambda: not get_node_status(running).is_up, "rig1 is unreachable")
        assert (await ask(running, "ben", profile="rtx5070", key="b"))["state"] == "granted"
        assert "rig1 is unreachable" in await wait_for_event(running, "node.unreachable")
        setattr(rig1, how, how != "is_hung")
        await until(lambda: get_node_status(running).is_up, "rig1 answers")
        assert "rig1 answers again" in await wait_for_event(running, "node.up")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"
    assert list(rig1.containers)[-1] == container or container in rig1.containers


@pytest.mark.usefixtures("_short_probe_timeout")
async def test_worker_on_an_unreachable_node_is_marked(setting: Setting) -> None:
    """Its job runs on as far as is known, and its owner sees that this is not much."""
    async with asgi_broker(setting) as running:
        job = await post(running, "ada", "/jobs", {"run_id": "run-000001", "detached": True}, 201)
        job = await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
        [worker] = job["workers"]
        assert worker["is_reachable"]
        setting.nodes[worker["node"]].is_reachable = False
        await until(lambda: not get_node_status(running, worker["node"]).is_up, "the node is unreachable")
        [listed] = await read(running, "ada", "/jobs")
        assert (listed["state"], listed["workers"][0]["is_reachable"]) == ("running", False)


@pytest.mark.usefixtures("_short_probe_timeout")
async def test_a_daemon_that_waits_for_swarm_is_used(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker says nothing about itself while the Swarm's managers have no leader, and does all else as usual."""
    monkeypatch.setattr(node_probe, "DAEMON_ID_PERIOD_S", 0.0)
    rig1 = setting.nodes["rig1"]
    asked: list[str] = []

    def wait_for_leader(method: str) -> None:
        if method == "info":
            asked.append(method)
            raise NodeSilent("node rig1: its Docker daemon does not answer in time")

    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        rig1.on_call = wait_for_leader
        await until(lambda: len(asked) > 3, "its id is queried")
        assert get_node_status(running).is_up
        # The id is part of each proof.
        await delete(running, "ada", f"/leases/{lease['id']}")
        await wait_for_state(running, f"/leases/{lease['id']}", "released")
        assert (await ask(running, "ben", key="b"))["state"] == "granted"

        # Another container of the agent: this may be another daemon, which has to say who it is.
        del rig1.containers[rig1.of_kind(names.KIND_AGENT)[0]["Id"]]
        await until(lambda: not get_node_status(running).is_up, "rig1 is unreachable")


async def test_one_failed_probe_is_not_an_outage(setting: Setting) -> None:
    """The next look comes soon, and nothing is told."""
    rig1 = setting.nodes["rig1"]
    lost: list[str] = []

    def fail_once(method: str) -> None:
        if method == "containers" and not lost:
            lost.append(method)
            raise NodeUnreachable("node rig1: its Docker daemon cannot be reached")

    async with asgi_broker(setting) as running:
        line = get_node_status(running).line_number
        rig1.on_call = fail_once
        await until(lambda: lost and get_node_status(running).line_number > line + 1, "rig1 is read again")
        assert get_node_status(running).is_up
        assert await list_event_texts(running, "node.unreachable") == []


async def test_uninspectable_container_does_not_fail_its_node(setting: Setting) -> None:
    """A dead file server hangs what is asked about one container; the node continues."""
    rig1 = setting.nodes["rig1"]

    def hang_call(method: str) -> None:
        if method == "inspect_container":
            raise NodeUnreachable("node rig1: its Docker daemon does not answer in time")

    async with asgi_broker(setting) as running:
        rig1.on_call = hang_call
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        line = get_node_status(running).line_number
        await until(lambda: get_node_status(running).line_number > line + 2, "rig1 is read again")
        assert get_node_status(running).is_up
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"


# -- proof -------------------------------------------------------------------------------------------------------------


def shorten_timeouts(setting: Setting) -> None:
    setting.cluster = build_cluster(scheduling=SchedulingSettings(quarantine_after="1s", preempt_grace="1s"))


async def test_lease_that_ends_on_an_unreachable_node_is_quarantined(setting: Setting) -> None:
    """Its GPU stays blocked, everybody sees why, and the node's own word frees it when it comes back."""
    shorten_timeouts(setting)
    rig1 = setting.nodes["rig1"]
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        container = await run_notebook(running, lease)
        rig1.is_reachable = False
        await until(lambda: not get_node_status(running).is_up, "rig1 is unreachable")
        await delete(running, "ada", f"/leases/{lease['id']}")
        waiting = await ask(running, "ben", key="b")
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "quarantined")
        assert "node rig1 does not answer, so what ran there may still run" in ended["note"]
        assert (await wait_for_gpu_state(running, "quarantined"))["holder"]["owner"] == "ada"
        rig1.is_reachable = True
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "released"
        assert container not in rig1.containers


def replace_daemon(setting: Setting, boot_id: str | None = None) -> None:
    """rig1's daemon comes back with other data: it knows nothing of what ran."""
    rig1 = setting.nodes["rig1"]
    rig1.containers.clear()
    rig1.daemon_id = "another"
    rig1.boot_id = boot_id or rig1.boot_id


async def test_another_daemon_does_not_prove_a_release(setting: Setting) -> None:
    """The notebook is not given up, and when it is stopped its GPU stays blocked until an administrator frees it."""
    shorten_timeouts(setting)
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        replace_daemon(setting)
        assert "another Docker daemon answers on rig1" in await wait_for_event(running, "node.suspect")
        await until(lambda: get_node_status(running).is_suspect, "rig1 is suspect")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"
        await delete(running, "ada", f"/leases/{lease['id']}")
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "quarantined")
        assert "another Docker daemon" in ended["note"]
        waiting = await ask(running, "ben", key="b")
        assert waiting["state"] == "requested"
        await running.core.ledger.change(mutations.force_release(lease["id"], "root"))
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")
        assert len(await list_event_texts(running, "node.suspect")) == 1


async def test_machine_restart_proves_a_release(setting: Setting) -> None:
    """With another boot id nothing of the old lease can run, whichever daemon says that it is not there."""
    shorten_timeouts(setting)
    rig1 = setting.nodes["rig1"]
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        rig1.kill()
        await until(lambda: not get_node_status(running).is_up, "rig1 is unreachable")
        replace_daemon(setting)
        rig1.start("boot-2")
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "released")
        assert ended["reason"] == "its container is gone"
        await until(lambda: not get_node_status(running).is_suspect, "rig1 is no longer suspect")


async def test_restart_before_container_creation_is_not_proof(setting: Setting) -> None:
    """The lease outlives the restart, and its container was made after it: another daemon's word frees nothing."""
    rig1 = setting.nodes["rig1"]
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        rig1.kill()
        await until(lambda: not get_node_status(running).is_up, "rig1 is unreachable")
        rig1.start("boot-2")

        def stored() -> tuple[str | None, str | None]:
            return running.core.ledger.snapshot.leases[lease["id"]].identities["rig1"]

        await until(lambda: stored() == (rig1.daemon_id, "boot-2"), "the restart is stored with the lease")
        await run_notebook(running, lease)
        replace_daemon(setting)
        await wait_for_event(running, "node.suspect")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"


async def test_daemon_identity_is_read_after_the_container_list(setting: Setting) -> None:
    """Who answers is asked after the list on which something rests, however lately it was asked before."""
    shorten_timeouts(setting)
    rig1 = setting.nodes["rig1"]
    asked: list[str] = []
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        line = get_node_status(running).line_number
        await until(lambda: get_node_status(running).line_number > line + 2, "rig1 is read again")
        agent = rig1.of_kind(names.KIND_AGENT)[0]
        rig1.on_call = asked.append
        rig1.containers.clear()
        rig1.containers[agent["Id"]] = agent
        rig1.daemon_id = "another"
        await wait_for_event(running, "node.suspect")
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"
    assert asked[asked.index("info") - 1] == "containers"


async def test_nodes_with_one_daemon_identity_take_no_work(setting: Setting) -> None:
    """Neither is believed, so that no container there counts as foreign; both return when the identities differ."""
    rig1, rig2 = setting.nodes["rig1"], setting.nodes["rig2"]
    rig1.daemon_id = rig2.daemon_id = "copied"
    leased = {names.LABEL_KIND: names.KIND_NOTEBOOK, names.LABEL_LEASE: "another", "uuids": ""}
    container = rig1.run_container(leased, name="somebody")
    async with asgi_broker(setting, wait=False) as running:
        reason = "the Docker daemons of rig1 and rig2 have the same identity copied"
        for name in ("rig1", "rig2"):
            await until(lambda name=name: reason in get_node_status(running, name).unreachable_reason, "it is refused")
        await until(lambda: get_node_status(running, "rig3").is_up, "rig3 is up")
        assert not get_node_status(running).is_up
        assert not get_node_status(running, "rig2").is_up
        assert container in rig1.containers
        rig2.daemon_id = "new"
        for name in ("rig1", "rig2"):
            await until(lambda name=name: get_node_status(running, name).is_up, "it is up again")
        await until(lambda: container not in rig1.containers, "a container without a lease is removed")


async def test_identity_that_becomes_shared_takes_both_nodes_out(setting: Setting) -> None:
    """A running notebook is kept, and its lease stays."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        container = await run_notebook(running, lease)
        setting.nodes["rig2"].is_reachable = False
        await until(lambda: not get_node_status(running, "rig2").is_up, "rig2 is unreachable")
        setting.nodes["rig2"].daemon_id = setting.nodes["rig1"].daemon_id
        setting.nodes["rig2"].is_reachable = True
        await until(lambda: not get_node_status(running).is_up, "rig1 is taken out")
        assert "rig1 and rig2 have the same identity" in get_node_status(running).unreachable_reason
        assert container in setting.nodes["rig1"].containers
        assert (await read(running, "ada", f"/leases/{lease['id']}"))["state"] == "active"


# -- GPUs --------------------------------------------------------------------------------------------------------------


async def test_gpu_in_outside_use_is_not_granted(setting: Setting) -> None:
    """The page says what NVML tells; it is given when the processes are gone."""
    rig1 = setting.nodes["rig1"]
    rig1.processes[0], rig1.used_mib[0] = [(4711, 5000)], 5222
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        assert lease["state"] == "requested"
        found = await wait_for_gpu_state(running, "outside")
        assert found["message"] == "in use outside gpuhub: 1 process, 5.1 GiB"
        assert found["outside"] == [{"pid": 4711, "memory_mib": 5000}]
        assert "in use outside gpuhub" in await wait_for_event(running, "gpu.outside")
        rig1.processes.clear()
        rig1.used_mib.clear()
        await wait_for_state(running, f"/leases/{lease['id']}", "granted")


async def test_gpu_with_memory_left_after_a_lease_is_not_granted(setting: Setting) -> None:
    """What a container used is its own; what is still there after it went is not given on."""
    rig1 = setting.nodes["rig1"]
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        rig1.processes[0], rig1.used_mib[0] = [(4711, 5000)], 5222
        await until(lambda: get_node_status(running).gpus[0].processes, "the notebook's process is seen")
        assert (await read_gpu(running))["state"] == "held"
        waiting = await ask(running, "ben", key="b")
        await delete(running, "ada", f"/leases/{lease['id']}")
        await wait_for_state(running, f"/leases/{lease['id']}", "released")
        await wait_for_gpu_state(running, "outside")
        assert (await read(running, "ben", f"/leases/{waiting['id']}"))["state"] == "requested"
        rig1.processes.clear()
        rig1.used_mib.clear()
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted")


@pytest.mark.parametrize(
    ("break_gpu", "message"),
    [
        (lambda node: node.gpu_errors.update({0: "GPU is lost"}), "GPU is lost"),
        (lambda node: node.ecc.update({0: 2}), "2 uncorrectable memory errors (ECC)"),
        (lambda node: node.remap_failed.add(0), "could not be replaced"),
        (lambda node: node.remap_pending.add(0), "wait to be replaced"),
        (lambda node: setattr(node, "nvml_error", "NVML does not answer"), "NVML does not answer"),
        (lambda node: node.cards.clear(), "the driver no longer reports it"),
    ],
)
async def test_broken_gpu_is_not_granted(setting: Setting, break_gpu: Any, message: str) -> None:
    """The user is told which and why, and it is told once."""
    async with asgi_broker(setting) as running:
        break_gpu(setting.nodes["rig1"])
        found = await wait_for_gpu_state(running, "failed")
        assert message in found["message"]
        assert (await ask(running, "ada"))["state"] == "requested"
        assert message in await wait_for_event(running, "gpu.failed")
        line = get_node_status(running).line_number
        await until(lambda: get_node_status(running).line_number > line + 1, "rig1 is read again")
        assert len(await list_event_texts(running, "gpu.failed")) == 1


async def test_critical_xid_blocks_the_gpu_until_reboot_or_acceptance(setting: Setting) -> None:
    """Its holder keeps it and is told; the block outlives the broker, the agent and the end of the error's readings."""
    rig1 = setting.nodes["rig1"]
    why = "Xid 79, it has fallen off the bus: reset the GPU or restart the node"
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        rig1.xids["GPU-rig1-0"] = [(31, 4, 4.0), (79, 1, 5.0)]
        assert (await wait_for_gpu_state(running, "failed"))["message"] == why
        assert await wait_for_event(running, "gpu.problem") == f"GPU 0 (RTX 5090) of rig1: {why}"
        assert await wait_for_event(running, "notified.gpu-failed") == "GPU 0 (RTX 5090) of rig1 failed"
        shown = await read(running, "ada", f"/leases/{lease['id']}")
        assert (shown["state"], shown["gpu_problems"]) == ("active", [f"GPU 0 (RTX 5090) of rig1: {why}"])
        answer = await post(running, "ada", f"/leases/{lease['id']}/activity", {"is_busy": False, "inactive_s": 0.0})
        assert answer["gpu_problems"] == shown["gpu_problems"]
        await delete(running, "ada", f"/leases/{lease['id']}")
        await wait_for_state(running, f"/leases/{lease['id']}", "released")
        rig1.xids.clear()
    async with asgi_broker(setting) as running:
        await wait_for_gpu_state(running, "failed")
        waiting = await ask(running, "ben")
        assert waiting["state"] == "requested"
        await post(running, "ben", "/nodes/rig1/gpus/0/accept", {}, 403)
        await post(running, "root", "/nodes/rig1/gpus/0/accept", {})
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted", token="ben")
        assert len(await list_event_texts(running, "gpu.problem")) == 1
        notified = [f"GPU 0 (RTX 5090) of rig1 {text}" for text in ("failed", "works again")]

        async def is_notified() -> bool:
            return await list_event_texts(running, "notified.gpu-failed") == notified

        await until(is_notified, "the owner of the machines is notified of begin and end")
        await delete(running, "ben", f"/leases/{waiting['id']}")
        rig1.xids["GPU-rig1-0"] = [(79, 2, 9.0)]
        await wait_for_gpu_state(running, "failed")
        rig1.xids.clear()
        rig1.start("boot-2")
        await wait_for_gpu_state(running, "free")


async def test_problem_of_a_reading_is_reported_to_the_holder(setting: Setting) -> None:
    """A slowed down card stays held; when it is released, nobody gets it until its clocks are normal."""
    rig1 = setting.nodes["rig1"]
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        rig1.throttled.add(0)
        assert "its clocks have been lowered" in await wait_for_event(running, "gpu.problem")
        assert (await read_gpu(running))["state"] == "held"
        await delete(running, "ada", f"/leases/{lease['id']}")
        await wait_for_state(running, f"/leases/{lease['id']}", "released")
        waiting = await ask(running, "ben")
        assert (await read_gpu(running))["state"] == "unavailable"
        refused = await post(running, "root", "/nodes/rig1/gpus/0/accept", {}, 409)
        assert refused["detail"] == "GPU 0 of rig1 is not blocked"
        rig1.throttled.clear()
        await wait_for_state(running, f"/leases/{waiting['id']}", "granted", token="ben")


async def test_containers_that_lost_their_devices_are_reported(setting: Setting) -> None:
    """Whoever has a GPU there is told to restart; the agent is made anew, and nothing is given before it can read."""
    rig1 = setting.nodes["rig1"]
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        other = await ask(running, "ben", profile="rtx5070", key="b")
        agent = rig1.of_kind("agent")[0]["Id"]
        rig1.nvml_error = DEVICES_LOST
        await until(lambda: agent not in rig1.containers, "the agent is made anew")
        rig1.nvml_error = None
        found = await read(running, "ada", f"/leases/{lease['id']}")
        assert (found["state"], found["note"]) == (
            "active",
            "its container on rig1 has lost its GPU, as when systemd is reloaded there: restart your server",
        )
        assert "restart your server" in await wait_for_event(running, "gpu.lost")
        assert (await read(running, "ben", f"/leases/{other['id']}"))["note"] is None
        await until(lambda: get_node_status(running).gpu_error is None, "the new agent reads")
        assert len(await list_event_texts(running, "gpu.lost")) == 1


async def test_mig_devices_are_granted_individually(setting: Setting) -> None:
    """Each is a GPU of its own; the card they are parts of is not given."""
    setting.nodes["rig1"].mig[0] = [("NVIDIA GeForce RTX 5090 MIG 1g.8gb", 8192)] * 2
    setting.cluster = build_cluster(notice="")
    async with asgi_broker(setting) as running:
        slots = running.core.capacity.build_node_capacity("rig1").slots
        assert [slot.uuid for slot in slots] == ["MIG-GPU-rig1-0-0", "MIG-GPU-rig1-0-1"]
        assert all(slot.available and slot.card.is_mig for slot in slots)
        view = await read(running, "root", "/cluster")
        assert [gpu["is_mig"] for gpu in view["nodes"][0]["gpus"]] == [True, True]


# -- containers --------------------------------------------------------------------------------------------------------


async def test_container_with_a_gpu_outside_its_lease_is_removed(setting: Setting) -> None:
    """Whoever made it: its node gets no work until it is gone, and what was done is told."""
    rig1 = setting.nodes["rig1"]
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", profile="cpu")
        labels = {
            names.LABEL_KIND: names.KIND_NOTEBOOK,
            names.LABEL_LEASE: lease["id"],
            names.LABEL_EPOCH: str(lease["epoch"]),
        }
        stray = setting.nodes[lease["nodes"][0]].run_container(labels, devices=["GPU-rig1-0"])
        await until(lambda: stray not in rig1.containers, "the container is removed")
        assert f"it has GPU GPU-rig1-0, which is not in its lease {lease['id']}" in await wait_for_event(
            running, "container.removed"
        )


async def test_container_that_cannot_be_removed_is_reported_once(setting: Setting) -> None:
    """It is tried again at every look, and what blocks the GPU is said at its lease."""
    shorten_timeouts(setting)
    rig1 = setting.nodes["rig1"]
    tries: list[str] = []

    def refuse(method: str) -> None:
        if method == "remove_container":
            tries.append(method)
            raise GpuhubError("node rig1: cannot kill container: it does not end")

    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        rig1.on_call = refuse
        await delete(running, "ada", f"/leases/{lease['id']}")
        await until(lambda: len(tries) > 2, "it is tried again")
        ended = await wait_for_state(running, f"/leases/{lease['id']}", "quarantined")
        assert "its containers on rig1 are not gone yet" in ended["note"]
        assert len(await list_event_texts(running, "container.removed")) == 1
        rig1.on_call = lambda method: None
        await wait_for_state(running, f"/leases/{lease['id']}", "released")


def preempt(job: JobRow, now: float, *, grace_s: float) -> JobRow:
    return job_states.preempt(job, now + grace_s, now)


async def test_preempted_workers_get_one_signal_and_time_to_end(setting: Setting) -> None:
    """When the last has ended the GPUs are free, and the job waits again."""
    rig1 = setting.nodes["rig1"]
    async with asgi_broker(setting) as running:
        job = await start_job(running, scavenge=True)
        (worker,) = rig1.of_kind(names.KIND_WORKER)
        await running.core.ledger.change(mutations.change_jobs([(job["id"], partial(preempt, grace_s=600.0))]))
        await until(lambda: rig1.signals, "the worker gets a signal")
        line = get_node_status(running).line_number
        await until(lambda: get_node_status(running).line_number > line + 2, "rig1 is read again")
        assert rig1.signals == [(worker["Id"], "SIGTERM")]
        assert (await read(running, "ada", f"/jobs/{job['id']}"))["state"] == "preempting"
        rig1.end_container(worker["Id"])
        again = await wait_for_state(running, f"/jobs/{job['id']}", "running")
        assert again["preemptions"] == 1
        assert again["lease"]["id"] != job["lease"]["id"]


async def test_preempted_job_is_removed_after_the_grace(setting: Setting) -> None:
    """The grace is over: its containers are removed."""
    rig1 = setting.nodes["rig1"]
    async with asgi_broker(setting) as running:
        job = await start_job(running, scavenge=True)
        (worker,) = rig1.of_kind(names.KIND_WORKER)
        await running.core.ledger.change(mutations.change_jobs([(job["id"], partial(preempt, grace_s=0.3))]))
        await until(lambda: worker["Id"] not in rig1.containers, "the worker is removed")
        assert (await wait_for_state(running, f"/jobs/{job['id']}", "running"))["preemptions"] == 1


@pytest.mark.usefixtures("_short_probe_timeout")
async def test_broker_shutdown_cancels_hanging_calls(setting: Setting) -> None:
    """A removal on a node that hangs holds up no end of the broker; the next run takes it up."""
    rig1 = setting.nodes["rig1"]
    calls: list[str] = []

    def hang_call(method: str) -> None:
        calls.append(method)
        rig1.is_hung = method == "containers"

    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        container = await run_notebook(running, lease)
        line = get_node_status(running).line_number
        await until(lambda: get_node_status(running).line_number > line + 1, "the container was seen")
        rig1.on_call = hang_call
        await delete(running, "ada", f"/leases/{lease['id']}")
        await until(lambda: not get_node_status(running).is_up, "rig1 is unreachable")
        assert "stop" not in calls
    rig1.is_hung, rig1.on_call = False, lambda method: None
    async with asgi_broker(setting) as running:
        await wait_for_state(running, f"/leases/{lease['id']}", "released")
    assert container not in rig1.containers


async def test_node_without_its_firewall_takes_no_work(tmp_path: Path) -> None:
    """What runs there continues; the other nodes are not held up; it is asked again until the filter is there."""
    troubled = {"rig1"}

    async def ensure(node: str) -> None:
        if node in troubled:
            raise GpuhubError(f"node {node}: its firewall is not in place: nft: no")

    async with asgi_broker(Setting(tmp_path, ensure_filter=ensure)) as running:
        assert await wait_for_event(running, "node.unguarded") == "its firewall is not in place: nft: no"
        found = await wait_for_gpu_state(running, "unavailable")
        assert found["message"] == "its firewall is not in place: nft: no"
        assert (await read_gpu(running, "rig2"))["state"] == "free"
        (node, *_) = (await read(running, "root", "/cluster"))["nodes"]
        assert node["message"] == found["message"]
        troubled.clear()
        await wait_for_gpu_state(running, "free")
        assert await list_event_texts(running, "node.guarded") == ["its firewall is in place again"]
