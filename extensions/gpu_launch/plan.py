"""Who takes part in a launch: the notebook's own GPUs, and what the broker is asked for. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gpu_launch.demand import Demand
from gpu_launch.environment import Environment
from gpu_launch.errors import UsageError
from gpu_launch.wire import Cluster, Gpu


@dataclass(frozen=True, kw_only=True)
class Plan:
    """At most `nnodes` nodes of `nproc_per_node` ranks each, and at least `least_nnodes`."""

    nnodes: int
    least_nnodes: int
    nproc_per_node: int
    #: The notebook's own container is node 0.
    own: bool
    #: The GPUs it takes part with, as the cluster knows them; empty where it does not, or they are not known.
    own_cards: tuple[Gpu, ...]
    #: Nodes where no worker may go: the notebook's own, where its GPUs take part or nothing else may run.
    exclude_nodes: tuple[str, ...]
    demand: Demand

    @property
    def workers(self) -> int:
        """Containers asked of the broker, at most."""
        return self.nnodes - int(self.own)

    @property
    def least_workers(self) -> int:
        """Containers without which nothing starts."""
        return self.least_nnodes - int(self.own)

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on with fewer nodes."""
        return self.least_nnodes < self.nnodes


def make_plan(
    env: Environment,
    *,
    nnodes: int,
    least_nnodes: int | None = None,
    nproc_per_node: int,
    demand: Demand,
    cards: tuple[Gpu, ...] = (),
) -> Plan:
    """Who takes part. `cards` are the notebook's own GPUs, as far as they are known.

    Raises UsageError where GPUs must be asked for and nobody can be asked.
    """
    own_cards = cards[:nproc_per_node]
    own = _takes_part(env, nproc_per_node, demand, own_cards)
    if own and demand.same_model and nnodes > 1:
        demand = replace(demand, models=(own_cards[0].model,))
    plan = Plan(
        nnodes=nnodes,
        least_nnodes=nnodes if least_nnodes is None else least_nnodes,
        nproc_per_node=nproc_per_node,
        own=own,
        own_cards=own_cards if own else (),
        exclude_nodes=(env.node,) if own or demand.exclusive else (),
        demand=demand,
    )
    missing = missing_broker(env)
    if plan.workers and missing:
        has = f"{len(env.gpu_uuids)} GPU" + ("" if len(env.gpu_uuids) == 1 else "s")
        raise UsageError(
            f"{nnodes} × {nproc_per_node} GPUs are more than this container's own ({has}), "
            f"and the rest cannot be asked for: {missing}."
        )
    return plan


def _takes_part(env: Environment, nproc_per_node: int, demand: Demand, cards: tuple[Gpu, ...]) -> bool:
    if len(env.gpu_uuids) < nproc_per_node or demand.exclusive:
        return False
    if not demand.is_choosy:
        return True
    accepted = [card for card in cards if demand.accepts(card, memory_mib=env.memory_cap_mib)]
    is_one_model = len({card.model for card in cards}) == 1
    return len(accepted) == nproc_per_node and (is_one_model or not demand.same_model)


def missing_broker(env: Environment) -> str:
    """What this container lacks for asking the broker; empty when nothing."""
    if not env.broker_url:
        return "GPUHUB_BROKER_URL is not set, so this is not a server started by gpuhub"
    return "" if env.token else "JUPYTERHUB_API_TOKEN is not set"


def find_model(cluster: Cluster, wanted: str) -> str:
    """The cluster's own spelling of a model: `rtx5090` and `RTX 5090` are one."""
    for model in cluster.models():
        if _plain(model) == _plain(wanted):
            return model
    raise UsageError(f"--model {wanted}: the cluster has {', '.join(cluster.models()) or 'no GPUs'}.")


def fit(plan: Plan, cluster: Cluster) -> Plan:
    """The plan, with no more nodes than this cluster has. Refuses what it can never give, however long one waits."""
    able = _able_nodes(plan, cluster)
    if len(able) >= plan.workers:
        return plan
    if len(able) >= plan.least_workers:
        return replace(plan, nnodes=len(able) + int(plan.own))
    names = [node for node in plan.exclude_nodes if plan.own] + able
    kind = plan.demand.describe(plan.nproc_per_node)
    own = ", ".join(plan.exclude_nodes)
    besides = f" besides this notebook's own, {own}" if own and not plan.own else ""
    if not names:
        raise UsageError(f"--nproc-per-node {plan.nproc_per_node}: no node of the cluster has {kind}{besides}.")
    one_model = ", all of one model" if plan.demand.same_model else ""
    raise UsageError(
        f"--nnodes {plan.least_nnodes} is more than the cluster has: "
        f"{len(names)} {'node has' if len(names) == 1 else 'nodes have'} {kind}{one_model}{besides} "
        f"({', '.join(names)}). "
        f"Use --nnodes {len(names)} or less."
    )


def free_nodes(plan: Plan, cluster: Cluster, used: Collection[str] = ()) -> tuple[str, ...]:
    """Nodes that could take one of the plan's workers now, but for those that are used already."""
    return tuple(
        node.name
        for node in cluster.nodes
        if node.name not in {*plan.exclude_nodes, *used}
        and plan.demand.most_on_a_node([gpu for gpu in node.gpus if gpu.state == "free"]) >= plan.nproc_per_node
    )


def _able_nodes(plan: Plan, cluster: Cluster) -> list[str]:
    """The nodes that could take a worker; with `same_model`, of the model that most of them have."""
    demands = [plan.demand]
    if plan.demand.same_model:
        demands = [replace(plan.demand, models=(model,)) for model in plan.demand.models or cluster.models()]
    able = [
        [
            node.name
            for node in cluster.nodes
            if node.name not in plan.exclude_nodes and demand.most_on_a_node(node.gpus) >= plan.nproc_per_node
        ]
        for demand in demands
    ]
    return max(able, key=len, default=[])


def _plain(model: str) -> str:
    return "".join(model.lower().split())
