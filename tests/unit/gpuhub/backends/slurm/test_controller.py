"""Leases and their Slurm jobs: one begins and ends with the other, whichever is first."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.broker.controllers.backend_controller import YOUNG_S, choose_period
from gpuhub.broker.state import mutations
from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common import names
from gpuhub.common.errors import Conflict
from gpuhub.domain import lease_states
from gpuhub.slurm_client.models import SlurmJobState
from tests.support.clocks import StillClock
from tests.support.docker.simulated_nodes import build_cluster
from tests.support.slurm.scripted_backend import INSTANCE, BrokerEnvironment, slurm_cluster
from tests.support.slurm.scripted_slurm import UIDS, ScriptedSlurm


@pytest.fixture
def site(tmp_path: Path) -> BrokerEnvironment:
    return BrokerEnvironment(tmp_path)


# -- from a request to a grant ----------------------------------------------------------------------------------------


async def test_request_is_submitted_as_its_owner_and_granted_the_gpus(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.request_lease(profile="rtx5070", time_limit_s=600)
        await harness.controller.step()
        job = site.slurm.only()
        assert (job.name, job.user_id) == (names.slurm_job_name(INSTANCE, lease.id), UIDS["ada"])
        assert harness.lease(lease.id).slurm_job == job.id
        asked = site.slurm.asked[job.id]
        assert (asked.gpu_type, asked.gpus_per_node, asked.nodes, asked.time_limit_s) == ("rtx5070", 1, 1, 720)
        await harness.controller.step()
        assert harness.state(lease.id) is LeaseState.REQUESTED
        site.slurm.start()
        await harness.controller.step()
        granted = harness.lease(lease.id)
        assert granted.state is LeaseState.GRANTED
        assert [(gpu.uuid, gpu.node) for gpu in granted.held] == [("GPU-rig2-0", "rig2")]
        assert granted.expires_at is not None
        assert granted.granted_at is not None
        assert granted.expires_at - granted.granted_at == 600
        assert site.slurm.submitted == 1


@pytest.mark.parametrize(
    ("ages_s", "period_s"),
    [([], 2.0), ([0.2, 900.0], 0.05), ([1.0], 0.25), ([3.0, 8.0], 0.5), ([YOUNG_S], 2.0)],
)
def test_young_requests_are_polled_for_more_often(ages_s: list[float], period_s: float) -> None:
    """A job that starts at once is seen at once; one that waits is asked for as often as anything else."""
    assert choose_period(2.0, ages_s) == period_s


async def test_request_without_gpus_is_a_job(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(profile="cpu"), site.slurm)
        assert (lease.state, lease.nodes, lease.gpus) == (LeaseState.GRANTED, ("rig1",), ())


async def test_gang_is_one_job_with_one_worker_per_node(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.launch(nnodes=3), site.slurm)
        assert (lease.state, lease.nodes) == (LeaseState.ACTIVE, ("rig1", "rig2", "rig3"))
        assert len(site.slurm.jobs) == 1
        assert lease.note is not None
        assert lease.note.startswith("mixed cards")


async def test_elastic_gang_accepts_fewer_nodes_and_survives_a_loss(site: BrokerEnvironment) -> None:
    site.slurm.drained = {"rig3"}
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.launch(nnodes=3, min_nnodes=1), site.slurm)
        assert lease.nodes == ("rig1", "rig2")
        assert lease.slurm_job is not None
        assert site.slurm.asked[lease.slurm_job].survives_nodes
        site.slurm.change(lease.slurm_job, nodes=("rig1",), gpus={"rig1": (0,)})
        await harness.controller.step()
        after = harness.lease(lease.id)
        assert (after.state, lease_states.list_live_nodes(after)) == (LeaseState.ACTIVE, ("rig1",))


async def test_node_of_a_shrunk_gang_is_returned_to_slurm(site: BrokerEnvironment) -> None:
    """When its container is proven gone; all but the first one, where the job's script runs.

    What Slurm refuses is asked again, less and less often.
    """
    clock = site.clock = StillClock()
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.launch(nnodes=3, min_nnodes=1), site.slurm)
        assert lease.slurm_job is not None
        await harness.core.ledger.change(mutations.shrink(lease.id, ["rig3"]))
        site.slurm.refusal = "the DB index is being set"
        await harness.controller.step()
        await harness.core.ledger.change(mutations.prove_released([lease.id], "rig3"))
        for seconds, refused in ((0.0, 1), (0.4, 1), (0.2, 2), (0.9, 2), (0.2, 3)):
            clock.at += seconds
            await harness.controller.step()
            assert site.slurm.jobs[lease.slurm_job].nodes == ("rig1", "rig2", "rig3")
            assert site.slurm.refused == refused
        site.slurm.refusal = None
        clock.at += 2.1
        await harness.controller.step()
        assert site.slurm.jobs[lease.slurm_job].nodes == ("rig1", "rig2")
        await harness.core.ledger.change(mutations.shrink(lease.id, ["rig1"]))
        await harness.core.ledger.change(mutations.prove_released([lease.id], "rig1"))
        await harness.controller.step()
        assert site.slurm.jobs[lease.slurm_job].nodes == ("rig1", "rig2")
        assert harness.scheduler.find_external_jobs().keys() == {"GPU-rig1-0"}, (
            "it is not free, as Slurm does not give it to anybody"
        )
        after = harness.lease(lease.id)
        assert (after.state, lease_states.list_live_nodes(after)) == (LeaseState.ACTIVE, ("rig2",))


async def test_gpus_are_matched_to_slurm_numbers_by_type(tmp_path: Path) -> None:
    """The second card is the first type that Slurm's node names."""
    cards = {"rig1": [("NVIDIA GeForce RTX 5060", 8151), ("NVIDIA GeForce RTX 5090", 32607)]}
    slurm = ScriptedSlurm({"rig1": ("rtx5090", "rtx5060")})
    site = BrokerEnvironment(tmp_path, cluster=slurm_cluster(cards), cards=cards, slurm=slurm)
    async with site.broker() as harness:
        first = await harness.submit_and_grant(await harness.request_lease(profile="rtx5090"), slurm)
        second = await harness.submit_and_grant(await harness.request_lease(profile="rtx5060"), slurm)
        assert slurm.jobs[first.slurm_job or 0].gpus == {"rig1": (0,)}
        assert [gpu.uuid for gpu in first.held] == ["GPU-rig1-1"]
        assert [gpu.uuid for gpu in second.held] == ["GPU-rig1-0"]


async def test_grant_waits_for_a_gpu_that_another_lease_holds(site: BrokerEnvironment) -> None:
    """Slurm gives it on as soon as the job has ended; the container of before is being removed."""
    async with site.broker() as harness:
        first = await harness.submit_and_grant(await harness.request_lease(), site.slurm)
        second = await harness.request_lease("ben")
        await harness.controller.step()
        site.slurm.scancel(first.slurm_job or 0)
        site.slurm.clean(first.slurm_job or 0)
        site.slurm.start()
        await harness.controller.step()
        assert harness.state(first.id) is LeaseState.RELEASING
        assert harness.state(second.id) is LeaseState.REQUESTED
        why = harness.scheduler.explain_pending(second.id, site.clock.now())
        assert why.text == "Slurm: it was allocated GPU 0 of rig1; what ran there before is still being removed"
        await harness.prove_gone(first.id)
        assert harness.state(second.id) is LeaseState.GRANTED


async def test_grant_waits_for_an_unknown_gpu(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.request_lease()
        await harness.core.observe(site.record("rig1", gpus=()))
        await harness.submit_and_grant(lease, site.slurm)
        assert harness.state(lease.id) is LeaseState.REQUESTED
        assert "GPU agent has not reported yet" in harness.scheduler.explain_pending(lease.id, site.clock.now()).text
        await harness.core.observe(site.record("rig1"))
        assert harness.state(lease.id) is LeaseState.GRANTED


async def test_allocation_that_differs_from_the_request_ends_the_lease(site: BrokerEnvironment) -> None:
    """Its owner may change a job that waits; or gres.conf calls cards what they are not."""
    async with site.broker() as harness:
        lease = await harness.request_lease(profile="rtx5090")
        await harness.controller.step()
        job = site.slurm.only().id
        site.slurm.change(job, state=SlurmJobState.RUNNING, nodes=("rig2",), gpus={"rig2": (0,)}, started_at=1.0)
        await harness.controller.step()
        assert harness.lease(lease.id).reason == "Slurm allocated it RTX 5070 on rig2, which does not meet its request"
        other = await harness.request_lease(profile="cpu")
        await harness.controller.step()
        site.slurm.change(harness.lease(other.id).slurm_job or 0, state=SlurmJobState.RUNNING, nodes=("elsewhere",))
        await harness.controller.step()
        assert harness.lease(other.id).reason == "Slurm allocated it elsewhere, which cluster.toml does not name"
        assert site.slurm.live() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cpus": 1}, "Slurm allocated it fewer CPUs than it requested: 1 of 4"),
        ({"memory_mib": 1}, "Slurm allocated it less memory than it requested: 1 MiB of 16 GiB"),
    ],
)
async def test_waiting_job_that_its_owner_makes_smaller_is_not_granted(
    site: BrokerEnvironment, changes: dict[str, int], reason: str
) -> None:
    """Its container could use more than Slurm allocated, at the expense of other jobs on the node."""
    async with site.broker() as harness:
        lease = await harness.request_lease()
        await harness.controller.step()
        site.slurm.update(site.slurm.only().id, **changes)
        after = await harness.submit_and_grant(lease, site.slurm)
        assert (after.state, after.granted_at, after.reason) == (LeaseState.RELEASED, None, reason)
        assert site.slurm.live() == []


async def test_launch_that_its_owner_makes_smaller_is_not_granted(site: BrokerEnvironment) -> None:
    """Each of its nodes needs what one worker may use."""
    async with site.broker() as harness:
        lease = await harness.launch(nnodes=2)
        await harness.controller.step()
        job = site.slurm.only().id
        asked = site.slurm.asked[job].cpus
        site.slurm.update(job, cpus=asked - 1)
        after = await harness.submit_and_grant(lease, site.slurm)
        assert after.reason == (f"Slurm allocated it fewer CPUs than it requested: {2 * (asked - 1)} of {2 * asked}")


async def test_refused_submission_ends_the_lease_with_the_reason(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        site.slurm.refusal = "Invalid account or account/partition combination specified"
        lease = await harness.request_lease()
        await harness.controller.step()
        assert harness.lease(lease.id).reason == f"Slurm refused it: {site.slurm.refusal}"


async def test_user_without_an_account_gets_an_error(site: BrokerEnvironment) -> None:
    site.cluster = slurm_cluster(users=build_cluster().users.model_copy(update={"allowed": ("zoe",)}))
    async with site.broker() as harness:
        lease = await harness.request_lease("zoe")
        await harness.controller.step()
        assert harness.lease(lease.id).reason == "user 'zoe' has no account on the head node"
        assert site.slurm.jobs == {}


async def test_a_job_that_can_never_start_ends_its_lease(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.request_lease()
        await harness.controller.step()
        site.slurm.change(site.slurm.only().id, reason="PartitionTimeLimit")
        await harness.controller.step()
        assert harness.state(lease.id) is LeaseState.RELEASED
        assert site.slurm.live() == []


# -- the end, from either side ----------------------------------------------------------------------------------------


async def test_cancelled_request_leaves_no_job(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.request_lease()
        await harness.controller.step()
        await harness.core.ledger.change(mutations.end_leases({lease.id: "stopped"}))
        await harness.controller.step()
        assert site.slurm.live() == []


async def test_job_is_kept_until_the_release_is_proven(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(), site.slurm)
        await harness.core.ledger.change(mutations.end_leases({lease.id: "stopped"}))
        await harness.controller.step()
        assert [job.state for job in site.slurm.live()] == [SlurmJobState.RUNNING]
        await harness.prove_gone(lease.id)
        await harness.controller.step()
        assert site.slurm.live() == []
        assert site.slurm.cancelled == [(lease.slurm_job, True)]


@pytest.mark.parametrize(
    "state",
    [
        SlurmJobState.CANCELLED,
        SlurmJobState.TIMEOUT,
        SlurmJobState.PREEMPTED,
        SlurmJobState.NODE_FAIL,
        SlurmJobState.COMPLETED,
    ],
)
async def test_a_lease_ends_with_its_job(site: BrokerEnvironment, state: SlurmJobState) -> None:
    async with site.broker() as harness:
        held, waiting = (
            await harness.submit_and_grant(await harness.request_lease(), site.slurm),
            await harness.request_lease("ben"),
        )
        await harness.controller.step()
        for lease in (held, waiting):
            site.slurm.end(harness.lease(lease.id).slurm_job or 0, state)
        await harness.controller.step()
        assert harness.state(held.id) is LeaseState.RELEASING
        assert harness.state(waiting.id) is LeaseState.RELEASED
        assert harness.lease(held.id).reason


async def test_job_unknown_to_slurm_has_ended(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(), site.slurm)
        del site.slurm.jobs[lease.slurm_job or 0]
        await harness.controller.step()
        assert harness.state(lease.id) is LeaseState.RELEASING


async def test_requeued_job_ends_its_lease(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(), site.slurm)
        site.slurm.requeue(lease.slurm_job or 0)
        await harness.controller.step()
        assert harness.lease(lease.id).reason == "Slurm requeued its job"
        assert site.slurm.live() == []


async def test_job_restarted_between_two_polls_ends_its_lease(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(), site.slurm)
        site.slurm.requeue(lease.slurm_job or 0)
        site.slurm.start()
        await harness.controller.step()
        assert harness.lease(lease.id).reason == "Slurm requeued its job and started it again"


async def test_job_restarted_after_a_restart_of_the_broker_ends_its_lease(site: BrokerEnvironment) -> None:
    """The broker no longer knows when the job had started, and its owner may have changed the job in the meantime."""
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(), site.slurm)
    assert lease.slurm_job is not None
    assert lease.granted_at is not None
    async with site.broker() as harness:
        # slurmctld's clock is ahead.
        site.slurm.change(lease.slurm_job, started_at=lease.granted_at + 200)
        await harness.controller.step()
        assert harness.state(lease.id) is LeaseState.GRANTED
        site.slurm.change(lease.slurm_job, started_at=lease.granted_at + 400)
        await harness.controller.step()
        assert harness.lease(lease.id).reason == "Slurm requeued its job and started it again"


async def test_pending_job_may_be_held_and_released(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.request_lease()
        await harness.controller.step()
        site.slurm.change(site.slurm.only().id, reason="JobHeldAdmin", priority=0)
        await harness.controller.step()
        assert harness.state(lease.id) is LeaseState.REQUESTED
        site.slurm.start()
        site.slurm.requeue(site.slurm.only().id)
        await harness.controller.step()
        assert harness.state(lease.id) is LeaseState.REQUESTED


async def test_suspended_job_keeps_its_lease_and_is_reported(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(), site.slurm)
        site.slurm.change(lease.slurm_job or 0, state=SlurmJobState.SUSPENDED)
        await harness.controller.step()
        after = harness.lease(lease.id)
        assert after.state is LeaseState.GRANTED
        assert after.note is not None
        assert after.note.startswith("Slurm suspended its job")
        site.slurm.change(lease.slurm_job or 0, state=SlurmJobState.RUNNING)
        await harness.controller.step()
        assert harness.lease(lease.id).note is None


async def test_lease_without_time_limit_ends_with_its_job(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(), site.slurm)
        assert (lease.time_limit_s, site.slurm.jobs[lease.slurm_job or 0].time_limit_s) == (None, None)
        site.slurm.change(lease.slurm_job or 0, ends_at=5e9)
        await harness.controller.step()
        assert harness.lease(lease.id).expires_at == 5e9


async def test_reused_job_number_is_not_touched(site: BrokerEnvironment) -> None:
    """slurmctld was killed before it stored the job: its number is another one's, who is left alone."""
    async with site.broker() as harness:
        lease = await harness.submit_and_grant(await harness.request_lease(), site.slurm)
        assert lease.slurm_job is not None
        site.slurm.change(lease.slurm_job, name="train", user_id=UIDS["eve"], user_name="eve")
        with pytest.raises(Conflict, match="cannot start anything"):
            await harness.backend.confirm(lease)
        await harness.controller.step()
        assert harness.state(lease.id) is LeaseState.RELEASING
        await harness.prove_gone(lease.id)
        await harness.controller.step()
        assert harness.state(lease.id) is LeaseState.RELEASED
        assert [job.name for job in site.slurm.live()] == ["train"]
