"""While Slurm is silent, when answers are lost, and when the broker is restarted: nothing is lost, nothing is twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common import names
from gpuhub.common.errors import StorageUnavailable
from gpuhub.domain.models import EventRow
from gpuhub.slurm_client.models import SlurmSubmission, Submitter
from tests.support.slurm.scripted_backend import INSTANCE, BrokerEnvironment, BrokerHarness, find_submitter
from tests.support.slurm.scripted_slurm import UIDS


@pytest.fixture
def site(tmp_path: Path) -> BrokerEnvironment:
    return BrokerEnvironment(tmp_path)


async def events(harness: BrokerHarness) -> list[EventRow]:
    return await harness.core.read_events(None, 100, None)


async def test_slurm_outage_changes_nothing_and_is_reported_once(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        held, waiting = (
            await harness.submit_and_grant(await harness.request_lease(), site.slurm),
            await harness.request_lease("ben"),
        )
        await harness.controller.step()
        site.slurm.is_silent = True
        site.slurm.scancel(held.slurm_job or 0)
        for _ in range(3):
            await harness.controller.step()
        assert harness.state(held.id) is LeaseState.GRANTED
        assert harness.state(waiting.id) is LeaseState.REQUESTED
        text = harness.scheduler.explain_pending(waiting.id, site.clock.now()).text
        assert text.startswith("Slurm: no answer now (slurmctld does not answer); last known state: ")
        site.slurm.is_silent = False
        await harness.controller.step()
        assert harness.state(held.id) is LeaseState.RELEASING
        told = [event.kind for event in await events(harness) if event.kind.startswith("slurm.")]
        assert told == ["slurm.unreachable", "slurm.answers"]


async def test_submission_with_a_lost_response_is_found_by_name(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        site.slurm.lost_answers = 1
        lease = await harness.request_lease()
        await harness.controller.step()
        assert harness.lease(lease.id).slurm_job is None
        await harness.controller.step()
        assert harness.lease(lease.id).slurm_job == site.slurm.only().id
        assert site.slurm.submitted == 1


async def test_late_duplicate_submission_is_cancelled(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        site.slurm.late = 1
        lease = await harness.request_lease()
        await harness.controller.step()
        await harness.controller.step()
        site.slurm.arrive()
        assert len(site.slurm.live()) == 2
        await harness.controller.step()
        assert site.slurm.only().id == harness.lease(lease.id).slurm_job


async def test_broker_crash_before_storing_the_job_submits_nothing_twice(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.request_lease()
    name = names.slurm_job_name(INSTANCE, lease.id)
    job = site.slurm.add(SlurmSubmission(name=name, submitter=await find_submitter("ada"), script="", gpus_per_node=1))
    async with site.broker() as harness:
        await harness.controller.step()
        assert harness.lease(lease.id).slurm_job == job
        assert site.slurm.submitted == 0


async def test_job_of_another_user_is_not_adopted_by_name(site: BrokerEnvironment) -> None:
    async with site.broker() as harness:
        lease = await harness.request_lease()
        name = names.slurm_job_name(INSTANCE, lease.id)
        fake = site.slurm.add(SlurmSubmission(name=name, submitter=await find_submitter("eve"), script=""))
        await harness.controller.step()
        own = harness.lease(lease.id).slurm_job
        assert own not in {None, fake}
        assert site.slurm.jobs[own or 0].user_id == UIDS["ada"]


async def test_own_job_in_place_of_the_lease_gets_only_what_slurm_allocated_to_it(site: BrokerEnvironment) -> None:
    """A user knows the lease before gpuhub submits its job, and may be faster."""
    async with site.broker() as harness:
        lease = await harness.request_lease()
        name = names.slurm_job_name(INSTANCE, lease.id)
        own = SlurmSubmission(name=name, submitter=await find_submitter("ada"), script="", gpus_per_node=1, cpus=1)
        site.slurm.add(own)
        after = await harness.submit_and_grant(lease, site.slurm)
        assert (after.state, after.granted_at) == (LeaseState.RELEASED, None)
        assert after.reason == "Slurm allocated it fewer CPUs than it requested: 1 of 4"
        assert site.slurm.live() == []


async def test_only_jobs_of_ended_leases_are_cancelled_at_startup(site: BrokerEnvironment) -> None:
    ada = Submitter(name="ada", uid=UIDS["ada"], gid=1)
    for name in (f"{INSTANCE}-lease-l{'0' * 16}", f"{INSTANCE}-lease-mine", "train", f"other-lease-l{'0' * 16}"):
        site.slurm.add(SlurmSubmission(name=name, submitter=ada, script=""))
    async with site.broker() as harness:
        await harness.controller.step()
        assert [job.name for job in site.slurm.live()] == [
            f"{INSTANCE}-lease-mine", "train", f"other-lease-l{'0' * 16}",
        ]  # fmt: skip


async def test_many_jobs_with_leases_names_do_not_delay_others(site: BrokerEnvironment) -> None:
    """Each poll cancels only some of one user's, and everybody else's."""
    for number, owner in enumerate(["eve"] * 100 + ["ada"]):
        name = names.slurm_job_name(INSTANCE, f"l{number:016x}")
        site.slurm.add(SlurmSubmission(name=name, submitter=await find_submitter(owner), script=""))
    async with site.broker() as harness:
        left = []
        for _ in range(4):
            await harness.controller.step()
            left.append([job.user_name for job in site.slurm.live()])
    assert left == [["eve"] * 68, ["eve"] * 36, ["eve"] * 4, []]


async def test_failing_store_does_not_cause_a_second_job(
    site: BrokerEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.broker() as harness:
        lease = await harness.request_lease()
        save: Any = harness.core.store.save

        def fail(changes: Any) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(harness.core.store, "save", fail)
        await harness.controller.step()
        await harness.controller.step()
        assert site.slurm.submitted == 1
        monkeypatch.setattr(harness.core.store, "save", save)
        await harness.controller.step()
        assert harness.lease(lease.id).slurm_job == site.slurm.only().id
        assert site.slurm.submitted == 1


async def test_hanging_account_lookup_delays_submissions(
    site: BrokerEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell whether a job of that name is the owner's: it might be submitted twice."""

    async def silent(_owner: str) -> Submitter:
        raise StorageUnavailable("The head node's accounts do not answer")

    async with site.broker() as harness:
        site.slurm.lost_answers = 1
        lease = await harness.request_lease()
        await harness.controller.step()
        monkeypatch.setattr(harness.backend._submissions, "_find_submitter", silent)
        await harness.controller.step()
        assert (harness.state(lease.id), site.slurm.submitted) == (LeaseState.REQUESTED, 1)
        monkeypatch.setattr(harness.backend._submissions, "_find_submitter", find_submitter)
        await harness.controller.step()
        assert harness.lease(lease.id).slurm_job == site.slurm.only().id
        assert site.slurm.submitted == 1
