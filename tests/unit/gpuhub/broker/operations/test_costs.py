"""What notebooks and jobs on simulated nodes use: charged, shown to their owners, reported, and kept over restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.controllers import cost_controller
from gpuhub.broker.controllers.nodes import node_controller
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.state.cost_meters import find_energy_part
from gpuhub.common.errors import Unavailable
from gpuhub.config.settings import ClusterSettings, CostSettings, GroupSettings, ProfileSettings
from gpuhub.domain.costs import CostRecord
from gpuhub.nodes.status import GpuReading, NodeStatus
from tests.support.broker.calls import ask, delete, post, read, run_notebook, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.clocks import AheadClock
from tests.support.docker.simulated_nodes import build_cluster

HOUR = 3600.0
JOB = {"run_id": "run-000001", "nnodes": 1, "nproc_per_node": 1, "server": "", "name": "train.py"}


def with_prices(**values: Any) -> ClusterSettings:
    groups = (GroupSettings(name="lab", members=("ada", "ben")), GroupSettings(name="vision", members=("ada",)))
    prices = CostSettings(**{"currency": "EUR", "gpu_hour": 0.5, "models": {"NVIDIA GeForce RTX 5090": 2.0}, **values})
    return build_cluster().model_copy(update={"groups": groups, "costs": prices})


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A clock that the tests set ahead, and a loop of writes that they call themselves."""
    monkeypatch.setattr(cost_controller, "CHECK_PERIOD_S", 3600)
    monkeypatch.setattr(node_controller, "POLL_PERIOD_S", 0.05)
    return Setting(tmp_path, cluster=with_prices(), clock=AheadClock())


@pytest.fixture
async def running(setting: Setting) -> AsyncIterator[Running]:
    async with asgi_broker(setting) as running:
        yield running


def pass_time(running: Running, seconds: float) -> None:
    clock = running.core.clock
    assert isinstance(clock, AheadClock)
    clock.ahead_s += seconds


async def until_read(running: Running, node: str, check: Callable[[Any], bool]) -> None:
    """Wait until the broker has a fresh reading of a node's GPU for which this holds."""

    async def is_read() -> bool:
        status = running.core.capacity.inventory.nodes[node]
        return status.is_fresh(running.core.clock.monotonic()) and check(status.gpus[0])

    await until(is_read, f"{node} is read")


async def hold(running: Running, *, seconds: float, steps: int, use: int, mib: int, watts: float = 300.0) -> None:
    """Let rig1's GPU be used for some time, which passes in steps."""
    node = running.setting.nodes["rig1"]
    node.use_percent[0], node.used_mib[0] = use, mib
    await until_read(running, "rig1", lambda gpu: gpu.utilisation_percent == use and gpu.memory_used_mib == mib)
    for _ in range(steps):
        pass_time(running, seconds / steps)
        node.energy_mj[0] = target = node.energy_mj.get(0, 7_920_310) + round(watts * seconds / steps * 1000)
        await until_read(running, "rig1", lambda gpu, target=target: gpu.energy_mj == target)


async def end_notebook(running: Running, lease: Any, container: str) -> None:
    del running.setting.nodes[lease["nodes"][0]].containers[container]
    await delete(running, "ada", f"/leases/{lease['id']}")
    await wait_for_state(running, f"/leases/{lease['id']}", "released")


def report_rows(report: Any) -> dict[str, Any]:
    return {row["key"]: row for row in report["rows"]}


async def test_a_notebook_from_grant_to_report(running: Running) -> None:
    """Time, use, memory, energy and money are shown to the owner while it runs and after, and are in every report."""
    lease = await ask(running, "ada")
    container = await run_notebook(running, lease)
    await hold(running, seconds=600, steps=60, use=30, mib=5000)
    [now] = await read(running, "ada", "/costs")
    assert (now["id"], now["ended_at"], now["purpose"]) == (lease["id"], None, "notebook")
    await end_notebook(running, lease, container)
    [record] = await read(running, "ada", "/costs")
    assert record["ended_at"] is not None
    assert record["gpu_hours"] == pytest.approx(1 / 6, rel=0.1)
    assert record["busy_percent"] == pytest.approx(30, abs=1)
    assert (record["peak_memory_mib"], record["memory_mib"], record["model"]) == (5000, 32607, "RTX 5090")
    assert record["energy_kwh"] == pytest.approx(0.05, rel=0.02)
    assert record["is_energy_estimated"] is False
    assert record["cost"] == pytest.approx(2 / 6, rel=0.1)
    assert record["smaller_gpu"] == "RTX 5060"
    assert record["text"].endswith("EUR; an RTX 5060 would have been enough")
    await running.core.costs.flush()
    assert [row["id"] for row in await read(running, "ada", "/costs")] == [lease["id"]]
    for by, keys in (
        ("user", ["ada"]), ("group", ["lab", "vision"]), ("profile", ["rtx5090"]), ("model", ["RTX 5090"])
    ):  # fmt: skip
        report = await read(running, "root", "/costs/report", by=by)
        rows = report_rows(report)
        assert list(rows) == keys
        for row in (*rows.values(), *report["total"]):
            assert row["gpu_hours"] == pytest.approx(record["gpu_hours"], abs=0.001)
            assert (row["currency"], row["peak_memory_mib"]) == ("EUR", 5000)
            assert row["cost"] == pytest.approx(record["cost"], abs=0.01)
    assert len((await read(running, "ada", "/costs/report", by="week"))["rows"]) == 1


async def test_a_job_has_its_costs_at_the_end(running: Running) -> None:
    """The job's view has them when it has ended, also when only the store knows them; before, the list of costs."""
    job = await post(running, "ada", "/jobs", JOB, 201)
    path = f"/jobs/{job['id']}"
    assert (await wait_for_state(running, path, "running", "ada"))["costs"] is None
    assert [row["id"] for row in await read(running, "ada", "/costs")] == [job["id"]]
    pass_time(running, 600)
    await delete(running, "ada", path)
    ended = await wait_for_state(running, path, "ended", "ada")
    assert ended["costs"]["name"] == "train.py"
    assert ended["costs"]["gpu_hours"] >= 0.16
    await running.core.costs.flush()
    running.core.costs._ended.clear()
    assert (await read(running, "ada", path))["costs"] == ended["costs"]
    [listed] = await read(running, "ada", "/jobs", ended="true")
    assert listed["costs"]["id"] == job["id"]
    assert list(report_rows(await read(running, "ada", "/costs/report", by="profile"))) == ["jobs"]


async def test_a_job_on_several_models_is_one_record(running: Running) -> None:
    """Its sums by model are apart; the line speaks of all GPUs."""
    job = await post(running, "ada", "/jobs", {**JOB, "nnodes": 3}, 201)
    await wait_for_state(running, f"/jobs/{job['id']}", "running", "ada")
    pass_time(running, 60)
    await delete(running, "ada", f"/jobs/{job['id']}")
    ended = await wait_for_state(running, f"/jobs/{job['id']}", "ended", "ada")
    assert (ended["costs"]["gpu_count"], ended["costs"]["model"]) == (3, "RTX 5060, RTX 5070, RTX 5090")
    assert ended["costs"]["gpu_hours"] == pytest.approx(0.05, rel=0.2)
    assert ended["costs"]["text"].startswith("3 GPUs ")
    await running.core.costs.flush()
    rows = report_rows(await read(running, "root", "/costs/report", by="model"))
    assert list(rows) == ["RTX 5060", "RTX 5070", "RTX 5090"]
    assert rows["RTX 5090"]["cost"] == pytest.approx(4 * rows["RTX 5060"]["cost"], abs=0.02)


async def test_shares_are_charged_by_their_part(setting: Setting) -> None:
    """A quarter of the GPU's time, price and energy, which is an estimate; no use or memory that others may have."""
    profile = ProfileSettings(name="quarter", title="A quarter", gpu_model="RTX 5090", gpu_share=4)
    setting.cluster = setting.cluster.model_copy(update={"profiles": (profile,)})
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada", profile="quarter")
        container = await run_notebook(running, lease)
        await hold(running, seconds=100, steps=10, use=90, mib=20000)
        await end_notebook(running, lease, container)
        [record] = await read(running, "ada", "/costs")
    assert record["gpu_hours"] == pytest.approx(25 / HOUR, rel=0.2)
    assert record["energy_kwh"] == pytest.approx(30_000 / 4 / 3.6e6, rel=0.02)
    assert (record["is_energy_estimated"], record["busy_percent"], record["peak_memory_mib"]) == (True, None, None)
    assert "(estimated)" in record["text"]


def test_mig_devices_share_the_energy_of_their_gpu_by_memory() -> None:
    """NVML counts it for the whole GPU alone."""
    small, large = (
        GpuReading(uuid=f"MIG-{mib}", index=0, model="A100", memory_mib=mib, is_mig=True, parent="GPU-1")
        for mib in (10_000, 30_000)
    )
    node = NodeStatus(name="rig1", gpus=(small, large))
    assert [find_energy_part(node, reading, 1) for reading in (small, large)] == [0.25, 0.75]


async def test_the_driver_is_reloaded_while_a_notebook_runs(running: Running) -> None:
    """The counter begins again: what it has then is added, as an estimate, and nothing is taken off."""
    lease = await ask(running, "ada")
    container = await run_notebook(running, lease)
    await hold(running, seconds=100, steps=10, use=10, mib=500)
    running.setting.nodes["rig1"].energy_mj[0] = 1_000_000
    await until_read(running, "rig1", lambda gpu: gpu.energy_mj == 1_000_000)
    await end_notebook(running, lease, container)
    [record] = await read(running, "ada", "/costs")
    assert record["energy_kwh"] == pytest.approx((30_000 + 1000) / 3.6e6, rel=0.02)
    assert record["is_energy_estimated"] is True


async def test_open_records_continue_after_a_restart(setting: Setting) -> None:
    """A notebook that runs on is charged for the time and the energy of the gap, once."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        container = await run_notebook(running, lease)
        await hold(running, seconds=100, steps=10, use=10, mib=500)
    assert isinstance(setting.clock, AheadClock)
    setting.clock.ahead_s += HOUR
    setting.nodes["rig1"].energy_mj[0] += 360_000_000
    async with asgi_broker(setting) as running:
        await until_read(running, "rig1", lambda gpu: gpu.energy_mj > 360_000_000)
        await end_notebook(running, lease, container)
        [record] = await read(running, "ada", "/costs")
        assert record["gpu_hours"] == pytest.approx(3700 / HOUR, rel=0.02)
        assert record["energy_kwh"] == pytest.approx((30_000 + 360_000) / 3.6e6, rel=0.02)
        assert record["busy_percent"] == pytest.approx(10, abs=1)
        await running.core.costs.flush()
        [row] = (await read(running, "root", "/costs/report"))["rows"]
        assert row["gpu_hours"] == pytest.approx(record["gpu_hours"], abs=0.01)


async def test_a_lease_that_ended_unseen_is_charged_to_its_end(setting: Setting) -> None:
    """The broker was killed between the end of a lease and the next write: its record ends with the lease."""
    async with asgi_broker(setting) as running:
        lease = await ask(running, "ada")
        container = await run_notebook(running, lease)
        await running.core.costs.flush()
        pass_time(running, 600)
        await end_notebook(running, lease, container)
        _lose(running.core)
    assert isinstance(setting.clock, AheadClock)
    setting.clock.ahead_s += HOUR
    async with asgi_broker(setting) as running:
        [record] = await read(running, "ada", "/costs")
        ended_at = datetime.fromisoformat(record["ended_at"]).timestamp()
        assert ended_at == pytest.approx(setting.clock.now() - HOUR, abs=120)
        assert record["gpu_hours"] == pytest.approx(600 / HOUR, rel=0.05)


def _lose(core: BrokerState) -> None:
    """Drop what is not written, as a crash does."""
    core.costs._changed.clear()
    core.costs._unsaved.clear()
    core.costs._days.clear()
    core.costs._accounts.clear()


async def test_nothing_is_lost_or_doubled_while_the_store_fails(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails is repeated with everything that came since."""
    lease = await ask(running, "ada")
    container = await run_notebook(running, lease)
    pass_time(running, 300)
    save = running.store.costs.save

    def fail(records: list[CostRecord], days: Any) -> None:
        raise Unavailable("the disk is full")

    monkeypatch.setattr(running.store.costs, "save", fail)
    with pytest.raises(Unavailable):
        await running.core.costs.flush()
    pass_time(running, 300)
    await end_notebook(running, lease, container)
    monkeypatch.setattr(running.store.costs, "save", save)
    await running.core.costs.flush()
    await running.core.costs.flush()
    [record] = await read(running, "ada", "/costs")
    [total] = (await read(running, "root", "/costs/report"))["total"]
    assert total["gpu_hours"] == pytest.approx(record["gpu_hours"], abs=0.001) == pytest.approx(600 / HOUR, rel=0.05)


async def test_users_see_their_own_alone(running: Running) -> None:
    """Ben sees nothing of ada's, and may not ask for it; ranges that end before they begin are refused."""
    await ask(running, "ada")
    await running.core.costs.flush()
    assert await read(running, "ben", "/costs") == []
    assert (await read(running, "ben", "/costs/report"))["rows"] == []
    for path in ("/costs", "/costs/report"):
        refused = await read(running, "ben", path, 403, owner="ada")
        assert refused["detail"] == "ben may not see what ada uses"
        assert await read(running, "ada", path, owner="ada")
    wrong = await read(running, "ada", "/costs/report", 422, since="2026-11-02", until="2026-11-01")
    assert wrong["detail"].startswith("since: 2026-11-02 is after 2026-11-01")
    await read(running, "ada", "/costs/report", 422, by="colour")
    assert (await read(running, "ada", "/costs/report", until="0001-01-01"))["rows"] == []
