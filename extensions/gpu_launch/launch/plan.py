"""The plan of a launch: which nodes take part, the notebook's own GPUs, and the request to the broker."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime

from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.models import PREEMPTING, WAITING, Cluster, Gpu, Job, Node
from gpu_launch.environment import Environment
from gpu_launch.errors import UsageError
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.output.text import format_count, format_nodes, format_queue_state


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """At most `nnodes` nodes of `nproc_per_node` ranks each, and at least `least_nnodes`."""

    nnodes: int
    least_nnodes: int
    nproc_per_node: int
    #: The notebook's own container is node 0.
    includes_notebook: bool
    #: The GPUs of the notebook that take part, as the cluster knows them; empty if none do or they are unknown.
    notebook_gpus: tuple[Gpu, ...]
    #: Nodes without workers: the notebook's own if its GPUs take part or nothing else may run there.
    exclude_nodes: tuple[str, ...]
    demand: GpuRequest

    @property
    def workers(self) -> int:
        """Return the largest number of workers to request."""
        return self.nnodes - int(self.includes_notebook)

    @property
    def least_workers(self) -> int:
        """Return the number of workers without which the launch does not start."""
        return self.least_nnodes - int(self.includes_notebook)

    @property
    def is_elastic(self) -> bool:
        """Return whether it may continue with fewer nodes."""
        return self.least_nnodes < self.nnodes


def check_array(options: LaunchOptions) -> None:
    """Refuse an array whose options ask for more than one GPU for each task.

    Raises:
        UsageError: naming the option.
    """
    if options.array is None:
        return
    if options.least_nnodes is not None:
        raise UsageError("--array and --nnodes MIN:MAX exclude each other: each task of an array has one GPU.")
    for flag, value in (("--nnodes", options.nnodes), ("--nproc-per-node", options.nproc_per_node)):
        if value != 1:
            raise UsageError(f"--array and {flag} {value} exclude each other: each task of an array has one GPU.")


def check_guests(options: LaunchOptions) -> None:
    """Refuse a job on guests that needs what they do not have.

    Raises:
        UsageError: naming the option.
    """
    if not options.demand.guests:
        return
    if options.nnodes != 1 or options.least_nnodes is not None:
        raise UsageError(
            f"--guests and --nnodes {options.nnodes} exclude each other: guests do not reach each other, so a job on "
            "guests has one node."
        )
    if options.demand.stage:
        raise UsageError(
            "--guests and --stage exclude each other: guests get no datasets. Put the data into the job's folder, or "
            "let the job download it."
        )


def format_job_state(job: Job, plan: LaunchPlan, now: datetime) -> str:
    """Return the state of a job whose workers are requested or start, for a person."""
    if job.state == WAITING:
        return f"waiting for {format_requested_gpus(plan)}{format_queue_state(job, now)}"
    if job.is_granted:
        names = plan.demand.stage
        copies = f", after {' and '.join(names)} {'is' if len(names) == 1 else 'are'} copied there" if names else ""
        return f"starting {format_count(len(job.workers), 'worker')} on {format_nodes(job.workers, '')}{copies}"
    return "preempted, the workers end" if job.state == PREEMPTING else f"the job is {job.state}"


def format_requested_gpus(plan: LaunchPlan) -> str:
    """Return `2 GPUs on 2 nodes`, or `2 to 4 GPUs on 1 to 2 nodes`."""
    least, most, each = max(1, plan.least_workers), plan.workers, plan.nproc_per_node
    return f"{_format_range(least * each, most * each, 'GPU')} on {_format_range(least, most, 'node')}"


def _format_range(least: int, most: int, noun: str) -> str:
    return format_count(most, noun) if least == most else f"{least} to {format_count(most, noun)}"


def make_plan(
    env: Environment,
    *,
    nnodes: int,
    least_nnodes: int | None = None,
    nproc_per_node: int,
    demand: GpuRequest,
    cards: tuple[Gpu, ...] = (),
) -> LaunchPlan:
    """Return who takes part. `cards` are the notebook's own GPUs, as far as they are known.

    Raises:
        UsageError: where GPUs must be requested and this container has no broker.
    """
    own_cards = cards[:nproc_per_node]
    own = _takes_part(env, nproc_per_node, demand, own_cards)
    if own and demand.same_model and nnodes > 1:
        demand = replace(demand, models=(own_cards[0].model,))
    plan = LaunchPlan(
        nnodes=nnodes,
        least_nnodes=nnodes if least_nnodes is None else least_nnodes,
        nproc_per_node=nproc_per_node,
        includes_notebook=own,
        notebook_gpus=own_cards if own else (),
        exclude_nodes=(env.node,) if own or demand.exclusive else (),
        demand=demand,
    )
    missing = missing_broker(env)
    if plan.workers and missing:
        has = f"{len(env.gpu_uuids)} GPU" + ("" if len(env.gpu_uuids) == 1 else "s")
        raise UsageError(
            f"{nnodes} × {nproc_per_node} GPUs are more than this container's own ({has}), "
            f"and the rest cannot be requested: {missing}."
        )
    return plan


def _takes_part(env: Environment, nproc_per_node: int, demand: GpuRequest, cards: tuple[Gpu, ...]) -> bool:
    has_copies = all(any(f"{dataset}/".startswith(f"{one}/") for one in env.staged) for dataset in demand.stage)
    if len(env.gpu_uuids) < nproc_per_node or demand.exclusive or demand.sets_size or not has_copies:
        return False
    if not demand.needs_gpu_data:
        return True
    accepted = [card for card in cards if demand.accepts(card, memory_mib=env.memory_cap_mib)]
    is_one_model = len({card.model for card in cards}) == 1
    return len(accepted) == nproc_per_node and (is_one_model or not demand.same_model)


def missing_broker(env: Environment) -> str:
    """Return what this container lacks for a request to the broker; empty for nothing."""
    if not env.broker_url:
        return "GPUHUB_BROKER_URL is not set, so this is not a server started by gpuhub"
    return "" if env.token else "JUPYTERHUB_API_TOKEN is not set"


def find_model(cluster: Cluster, wanted: str) -> str:
    """Return the cluster's own spelling of a model: `rtx5090` and `RTX 5090` are one.

    Raises:
        UsageError: for a model that the cluster does not have, with those that it has.
    """
    for model in cluster.list_models():
        if _plain(model) == _plain(wanted):
            return model
    raise UsageError(f"--model {wanted}: the cluster has {', '.join(cluster.list_models()) or 'no GPUs'}.")


def name_models(demand: GpuRequest, cluster: Cluster) -> GpuRequest:
    """Return the demand with the cluster's own names of models.

    Raises:
        UsageError: the cluster has no such model.
    """
    return replace(demand, models=tuple(find_model(cluster, model) for model in demand.models))


def fit(plan: LaunchPlan, cluster: Cluster) -> LaunchPlan:
    """Return the plan with no more nodes than this cluster has.

    Raises:
        UsageError: for a plan that the cluster can never grant.
    """
    able = _able_nodes(plan, cluster)
    if len(able) >= plan.workers:
        return plan
    if len(able) >= plan.least_workers:
        return replace(plan, nnodes=len(able) + int(plan.includes_notebook))
    names = [node for node in plan.exclude_nodes if plan.includes_notebook] + able
    kind = plan.demand.describe(plan.nproc_per_node)
    own = ", ".join(plan.exclude_nodes)
    besides = f" other than this notebook's own, {own}" if own and not plan.includes_notebook else ""
    if not names:
        closed = [node.name for node in cluster.nodes if not node.guest and not plan.demand.may_use(node)]
        restricted = f" ({', '.join(closed)}: restricted to groups that you are not in)" if closed else ""
        if plan.demand.guests:
            restricted = " among the guests that take your jobs (--guests)"
        most = max((plan.demand.count_usable(node.gpus) for node in _list_admitting(plan, cluster)), default=0)
        remedy = f" Use --nproc-per-node {most} or less." if most else ""
        raise UsageError(
            f"--nproc-per-node {plan.nproc_per_node}: no node of the cluster has {kind}{besides}{restricted}.{remedy}"
        )
    one_model = ", all of one model" if plan.demand.same_model else ""
    raise UsageError(
        f"--nnodes {plan.least_nnodes} is more than the cluster has: "
        f"{len(names)} {'node has' if len(names) == 1 else 'nodes have'} {kind}{one_model}{besides} "
        f"({', '.join(names)}). "
        f"Use --nnodes {len(names)} or less."
    )


def free_nodes(plan: LaunchPlan, cluster: Cluster, used: Collection[str] = ()) -> tuple[str, ...]:
    """Return the nodes that could run one of the plan's workers now, without those in `used`."""
    return tuple(
        node.name
        for node in cluster.nodes
        if plan.demand.may_use(node)
        and node.name not in {*plan.exclude_nodes, *used}
        and plan.demand.count_usable([gpu for gpu in node.gpus if gpu.state == "free"]) >= plan.nproc_per_node
    )


def _list_admitting(plan: LaunchPlan, cluster: Cluster) -> list[Node]:
    """Return the nodes on which the user's workers may be placed."""
    return [node for node in cluster.nodes if plan.demand.may_use(node) and node.name not in plan.exclude_nodes]


def _able_nodes(plan: LaunchPlan, cluster: Cluster) -> list[str]:
    """Return the nodes that could run a worker; with `same_model`, of the model that most of them have."""
    demands = [plan.demand]
    if plan.demand.same_model:
        demands = [replace(plan.demand, models=(model,)) for model in plan.demand.models or cluster.list_models()]
    usable = _list_admitting(plan, cluster)
    able = [
        [node.name for node in usable if demand.count_usable(node.gpus) >= plan.nproc_per_node] for demand in demands
    ]
    return max(able, key=len, default=[])


def _plain(model: str) -> str:
    return "".join(model.lower().split())
