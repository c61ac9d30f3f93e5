"""Who takes part in a launch: the notebook's own GPUs, and what the broker is asked for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_launch.environment import Environment
from gpu_launch.errors import UsageError
from gpu_launch.wire import Cluster


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`nnodes` nodes of `nproc_per_node` ranks each."""

    nnodes: int
    nproc_per_node: int
    #: The notebook's own container is node 0.
    own: bool
    #: Containers asked of the broker.
    workers: int
    #: Nodes where no worker may go: the notebook's own, where its GPUs take part.
    exclude_nodes: tuple[str, ...]
    model: str | None

    def node_rank(self, worker: int | None) -> int:
        """The node rank of a worker's index; None is the notebook's own container."""
        return 0 if worker is None else worker + int(self.own)


def make_plan(env: Environment, *, nnodes: int, nproc_per_node: int, model: str | None, own_model: str | None) -> Plan:
    """Who takes part. `own_model` is the model of the notebook's own GPUs, None where not known.

    Raises UsageError where GPUs must be asked for and nobody can be asked.
    """
    own = len(env.gpu_uuids) >= nproc_per_node and (model is None or same_model(model, own_model or ""))
    plan = Plan(
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        own=own,
        workers=nnodes - int(own),
        exclude_nodes=(env.node,) if own else (),
        model=model,
    )
    missing = missing_broker(env)
    if plan.workers and missing:
        has = f"{len(env.gpu_uuids)} GPU" + ("" if len(env.gpu_uuids) == 1 else "s")
        raise UsageError(
            f"{nnodes} × {nproc_per_node} GPUs are more than this container's own ({has}), "
            f"and the rest cannot be asked for: {missing}."
        )
    return plan


def missing_broker(env: Environment) -> str:
    """What this container lacks for asking the broker; empty when nothing."""
    if not env.broker_url:
        return "GPUHUB_BROKER_URL is not set, so this is not a server started by gpuhub"
    return "" if env.token else "JUPYTERHUB_API_TOKEN is not set"


def same_model(one: str, other: str) -> bool:
    """Whether two spellings name one GPU model: `rtx5090` and `RTX 5090` do."""
    return _plain(one) == _plain(other)


def find_model(cluster: Cluster, wanted: str) -> str:
    """The cluster's own spelling of a model."""
    for model in cluster.models():
        if same_model(model, wanted):
            return model
    raise UsageError(f"--model {wanted}: the cluster has {', '.join(cluster.models()) or 'no GPUs'}.")


def check_fits(plan: Plan, cluster: Cluster) -> None:
    """Refuse what this cluster can never give, however long one waits."""
    able = [
        node.name
        for node in cluster.nodes
        if node.name not in plan.exclude_nodes
        and sum(plan.model is None or gpu.model == plan.model for gpu in node.gpus) >= plan.nproc_per_node
    ]
    if len(able) >= plan.workers:
        return
    names = [*plan.exclude_nodes, *able]
    kind = f"{plan.nproc_per_node} {plan.model or 'GPU'}{'s' if plan.nproc_per_node > 1 else ''}"
    if not names:
        raise UsageError(f"--nproc-per-node {plan.nproc_per_node}: no node of the cluster has {kind}.")
    raise UsageError(
        f"--nnodes {plan.nnodes} is more than the cluster has: "
        f"{len(names)} {'node has' if len(names) == 1 else 'nodes have'} {kind} ({', '.join(names)}). "
        f"Use --nnodes {len(names)} or less."
    )


def _plain(model: str) -> str:
    return "".join(model.lower().split())
