"""The validation of a running cluster: its parts one after the other, and the end of everything that it started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from typing import Protocol

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import ClusterView, GpuState
from gpuhub.common import names
from gpuhub.common.errors import Unavailable
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.identity import find_identity
from gpuhub.docker.client import DockerClients
from gpuhub.ops.console import StepReport
from gpuhub.ops.validation import checks
from gpuhub.ops.validation.checks import CheckedPart
from gpuhub.ops.validation.jobs import JobResult, JobRunner, ValidationJob, build_run_folder, new_run_id, run_as_user
from gpuhub.ops.validation.plan import (
    COMPUTE_S,
    FREE_LIMIT_S,
    JOB_LIMIT_S,
    STEPS_S,
    TRANSFER_S,
    ValidationPlan,
    build_plan,
)
from gpuhub.ops.validation.report import Check, Figure, Part, Report, ReportedGpu, ReportedNode, build_check

_POLL_S = 0.5

#: Returns the containers of leases on all nodes, as `node: name`.
FindContainers = Callable[[set[str]], Awaitable[list[str]]]


class ClusterReader(Protocol):
    """The part of the broker's client that reads the cluster."""

    async def cluster(self) -> ClusterView:
        """Return the state of the whole cluster."""


async def validate_cluster(
    cluster: ClusterSettings,
    paths: Paths,
    user: str,
    steps: StepReport,
    *,
    administrator: AsyncBrokerClient,
) -> Report:
    """Validate the cluster with jobs of a user.

    Args:
        cluster: The settings that the services run with.
        paths: Those of the instance.
        user: The owner of all jobs.
        steps: Shows which part runs.
        administrator: Ends the jobs, whatever happened.

    Raises:
        GpuhubError: It cannot be validated; nothing has run then.
    """
    identity = await asyncio.to_thread(find_identity, cluster.users, paths.state, user)
    async with run_as_user(cluster, paths, user, administrator) as (client, runner):
        daemons = DockerClients(cluster.nodes, instance=paths.instance, run_dir=paths.run)
        try:
            [usage] = await client.usage()
            validation = Validation(
                plan=build_plan(await client.cluster(), usage, user),
                runner=runner,
                cluster=client,
                find_containers=lambda leases: _find_containers(daemons, paths.instance, leases),
                uid=identity.uid,
                steps=steps,
            )
            return await validation.run()
        finally:
            daemons.close()


async def _find_containers(daemons: DockerClients, instance: str, leases: set[str]) -> list[str]:
    label = {"label": [f"{names.LABEL_INSTANCE}={instance}", names.LABEL_LEASE]}
    found = await asyncio.gather(
        *(daemons.call(node.name, "containers", all=True, filters=label) for node in daemons.nodes),
        return_exceptions=True,
    )
    return [
        f"{node.name}: {container['Names'][0].removeprefix('/')}"
        for node, containers in zip(daemons.nodes, found, strict=True)
        # A node that does not answer is reported by its state.
        if not isinstance(containers, BaseException)
        for container in containers
        if container["Labels"][names.LABEL_LEASE] in leases
    ]


@dataclass(kw_only=True)
class Validation:
    """One validation."""

    plan: ValidationPlan
    runner: JobRunner
    cluster: ClusterReader
    find_containers: FindContainers
    #: The user's UID on the head node.
    uid: int
    steps: StepReport
    free_limit_s: float = FREE_LIMIT_S
    #: What the jobs reported about their GPUs.
    _seen_simulated: list[bool] = field(default_factory=list)

    async def run(self) -> Report:
        """Run all parts and return the report; what a part finds does not keep the next one from running."""
        began, started_at = time.monotonic(), datetime.now().astimezone()
        nodes, gpus = len(self.plan.nodes), len(self.plan.gpus)
        parts = [
            Part(name="closet", title="the nodes before the first job", duration_s=0.0, checks=self.plan.checks),
            await self._run_part("one-each", f"one job on each of {nodes} nodes, one after the other", self._one_each),
            await self._run_part("all-at-once", f"{gpus} jobs at once, one for each GPU", self._all_at_once),
            await self._run_part("hello", f"the network between {nodes} nodes, in one launch", self._hello),
            await self._run_part("ddp", f"torch over {nodes} nodes, one rank on each", self._ddp),
            await self._run_part("afterwards", "everything is free again", self._check_free),
        ]
        return Report(
            gpuhub=version("gpuhub"),
            started_at=started_at,
            duration_s=time.monotonic() - began,
            user=self.plan.user,
            is_simulated=any(self._seen_simulated) if self._seen_simulated else None,
            nodes=tuple(
                ReportedNode(
                    name=node.name,
                    driver=node.driver,
                    gpus=tuple(
                        ReportedGpu(uuid=gpu.uuid, model=gpu.model, memory_mib=gpu.memory_mib)
                        for gpu in self.plan.gpus
                        if gpu.node == node.name
                    ),
                )
                for node in self.plan.nodes
            ),
            parts=tuple(parts),
        )

    async def _run_part(self, name: str, title: str, work: Callable[[], Awaitable[CheckedPart]]) -> Part:
        began = time.monotonic()
        with self.steps.step(f"{name}: {title}"):
            found, figures = await work()
        duration_s = time.monotonic() - began
        return Part(name=name, title=title, duration_s=duration_s, checks=tuple(found), figures=tuple(figures))

    async def _one_each(self) -> CheckedPart:
        found: list[Check] = []
        figures: list[Figure] = []
        for node in self.plan.nodes:
            others = [other.name for other in self.plan.nodes if other != node]
            outcome = await self.runner.run(
                ValidationJob(
                    program="single_gpu",
                    arguments=(str(COMPUTE_S),),
                    exclude_nodes=(*others, *self.plan.other_nodes),
                    limit_s=JOB_LIMIT_S,
                )
            )
            self._note_hardware([outcome])
            of_node, measured = checks.check_single(node.name, outcome, self.uid)
            found += of_node
            figures += measured
        return found, figures

    async def _all_at_once(self) -> CheckedPart:
        outcomes = await self.runner.run_together(build_jobs_at_once(self.plan))
        self._note_hardware(outcomes)
        return checks.check_together(outcomes, self.uid)

    async def _hello(self) -> CheckedPart:
        outcome = await self.runner.run(
            ValidationJob(
                program="network",
                arguments=(str(TRANSFER_S),),
                nnodes=len(self.plan.nodes),
                exclude_nodes=self.plan.other_nodes,
                limit_s=self.plan.network_limit_s,
            )
        )
        return checks.check_network(outcome, [node.name for node in self.plan.nodes])

    async def _ddp(self) -> CheckedPart:
        count = len(self.plan.nodes)
        limit_s = JOB_LIMIT_S + STEPS_S
        job = ValidationJob(program="ddp", nnodes=count, exclude_nodes=self.plan.other_nodes, limit_s=limit_s)
        outcome = await self.runner.run(job)
        return checks.check_collectives(outcome, count)

    async def _check_free(self) -> CheckedPart:
        expected = {gpu.uuid for gpu in self.plan.gpus}
        deadline = time.monotonic() + self.free_limit_s
        while True:
            try:
                view = await self.cluster.cluster()
                busy = [
                    f"{gpu.node} GPU {gpu.index} is {gpu.state}"
                    for node in view.nodes
                    for gpu in node.gpus
                    if gpu.uuid in expected and gpu.state is not GpuState.FREE
                ]
                left = await self.find_containers(self.runner.lease_ids)
            except Unavailable as error:
                busy, left = [str(error)], []
            if not (busy or left) or time.monotonic() > deadline:
                return build_final_checks(len(expected), busy, left, self.free_limit_s), []
            await asyncio.sleep(_POLL_S)

    def _note_hardware(self, outcomes: Sequence[JobResult]) -> None:
        self._seen_simulated += [outcome.result["is_simulated"] for outcome in outcomes if outcome.result is not None]


def build_jobs_at_once(chosen: ValidationPlan) -> list[ValidationJob]:
    """Return one job for each GPU; they meet in the run folder of the first one."""
    count, first_run = len(chosen.gpus), new_run_id()
    folder = f"{build_run_folder(first_run)}/turns"
    return [
        ValidationJob(
            program="single_gpu",
            arguments=(str(COMPUTE_S), folder, str(number), str(count)),
            exclude_nodes=chosen.other_nodes,
            limit_s=chosen.together_limit_s,
            run_id=new_run_id() if number else first_run,
        )
        for number in range(count)
    ]


def build_final_checks(count: int, busy: Sequence[str], left: Sequence[str], limit_s: float) -> list[Check]:
    """Return the checks of what is left after the last job."""
    return [
        build_check(
            "all: GPUs are free",
            holds=not busy,
            seen="; ".join(busy) or f"all {count}",
            expected=f"all {count} free within {limit_s:.0f} s",
            advice="`gpuhub lease list` and `gpuhub events`",
        ),
        build_check(
            "all: containers are gone",
            holds=not left,
            seen="; ".join(left) or "none is left",
            expected=f"no container of the validation's jobs after {limit_s:.0f} s",
            advice="`docker ps -a` on these nodes, and `gpuhub events`",
        ),
    ]
