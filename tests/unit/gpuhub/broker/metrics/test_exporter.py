"""The broker's metrics through its API: a real broker on simulated nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.backends.builtin import BuiltinBackend
from gpuhub.broker_api.schemas import Capabilities, NodeState
from gpuhub.common.errors import GpuhubError
from tests.support.broker.calls import ask, delete, post, read, run_notebook
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.broker.metrics import Metrics, scrape
from tests.support.broker.rights import MODELS


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """A broker whose hub knows the token of the service `gpuhub-metrics`."""
    setting = Setting(tmp_path)
    setting.hub.models |= MODELS
    return setting


async def scrape_until(running: Running, name: str, value: float, **labels: str) -> Metrics:
    async def reached() -> Metrics | None:
        metrics = await scrape(running)
        return metrics if metrics.values(name, **labels) == [value] else None

    metrics: Metrics = await until(reached, f"{name}{labels} is {value}")
    return metrics


async def test_nodes_gpus_and_owners_are_exported(setting: Setting) -> None:
    """A held GPU has its owner, and the time for which it is held is counted."""
    async with asgi_broker(setting) as running:
        before = await scrape(running)
        assert before.value("gpuhub_gpu_state", Hostname="rig1", state="free") == 1
        lease = await ask(running, "ada")
        await run_notebook(running, lease)
        metrics = await scrape(running)
        assert metrics.value("gpuhub_gpu_state", Hostname="rig1", state="held") == 1
        assert metrics.value("gpuhub_gpu_state", Hostname="rig1", state="free") == 0
        assert (
            metrics.value("gpuhub_lease_gpus", UUID="GPU-rig1-0", owner="ada", lease=lease["id"], purpose="notebook")
            == 1
        )
        assert (
            metrics.value("DCGM_FI_DEV_POWER_USAGE", UUID="GPU-rig1-0", Hostname="rig1", modelName="RTX 5090") == 20.5
        )
        assert metrics.value("gpuhub_lease_granted_total", purpose="notebook") == 1
        assert metrics.values("gpuhub_node_up") == [1, 1, 1]
        assert metrics.value("gpuhub_node_state", node="rig1", state="up") == 1
        assert len(metrics.list("gpuhub_node_state", node="rig1")) == len(NodeState)
        assert metrics.value("gpuhub_node_disk_free_bytes", node="rig1") == 100 * 1024**3
        assert metrics.value("gpuhub_build_info", engine="builtin") == 1
        assert metrics.value("gpuhub_events_total", kind="lease.granted") == 1
        [seconds] = metrics.values("gpuhub_lease_gpu_seconds_total", owner="ada")
        assert (await scrape(running)).value("gpuhub_lease_gpu_seconds_total", owner="ada") >= seconds


async def test_unreachable_node_is_down_and_its_gpus_have_no_readings(setting: Setting) -> None:
    async with asgi_broker(setting) as running:
        setting.nodes["rig2"].is_reachable = False
        metrics = await scrape_until(running, "gpuhub_node_up", 0, node="rig2")
        assert metrics.value("gpuhub_gpu_state", Hostname="rig2", state="unavailable") == 1
        assert metrics.list("DCGM_FI_DEV_GPU_TEMP", Hostname="rig2") == []
        assert len(metrics.list("DCGM_FI_DEV_GPU_TEMP")) == 2
        assert metrics.value("gpuhub_events_total", kind="node.unreachable") == 1


async def test_missing_firewall_is_exported(setting: Setting) -> None:
    async def fail_on_rig3(node: str) -> int | None:
        if node == "rig3":
            raise GpuhubError("node rig3: nft is missing")
        return 12 if node == "rig1" else None

    setting.ensure_filter = fail_on_rig3
    async with asgi_broker(setting) as running:
        metrics = await scrape_until(running, "gpuhub_node_firewall_up", 0, node="rig3")
        assert metrics.value("gpuhub_node_firewall_up", node="rig1") == 1
        assert metrics.list("gpuhub_node_firewall_rejected_packets_total") == [{"node": "rig1"}]
        assert metrics.value("gpuhub_node_firewall_rejected_packets_total") == 12


class BackendWithoutContainers(BuiltinBackend):
    """Another scheduler starts the programs on the nodes."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(containers=False)


async def test_nodes_without_docker_have_no_firewall(setting: Setting) -> None:
    """gpuhub sets up nothing there."""
    setting.build_backend = BackendWithoutContainers
    async with asgi_broker(setting, wait=False) as running:
        assert (await scrape(running)).list("gpuhub_node_firewall_up") == []


async def test_jobs_are_exported_while_they_hold_gpus(setting: Setting) -> None:
    async with asgi_broker(setting) as running:
        body = {"run_id": "run-000001", "nnodes": 2, "detached": True, "name": "bert"}
        job = await post(running, "ada", "/jobs", body, 201)
        metrics = await scrape_until(running, "gpuhub_job_open", 1, state="running")
        assert metrics.value("gpuhub_job_gpus", job_id=job["id"], owner="ada", job_name="bert") == 2
        await delete(running, "ada", f"/jobs/{job['id']}")
        metrics = await scrape_until(running, "gpuhub_job_ended_total", 1, outcome="stopped")
        assert metrics.list("gpuhub_job_gpus") == []


async def test_requests_are_counted_by_route_and_not_by_path(setting: Setting) -> None:
    """Clients can invent paths, and ids grow without end."""
    async with asgi_broker(setting) as running:
        for number in range(5):
            await read(running, "ada", f"/leases/l{number}", 404)
            await read(running, "ada", f"/invented/{number}", 404)
        metrics = await scrape(running)
        name = "gpuhub_broker_request_duration_seconds_count"
        assert metrics.value(name, method="GET", route="/api/v1/leases/{lease_id}", status="404") == 5
        assert metrics.value(name, method="", route="", status="404") == 5


async def test_disk_and_certificates_of_the_head_node_are_exported(setting: Setting) -> None:
    setting.read_head_free = lambda: 5 * 1024**3
    setting.read_certificate_ends = lambda: {"https": 1795459261.0}
    async with asgi_broker(setting, wait=False) as running:
        metrics = await scrape(running)
    assert metrics.value("gpuhub_head_disk_free_bytes") == 5 * 1024**3
    assert metrics.value("gpuhub_certificate_expiry_timestamp_seconds", certificate="https") == 1795459261.0


async def test_token_for_metrics_works_while_the_hub_is_down(setting: Setting) -> None:
    """The outage is what an administrator wants to see."""
    setting.metrics_token = "scrape"
    setting.hub.is_down = True
    async with asgi_broker(setting) as running:
        assert "gpuhub_node_up" in (await scrape(running, "scrape")).names
        await read(running, "scrape", "/cluster", 503)
