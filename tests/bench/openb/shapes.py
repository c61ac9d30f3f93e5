"""Variations of a trace's tasks, on a part of its cluster: what a policy does that was chosen on the trace alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from gpuhub.common.gpu import GpuSpec
from gpuhub.scheduler.demand import WHOLE, NodeDemand
from tests.bench.openb.trace import Trace

#: Each of this many nodes is kept, by model: the variations have many different demands, which FGD takes long for.
PART = 8
_SEED = 7
_Vary = Callable[[NodeDemand, list[GpuSpec], random.Random], NodeDemand]


def vary(of: Trace, shape: str) -> Trace:
    """Return every `PART`-th node of a trace, with its tasks in one of `SHAPES`."""
    chance = random.Random(_SEED)
    by_model = sorted(range(len(of.nodes)), key=lambda at: of.nodes[at].cards[0].model)
    nodes = tuple(of.nodes[at] for at in sorted(by_model[::PART]))
    models = sorted({card for node in nodes for card in node.cards}, key=lambda card: card.model)
    tasks = tuple(
        replace(task, demand=SHAPES[shape](task.demand, models, chance)) if task.demand.gpus else task
        for task in of.tasks
    )
    return replace(of, name=f"{of.name}, {shape}", nodes=nodes, tasks=tasks)


def _name_two_models(demand: NodeDemand, models: list[GpuSpec], chance: random.Random) -> NodeDemand:
    return replace(demand, cards=tuple(chance.sample(models, 2))) if chance.random() < 1 / 3 else demand


def _ask_for_gangs(demand: NodeDemand, models: list[GpuSpec], chance: random.Random) -> NodeDemand:
    if chance.random() > 0.3:
        return demand
    gpus = chance.choice((2, 4, 8))
    return replace(
        demand,
        gpus=gpus,
        milli=WHOLE,
        cpu_milli=min(96_000, demand.cpu_milli * gpus // 2),
        memory_mib=demand.memory_mib * gpus // 2,
    )


def _share_more(demand: NodeDemand, models: list[GpuSpec], chance: random.Random) -> NodeDemand:
    if demand.gpus != 1 or chance.random() > 0.8:
        return demand
    return replace(demand, milli=chance.choice((100, 200, 250, 300, 450, 500, 600, 700)))


#: By name: a third of the tasks names two random models; a third asks for 2, 4 or 8 GPUs; most ask for shares.
SHAPES: dict[str, _Vary] = {"models": _name_two_models, "gangs": _ask_for_gangs, "shares": _share_more}
