"""Nodes with failed GPUs are drained in Slurm, and undrained on proof; others' drains are not changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.config.slurm import SlurmSettings
from gpuhub.domain.models import Identity
from gpuhub.nodes.status import XidErrors
from tests.support.clocks import StillClock
from tests.support.slurm.scripted_backend import BrokerEnvironment, BrokerHarness, slurm_cluster

XID = "gpuhub: GPU 0: Xid 79, it has fallen off the bus: reset the GPU or restart the node"


@pytest.fixture
def site(tmp_path: Path) -> BrokerEnvironment:
    return BrokerEnvironment(tmp_path, clock=StillClock())


async def fail_gpu(site: BrokerEnvironment, harness: BrokerHarness, code: int = 79) -> None:
    """Let rig2's only GPU report an Xid error."""
    xids = {"GPU-rig2-0": (XidErrors(code=code, count=1, last_at=site.clock.now()),)}
    await harness.core.observe(site.record("rig2", xids=xids))
    await harness.controller.step()


async def test_node_is_drained_and_a_reboot_ends_it(site: BrokerEnvironment) -> None:
    """The running job keeps its GPU; a reading without an error is no proof, one after a reboot is."""
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(profile="rtx5070"), site.slurm)
        await fail_gpu(site, harness)
        assert site.slurm.reasons == {"rig2": XID}
        assert harness.state(lease.id) is LeaseState.GRANTED
        waiting = await harness.request_lease("ben", profile="rtx5070")
        site.slurm.scancel(lease.slurm_job or 0)
        site.slurm.clean(lease.slurm_job or 0)
        await harness.controller.step()
        assert site.slurm.start() == []
        await harness.core.observe(site.record("rig2"))
        await harness.controller.step()
        assert site.slurm.reasons == {"rig2": XID}
        await harness.core.observe(site.record("rig2", boot_id="boot-new"))
        await harness.controller.step()
        assert site.slurm.reasons == {}
        assert site.slurm.start() == [harness.lease(waiting.id).slurm_job]


async def test_accepted_gpu_ends_the_drain(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        await fail_gpu(site, harness)
        await harness.admin.accept_gpu(Identity(name="root", is_admin=True), "rig2", 0)
        await harness.controller.step()
        assert site.slurm.reasons == {}


async def test_further_defects_change_the_reason(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        await fail_gpu(site, harness)
        await fail_gpu(site, harness, 48)
        assert "Xid 79" in site.slurm.reasons["rig2"]
        assert "Xid 48" in site.slurm.reasons["rig2"]


async def test_administrators_drain_is_neither_changed_nor_ended(site: BrokerEnvironment) -> None:
    """Also where the administrator has taken over gpuhub's drain by a reason of their own."""
    async with site.broker() as harness:
        site.slurm.drained = {"rig2"}
        await fail_gpu(site, harness)
        assert site.slurm.reasons == {}
        site.slurm.drained = set()
        await harness.controller.step()
        assert site.slurm.reasons == {"rig2": XID}
        site.slurm.reasons["rig2"] = "waits for a new card"
        await harness.core.observe(site.record("rig2", boot_id="boot-new"))
        await harness.controller.step()
        assert site.slurm.reasons == {"rig2": "waits for a new card"}


async def test_node_that_cannot_be_read_is_not_changed(site: BrokerEnvironment) -> None:
    """A broken agent is not a broken GPU, and a silent one proves nothing."""
    async with site.broker() as harness:
        await harness.core.observe(site.record("rig1", gpu_error="pynvml is missing in the image"))
        await fail_gpu(site, harness)
        await harness.core.observe(site.record("rig2", boot_id="boot-new", read_at=None))
        await harness.controller.step()
        assert site.slurm.reasons == {"rig2": XID}


async def test_refused_drain_is_tried_again_after_a_minute(
    site: BrokerEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    """And reported once; the other steps of the poll go on."""
    clock = site.clock
    assert isinstance(clock, StillClock)
    async with site.broker() as harness:
        site.slurm.refusal = "Invalid user id"
        for refused in (1, 1, 2):
            await fail_gpu(site, harness)
            assert site.slurm.refused == refused
            clock.at += 31
        assert caplog.text.count("Invalid user id") == 1


async def test_site_with_a_health_check_of_its_own(tmp_path: Path) -> None:
    site = BrokerEnvironment(tmp_path, cluster=slurm_cluster(slurm=SlurmSettings(drain_failed=False)))
    async with site.broker() as harness:
        await fail_gpu(site, harness)
        assert site.slurm.reasons == {}


async def test_health_checks_drain_shows_the_gpu_as_failed_where_there_is_no_docker(tmp_path: Path) -> None:
    """Its holder and the machines' owner are told, once each, also that it is over."""
    plain = SlurmSettings(runtime="plain", command=Path("/opt/singleuser"))
    site = BrokerEnvironment(tmp_path, cluster=slurm_cluster(slurm=plain))
    async with site.broker() as harness:
        await harness.controller.step()
        for reason in (XID, XID, ""):
            site.slurm.reasons = {"rig2": reason} if reason else {}
            await harness.controller.step()
            (gpu,) = harness.core.capacity.inventory.nodes["rig2"].gpus
            assert gpu.error == (XID.removeprefix("gpuhub: GPU 0: ") or None if reason else None)
        events = [row.text for row in await harness.core.read_events(None, 100, None)]
        assert sum("Xid 79" in text for text in events) == 1
        assert "GPU 0 (RTX 5070) of rig2 failed" in events
        assert "GPU 0 (RTX 5070) of rig2 works again" in events
