"""What callers of a broker under Slurm are told and refused, and what is asked of Slurm before they are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.broker.operations.cluster import ClusterOperations
from gpuhub.broker_api.schemas import (
    ActivationRequest,
    ArrayRequest,
    CordonRequest,
    ExtensionRequest,
    JobRequest,
    LeaseState,
    ReservationRequest,
    UsageSource,
)
from gpuhub.common.errors import Conflict, InvalidRequest, NotAllowed
from gpuhub.config.settings import ProfileSettings
from gpuhub.config.slurm import SlurmSettings
from gpuhub.domain.models import Identity, LeaseRow
from gpuhub.slurm_client.interface import SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.models import SlurmJobState
from tests.support.slurm.scripted_backend import BrokerEnvironment, BrokerHarness, slurm_cluster

ADA, ROOT = Identity(name="ada"), Identity(name="root", is_admin=True)
CREATED = ActivationRequest(container_id="c" * 64)


@pytest.fixture
def site(tmp_path: Path) -> BrokerEnvironment:
    return BrokerEnvironment(tmp_path)


async def granted(harness: BrokerHarness, site: BrokerEnvironment) -> LeaseRow:
    return await harness.submit_and_grant(await harness.request_lease(time_limit_s=600), site.slurm)


# -- the start --------------------------------------------------------------------------------------------------------


async def test_a_container_may_start_while_its_job_runs(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await granted(harness, site)
        shown = await harness.broker.activate(ADA, lease.id, CREATED)
        assert (shown.state, shown.slurm_job) == (LeaseState.ACTIVE, lease.slurm_job)


@pytest.mark.parametrize("what", ["cancelled", "gone", "requeued", "moved", "suspended"])
async def test_container_does_not_start_after_its_job_has_ended(site: BrokerEnvironment, what: str) -> None:
    """The broker has not looked since; whatever it was, Slurm may have given the GPU to somebody else by now."""
    async with site.broker() as harness:
        lease = await granted(harness, site)
        job = lease.slurm_job or 0
        if what == "cancelled":
            site.slurm.scancel(job)
        elif what == "gone":
            del site.slurm.jobs[job]
        elif what == "suspended":
            site.slurm.change(job, state=SlurmJobState.SUSPENDED)
        else:
            site.slurm.requeue(job)
        if what == "moved":
            site.slurm.start()
        with pytest.raises(Conflict, match=f"lease {lease.id} cannot start anything: "):
            await harness.broker.activate(ADA, lease.id, CREATED)
        assert harness.state(lease.id) is LeaseState.GRANTED


async def test_container_does_not_start_while_slurm_is_unreachable(
    site: BrokerEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.broker() as harness:
        lease = await granted(harness, site)
        site.slurm.is_silent = True
        with pytest.raises(SlurmUnreachable):
            await harness.backend.confirm(lease, timeout_s=0)
        site.slurm.is_silent = False
        await harness.backend.confirm(lease)


# -- more time --------------------------------------------------------------------------------------------------------


async def test_extension_is_requested_from_slurm_first(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await granted(harness, site)
        job = lease.slurm_job or 0
        site.slurm.change(job, started_at=site.clock.now() - 60)
        await harness.broker.extend(ADA, lease.id, ExtensionRequest(time_limit_s=3600))
        assert site.slurm.limits[job] in {60 + 3600 + 120, 60 + 3600 + 120 + 60}
        expires_at = harness.lease(lease.id).expires_at
        assert expires_at is not None
        assert expires_at == pytest.approx(site.clock.now() + 3600, abs=5)


async def test_extension_refused_by_slurm_is_refused(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await granted(harness, site)
        site.slurm.refusal = "Requested time limit is invalid (missing or exceeds some limit)"
        with pytest.raises(SlurmRefused, match="exceeds some limit"):
            await harness.broker.extend(ADA, lease.id, ExtensionRequest(time_limit_s=3600))
        assert harness.lease(lease.id) == lease


async def test_extension_refused_by_gpuhub_is_not_sent_to_slurm(site: BrokerEnvironment) -> None:
    site.cluster = slurm_cluster(profiles=[ProfileSettings(name="short", title="Short", time_limit="10m")])
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(profile="short"), site.slurm)
        with pytest.raises(InvalidRequest, match="at most"):
            await harness.broker.extend(ADA, lease.id, ExtensionRequest(time_limit_s=3600))
        assert site.slurm.limits == {}


# -- what is refused --------------------------------------------------------------------------------------------------


async def test_operations_of_slurm_are_refused_with_a_remedy(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        with pytest.raises(InvalidRequest, match="scontrol update nodename=rig1 state=drain"):
            await harness.admin.drain(ROOT, "rig1", CordonRequest())
        with pytest.raises(InvalidRequest, match="state=resume"):
            await harness.admin.cordon(ROOT, "rig1", CordonRequest())
        window = ReservationRequest(
            name="course", nodes=("rig1",), users=("ada",), starts_at="2030-01-01T00:00Z", ends_at="2030-01-02T00:00Z"
        )
        with pytest.raises(InvalidRequest, match="scontrol create reservation"):
            await harness.admin.reserve(ROOT, window)
        with pytest.raises(NotAllowed):
            await harness.admin.drain(ADA, "rig1", CordonRequest())
        with pytest.raises(InvalidRequest, match="only Slurm's operators can raise a job's priority"):
            await harness.broker.request_job(ROOT, JobRequest(run_id="run-000001", priority=1))
        job = JobRequest(run_id="run-000001", scavenge=True)
        with pytest.raises(InvalidRequest, match="Slurm decides which jobs are preempted"):
            await harness.broker.request_job(ADA, job)
        with pytest.raises(InvalidRequest, match="Slurm decides which jobs are preempted"):
            await harness.broker.request_array(ADA, ArrayRequest(job=job, count=2))


async def test_container_features_are_refused_without_docker(site: BrokerEnvironment) -> None:
    site.cluster = slurm_cluster(slurm=SlurmSettings(runtime="plain", command=Path("/opt/singleuser")))
    profile = site.cluster.profiles[0].model_copy(update={"name": "jax", "image": "lab/jax:1"})
    site.cluster = site.cluster.model_copy(update={"profiles": (*site.cluster.profiles, profile)})
    async with site.broker() as harness:
        with pytest.raises(InvalidRequest, match=r"2 GPUs on any nodes need containers, .* request nnodes"):
            await harness.launch(gpus=2)
        with pytest.raises(InvalidRequest, match=r"'jax' has its own image, lab/jax:1, .* submit without a profile"):
            await harness.launch(profile="jax")
        with pytest.raises(InvalidRequest, match="scavenge"):
            await harness.launch(scavenge=True)
        await harness.launch(profile=site.cluster.profiles[0].name, nnodes=2)


async def test_nodes_without_ipv4_address_cannot_run_workers(site: BrokerEnvironment) -> None:
    cluster = slurm_cluster(slurm=SlurmSettings(runtime="plain", command=Path("/opt/singleuser")))
    node = cluster.nodes[1].model_copy(update={"address": "fd00::12"})
    site.cluster = cluster.model_copy(update={"nodes": (cluster.nodes[0], node, *cluster.nodes[2:])})
    async with site.broker() as harness:
        with pytest.raises(InvalidRequest, match=r"address of rig2, fd00::12, is not an IPv4 address"):
            await harness.launch()
        await harness.launch(exclude_nodes=("rig2",))


async def test_request_beyond_the_partition_limits_is_refused(site: BrokerEnvironment) -> None:
    """As soon as the site was asked."""
    async with site.broker() as harness:
        await harness.controller.step()
        with pytest.raises(InvalidRequest, match=r"main"):
            await harness.request_lease(time_limit_s=2 * 86400)
        await harness.request_lease(time_limit_s=86400)
        await harness.controller.step()
        assert [job.time_limit_s for job in site.slurm.live()] == [86400]


async def test_spawner_submits_the_job_without_docker(site: BrokerEnvironment) -> None:
    site.cluster = slurm_cluster(slurm=SlurmSettings(runtime="plain", command=Path("/opt/singleuser")))
    async with site.broker() as harness:
        lease = await harness.request_lease()
        await harness.controller.step()
        assert site.slurm.jobs == {}
        assert harness.scheduler.explain_pending(lease.id, 0.0).text == "Slurm: it is being submitted"


async def test_usage_is_counted_by_the_broker_without_accounting(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        await granted(harness, site)
        (usage,) = await ClusterOperations(harness.core, harness.backend).usage(ADA, None)
        assert (usage.gpus, usage.counted_by) == (1, UsageSource.BROKER)
