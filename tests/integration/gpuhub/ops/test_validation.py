"""The parts of a validation against the real broker on simulated nodes, and the end of what it started."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.ops.console import StepReport
from gpuhub.ops.validation.jobs import JobRunner, ValidationJob, end_jobs
from gpuhub.ops.validation.plan import build_plan
from gpuhub.ops.validation.report import Outcome, Report
from gpuhub.ops.validation.validation import Validation
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.validation import UID, SimulatedPrograms

Change = Callable[[str, dict[str, Any]], dict[str, Any] | None]


async def find_containers(running: Running, leases: set[str]) -> list[str]:
    return [
        f"{node.name}: {container['Names'][0]}"
        for node in running.setting.nodes.values()
        for container in node.containers.values()
        if container["Labels"].get("gpuhub.lease") in leases
    ]


@asynccontextmanager
async def connect(running: Running) -> AsyncIterator[tuple[AsyncBrokerClient, JobRunner]]:
    """A user's client, and a runner of that user's jobs."""
    user = AsyncBrokerClient(running.url, "ada", transport=running.transport, retry_limit_s=0)
    administrator = AsyncBrokerClient(running.url, "own-token", transport=running.transport, retry_limit_s=0)
    try:
        yield user, JobRunner(user, administrator)
    finally:
        await user.close()
        await administrator.close()


async def validate(setting: Setting, change: Change = lambda program, result: result) -> tuple[Report, Any]:
    """Return the report of a validation, and the programs that ran."""
    async with asgi_broker(setting) as running, connect(running) as (user, runner):
        programs = SimulatedPrograms(running, "ada", change)
        player = asyncio.create_task(programs.run())
        try:
            [usage] = await user.usage()
            async with end_jobs(runner):
                report = await Validation(
                    plan=build_plan(await user.cluster(), usage, "ada"),
                    runner=runner,
                    cluster=user,
                    find_containers=lambda leases: find_containers(running, leases),
                    uid=UID,
                    steps=StepReport(io.StringIO()),
                ).run()
        finally:
            player.cancel()
            with suppress(asyncio.CancelledError):
                await player
        return report, programs.ran


def failures(report: Report) -> list[str]:
    return [f"{check.name}: {check.seen}" for check in report.checks if check.outcome is Outcome.FAIL]


async def test_all_parts_pass(setting: Setting) -> None:
    """Every node is used alone, all GPUs at once, and then all nodes together twice; every figure is there."""
    report, ran = await validate(setting)
    assert failures(report) == []
    assert ran == [("single_gpu", 1)] * 6 + [("network", 3), ("ddp", 3)]
    assert [part.name for part in report.parts] == ["closet", "one-each", "all-at-once", "hello", "ddp", "afterwards"]
    figures = {figure.name: figure.value for figure in report.figures}
    assert figures["rig2.throughput"] == 200
    assert figures["closet.jobs_at_once_over_one"] == pytest.approx(3 * 199 / 200)
    assert figures["network.rig1-rig3.bandwidth"] == 2.3
    assert figures["ddp.2_over_one"] == pytest.approx(2 * 0.04 / 0.22)
    assert (report.user, report.is_simulated, len(report.nodes)) == ("ada", False, 3)


async def test_one_failing_job_is_reported_and_the_rest_goes_on(setting: Setting) -> None:
    """A launch that ends with an error is one failed check with its output; the parts before and after it are whole."""
    report, ran = await validate(setting, lambda program, result: None if program == "network" else result)
    found = failures(report)
    assert [failure.startswith("all nodes: job: it ended with exit code 1") for failure in found] == [True], found
    assert ran[-1] == ("ddp", 3)


async def test_job_that_never_ends_is_ended(setting: Setting) -> None:
    """At its time limit a job is ended, its GPU becomes free, and the error has its state."""
    async with asgi_broker(setting) as running, connect(running) as (user, runner):
        outcome = await runner.run(ValidationJob(program="single_gpu", arguments=("1",), limit_s=0.5))
        assert "after 0 s, and was ended" in outcome.error
        assert await user.jobs() == []


async def test_interrupt_ends_all_jobs(setting: Setting) -> None:
    """Whatever interrupts a validation, its jobs end and no GPU stays held; jobs of others continue."""
    async with asgi_broker(setting) as running, connect(running) as (user, runner):

        async def run() -> None:
            async with end_jobs(runner):
                await runner.run(ValidationJob(program="ddp", nnodes=2, limit_s=60))

        other = ValidationJob(program="ddp", limit_s=60)
        async with connect(running) as (_, others):
            kept = asyncio.create_task(others.run(other))
            await until(user.jobs, "the other job is there")
            task = asyncio.create_task(run())
            await until(lambda: len(runner.lease_ids) == 1, "the job is requested")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            async def is_alone() -> bool:
                return [job.run_id for job in await user.jobs()] == [other.run_id]

            await until(is_alone, "only the other job is left")
            kept.cancel()
            with suppress(asyncio.CancelledError):
                await kept


async def test_first_failure_ends_jobs_that_wait_for_each_other(setting: Setting) -> None:
    """When one of the jobs at once fails, the others, which would wait for it, are ended and say why."""
    async with asgi_broker(setting) as running, connect(running) as (_, runner):
        jobs = [ValidationJob(program="single_gpu", arguments=("1",), limit_s=60) for _ in range(2)]
        task = asyncio.create_task(runner.run_together(jobs))
        workers = await until(lambda: running.workers.specs if len(running.workers.specs) == 2 else None, "both start")
        broken = workers[0]
        [container] = [c for c in setting.nodes[broken.node].of_kind("worker") if c["State"] == "running"]
        setting.nodes[broken.node].end_container(container["Id"], code=3)
        outcomes = {job.run_id: outcome for job, outcome in zip(jobs, await task, strict=True)}
        assert "exit code 3" in outcomes.pop(broken.run_id).error
        [ended] = outcomes.values()
        assert ended.error == f"it was ended, because {broken.run_id} failed"
