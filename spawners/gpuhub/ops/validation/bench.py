"""`gpuhub bench`: gpu-launch's bench in one job of a user, with one GPU of each node."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from pydantic import ValidationError

from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import ClusterView, GpuState, NodeState
from gpuhub.broker_api.schemas.bench import BenchView
from gpuhub.common.errors import Conflict, GpuhubError, NotFound
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.identity import find_identity
from gpuhub.ops.console import StepReport
from gpuhub.ops.validation.jobs import RESULT, ValidationJob, run_as_user
from gpuhub.ops.validation.plan import JOB_LIMIT_S

#: The module of gpu-launch that measures; its argument is the file of the result.
_MODULE = "gpu_launch.prediction.bench_main"
#: Time for each pair of nodes, seconds.
_PAIR_S = 10.0


async def measure_cluster(
    cluster: ClusterSettings,
    paths: Paths,
    user: str,
    names: Sequence[str],
    steps: StepReport,
    *,
    administrator: AsyncBrokerClient,
) -> BenchView:
    """Measure one GPU of each node, and the network between the nodes, and have the broker keep the figures.

    Args:
        names: The nodes that take part; empty for all that are up and have a free GPU.

    Raises:
        GpuhubError: It cannot be measured; nothing runs any more then.
    """
    # A user without an account is refused before anything starts.
    await asyncio.to_thread(find_identity, cluster.users, paths.state, user)
    view = await administrator.cluster()
    nodes = choose_nodes(view, names)
    job = ValidationJob(
        program=_MODULE,
        is_module=True,
        arguments=(RESULT,),
        nnodes=len(nodes),
        exclude_nodes=tuple(node.name for node in view.nodes if node.name not in nodes),
        limit_s=JOB_LIMIT_S + _PAIR_S * len(nodes) * (len(nodes) - 1) / 2,
    )
    async with run_as_user(cluster, paths, user, administrator) as (_, runner):
        with steps.step(f"one GPU of each of {len(nodes)} nodes, and the network between them"):
            outcome = await runner.run(job)
    if outcome.result is None:
        raise GpuhubError(f"the job that measures failed: {outcome.error}")
    try:
        bench = BenchView.model_validate(outcome.result)
    except ValidationError as error:
        raise GpuhubError(f"the job measured what cannot be kept: {error}") from error
    return await administrator.save_bench(bench)


def choose_nodes(view: ClusterView, names: Sequence[str]) -> Collection[str]:
    """Return the nodes that take part.

    Raises:
        NotFound: The cluster has no such node.
        Conflict: A named node has no free GPU, or none has.
    """
    free = {
        node.name
        for node in view.nodes
        if node.state is NodeState.UP and any(gpu.state is GpuState.FREE for gpu in node.gpus)
    }
    known = [node.name for node in view.nodes]
    for name in names:
        if name not in known:
            raise NotFound(f"there is no node {name!r}; there are: {', '.join(known)}")
        if name not in free:
            raise Conflict(f"{name} has no free GPU: `gpuhub node list` says why. Wait, or name other nodes")
    if not free:
        raise Conflict("no node that is up has a free GPU: `gpuhub node list` says why")
    return names or sorted(free)
