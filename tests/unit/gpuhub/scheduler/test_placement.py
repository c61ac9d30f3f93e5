"""The placement policy: what a choice may be, and which of several is best."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhub.common.gpu import GpuSpec
from gpuhub.scheduler import fragmentation
from gpuhub.scheduler.demand import UNLIMITED, WHOLE, NodeDemand
from gpuhub.scheduler.placement import FreeCapacity, PlacementChoice, make_least_waste

SMALL = GpuSpec(model="RTX 5070", memory_mib=12227)
MIDDLE = GpuSpec(model="RTX 5070 Ti", memory_mib=16303)
BIG = GpuSpec(model="RTX 5090", memory_mib=32607)
CARDS = (SMALL, MIDDLE, BIG)
SUPPLY = {SMALL: 20, MIDDLE: 10, BIG: 5}

#: Half whole GPUs, some popular parts, some for several GPUs, for one model, or for none; with CPU and memory.
MIXED = (
    (NodeDemand(gpus=1, cpu_milli=8000, memory_mib=30000), 40.0),
    (NodeDemand(gpus=1, cpu_milli=16000, memory_mib=60000), 10.0),
    (NodeDemand(gpus=1, milli=810, cpu_milli=3000, memory_mib=6000), 15.0),
    (NodeDemand(gpus=1, milli=470, cpu_milli=12000, memory_mib=47000), 10.0),
    (NodeDemand(gpus=1, milli=320, cpu_milli=4000, memory_mib=15000), 10.0),
    (NodeDemand(gpus=1, cards=(BIG,), cpu_milli=8000, memory_mib=30000), 5.0),
    (NodeDemand(gpus=4, cpu_milli=32000, memory_mib=120000), 2.0),
    (NodeDemand(gpus=0, cpu_milli=12000, memory_mib=50000), 8.0),
)


def node(*cards: GpuSpec, free: tuple[int, ...] = (), **other: int) -> FreeCapacity:
    return FreeCapacity(cards=cards, free=free or (WHOLE,) * len(cards), **other)


def choose_best(
    demand: NodeDemand, *nodes: FreeCapacity, workload: fragmentation.Workload = ()
) -> tuple[int, PlacementChoice]:
    """Which node, and its choice; the first of equals."""
    policy = make_least_waste(workload, SUPPLY)
    choices = [(choice.rank, at, choice) for at, of in enumerate(nodes) if (choice := policy.choose(of, demand))]
    _, at, choice = min(choices, key=lambda found: found[:2])
    return at, choice


@st.composite
def node_capacities(draw: st.DrawFn) -> FreeCapacity:
    cards = tuple(draw(st.lists(st.sampled_from(CARDS), max_size=8)))
    milli = st.one_of(st.sampled_from((0, 190, 350, 530, WHOLE)), st.integers(0, WHOLE))
    return FreeCapacity(
        cards=cards,
        free=tuple(draw(milli) for _ in cards),
        cpu_milli=draw(st.one_of(st.just(UNLIMITED), st.integers(0, 128000))),
        memory_mib=draw(st.one_of(st.just(UNLIMITED), st.integers(0, 786432))),
        load=draw(st.integers(0, 5)),
    )


@st.composite
def demands(draw: st.DrawFn) -> NodeDemand:
    gpus = draw(st.integers(0, 8))
    return NodeDemand(
        gpus=gpus,
        cards=draw(st.one_of(st.none(), st.lists(st.sampled_from(CARDS), unique=True).map(tuple))),
        has_preference=draw(st.booleans()),
        milli=draw(st.integers(1, WHOLE)) if gpus == 1 else WHOLE,
        cpu_milli=draw(st.integers(0, 64000)),
        memory_mib=draw(st.integers(0, 200000)),
        exclusive=draw(st.booleans()),
    )


def is_feasible(of: FreeCapacity, demand: NodeDemand) -> bool:
    """Said once more, independently of the policy."""
    usable = [
        free >= demand.milli and (demand.cards is None or card in demand.cards)
        for card, free in zip(of.cards, of.free, strict=True)
    ]
    return (
        of.cpu_milli >= demand.cpu_milli
        and of.memory_mib >= demand.memory_mib
        and sum(usable) >= demand.gpus
        and not (demand.exclusive and (of.load > 0 or any(0 < free < WHOLE for free in of.free)))
    )


@given(node_capacities(), demands(), st.sampled_from([(), MIXED]))
def test_placement_exists_exactly_when_the_demand_fits(
    of: FreeCapacity, demand: NodeDemand, workload: fragmentation.Workload
) -> None:
    choice = make_least_waste(workload, SUPPLY).choose(of, demand)
    assert (choice is not None) == is_feasible(of, demand)
    if choice is not None:
        assert len(choice.gpus) == len(set(choice.gpus)) == demand.gpus
        assert all(of.free[at] >= demand.milli for at in choice.gpus)
        assert demand.cards is None or {of.cards[at] for at in choice.gpus} <= set(demand.cards)


@given(node_capacities(), demands())
def test_equal_policies_make_equal_choices(of: FreeCapacity, demand: NodeDemand) -> None:
    policy = make_least_waste(MIXED, SUPPLY)
    first = policy.choose(of, demand)
    assert policy.choose(replace(of), replace(demand)) == first == make_least_waste(MIXED, SUPPLY).choose(of, demand)


@given(st.lists(st.sampled_from(CARDS), min_size=1, max_size=6), st.integers(1, WHOLE), st.sampled_from([(), MIXED]))
def test_least_capable_gpu_is_granted_for_any_model(
    cards: list[GpuSpec], milli: int, workload: fragmentation.Workload
) -> None:
    least = min(card.memory_mib for card in cards)
    together = node(*cards)
    (at,) = choose_best(NodeDemand(gpus=1, milli=milli), together, workload=workload)[1].gpus
    assert cards[at].memory_mib == least
    apart = [node(card) for card in cards]
    assert cards[choose_best(NodeDemand(gpus=1, milli=milli), *apart, workload=workload)[0]].memory_mib == least


def test_older_gpu_is_granted_for_equal_memory() -> None:
    older = GpuSpec(model="RTX 3090", memory_mib=24576, capability=(8, 6))
    newer = GpuSpec(model="RTX 4090", memory_mib=24564, capability=(8, 9))
    assert choose_best(NodeDemand(gpus=1), node(newer), node(older))[0] == 1


@given(st.permutations(CARDS))
def test_preferred_model_is_granted(liked: list[GpuSpec]) -> None:
    demand = NodeDemand(gpus=1, cards=tuple(liked[:2]), has_preference=True)
    assert choose_best(demand, *(node(card) for card in CARDS))[0] == CARDS.index(liked[0])
    (at,) = choose_best(demand, node(*CARDS))[1].gpus
    assert CARDS[at] == liked[0]


def test_least_capable_gpus_of_a_node_are_granted() -> None:
    assert choose_best(NodeDemand(gpus=2), node(BIG, SMALL, BIG, MIDDLE))[1].gpus == (1, 3)


@pytest.mark.parametrize("workload", [(), MIXED])
def test_fuller_node_is_preferred_and_empty_nodes_are_kept(workload: fragmentation.Workload) -> None:
    empty, half_full = node(SMALL, SMALL, SMALL, SMALL), node(SMALL, SMALL, SMALL, SMALL, free=(0, 0, WHOLE, WHOLE))
    for gpus in (1, 2):
        assert choose_best(NodeDemand(gpus=gpus), empty, half_full, workload=workload)[0] == 1


def test_node_with_fewer_containers_breaks_ties() -> None:
    assert choose_best(NodeDemand(gpus=1), node(SMALL, load=2), node(SMALL, load=1))[0] == 1


def test_notebook_without_gpu_uses_the_node_with_fewest_containers() -> None:
    busy, idle = node(SMALL, SMALL, free=(0, 0), load=3), node(SMALL, SMALL, load=1)
    assert choose_best(NodeDemand(gpus=0), busy, idle)[0] == 1
    assert choose_best(NodeDemand(gpus=0), replace(busy, load=1), idle)[0] == 0


@pytest.mark.parametrize("workload", [(), MIXED])
def test_gpu_share_prefers_a_gpu_that_is_already_shared(workload: fragmentation.Workload) -> None:
    in_use, whole = node(SMALL, free=(500,)), node(SMALL)
    assert choose_best(NodeDemand(gpus=1, milli=500), whole, in_use, workload=workload)[0] == 1


def test_gpu_share_is_best_fit_without_a_workload() -> None:
    of = node(SMALL, SMALL, SMALL, free=(900, 520, 700))
    assert choose_best(NodeDemand(gpus=1, milli=500), of)[1].gpus == (1,)


def test_gpu_share_leaves_remainders_that_others_request() -> None:
    """A third is popular here and a fifth is not: 0.33 left over is worth more than 0.2."""
    workload = ((NodeDemand(gpus=1, milli=330), 1.0), (NodeDemand(gpus=1), 1.0))
    of = node(SMALL, SMALL, free=(700, 830))
    assert choose_best(NodeDemand(gpus=1, milli=500), of, workload=workload)[1].gpus == (1,)


def test_cpu_heavy_requests_use_nodes_with_free_cpu() -> None:
    poor = node(SMALL, SMALL, SMALL, SMALL, cpu_milli=40000, memory_mib=UNLIMITED)
    rich = node(SMALL, SMALL, cpu_milli=100000, memory_mib=UNLIMITED)
    assert choose_best(NodeDemand(gpus=1, cpu_milli=16000), poor, rich, workload=MIXED)[0] == 1
    assert choose_best(NodeDemand(gpus=0, cpu_milli=16000), poor, rich, workload=MIXED)[0] == 1


def test_models_unpopular_in_the_workload_are_granted_first() -> None:
    other = replace(SMALL, model="RTX 4070")
    workload = ((NodeDemand(gpus=1, cards=(SMALL,)), 1.0),)
    assert choose_best(NodeDemand(gpus=1), node(SMALL), node(other), workload=workload)[0] == 1


def test_scarce_models_are_kept_for_demands_that_name_them() -> None:
    """Few demands name the scarce model, yet more for each of its GPUs than for those of the other."""
    scarce, plenty = replace(SMALL, model="T4"), replace(SMALL, model="P100")
    workload = (
        (NodeDemand(gpus=1, cards=(scarce,)), 1.0),
        (NodeDemand(gpus=1, cards=(plenty,)), 2.0),
        (NodeDemand(gpus=1, cards=(scarce, plenty)), 1.0),
    )
    policy = make_least_waste(workload, {scarce: 10, plenty: 90})
    for cards in ((scarce, plenty), (plenty, scarce), None):
        demand = NodeDemand(gpus=1, cards=cards)
        ranks = [choice.rank for card in (scarce, plenty) if (choice := policy.choose(node(card), demand))]
        assert ranks[1] < ranks[0]
        together = policy.choose(node(scarce, plenty), demand)
        assert together is not None
        assert together.gpus == (1,)


def test_contention_is_one_on_average() -> None:
    """It compares the cards; what nothing asks for is not contended, and what does not exist has none."""
    workload = ((NodeDemand(gpus=2, cards=(SMALL, BIG)), 3.0), (NodeDemand(gpus=1, milli=500), 4.0))
    found = fragmentation.estimate_contention(workload, {SMALL: 6, MIDDLE: 2})
    assert found == {SMALL: pytest.approx(1.25), MIDDLE: pytest.approx(0.25)}
    assert (6 * found[SMALL] + 2 * found[MIDDLE]) / 8 == pytest.approx(1.0)


def test_exclusive_demand_uses_the_node_with_least_waste() -> None:
    assert (
        choose_best(NodeDemand(gpus=2, exclusive=True), node(*[SMALL] * 4), node(*[SMALL] * 2), node(*[SMALL] * 3))[0]
        == 1
    )


# -- the waste expected of a free part ------------------------------------------------------------------------------


def test_waste_is_zero_without_capacity_and_full_without_demand() -> None:
    filled = fragmentation.estimate_fills(((NodeDemand(gpus=1, milli=400), 1.0),), SMALL)
    assert len(filled) == WHOLE + 1
    assert filled[0] == fragmentation.FillEstimate()
    assert filled[399].waste == 399
    assert filled[400].waste < 10
    assert 200 <= filled[1000].waste < 220


def test_expected_waste_matches_a_simulation() -> None:
    """Against the process that the equation describes, drawn at random."""
    workload = (
        (NodeDemand(gpus=1, milli=300, cpu_milli=2000), 2.0),
        (NodeDemand(gpus=1, milli=450, cpu_milli=5000), 1.0),
    )
    expected = fragmentation.estimate_fills(workload, SMALL)[WHOLE]
    chance = random.Random(0)
    wasted, cpus = [], []
    for _ in range(20000):
        free, cpu = WHOLE, 0
        while free >= 300 and chance.random() > 0.01:
            demand = chance.choices([demand for demand, _ in workload], [often for _, often in workload])[0]
            if demand.milli <= free:
                free, cpu = free - demand.milli, cpu + demand.cpu_milli
        wasted.append(free)
        cpus.append(cpu)
    assert sum(wasted) / len(wasted) == pytest.approx(expected.waste, rel=0.05)
    assert sum(cpus) / len(cpus) == pytest.approx(expected.cpu, rel=0.05)


def test_missing_cpu_strands_a_proportional_part_of_gpus() -> None:
    four = fragmentation.FillEstimate(used=4000.0, cpu=40000.0)
    assert fragmentation.estimate_stranded(four, 40000, UNLIMITED) == 0
    assert fragmentation.estimate_stranded(four, 30000, UNLIMITED) == 1000
    assert fragmentation.estimate_stranded(four, 0, UNLIMITED) == 4000
    assert fragmentation.estimate_stranded(replace(four, cpu_variance=1e8), 40000, UNLIMITED) > 0


@given(st.floats(0, 1e5), st.floats(0, 1e9), st.integers(0, 200000))
def test_more_free_cpu_never_strands_more_gpus(cpu: float, variance: float, free: int) -> None:
    need = fragmentation.FillEstimate(used=1000.0, cpu=cpu, cpu_variance=variance)
    assert (
        fragmentation.estimate_stranded(need, free, UNLIMITED)
        >= fragmentation.estimate_stranded(need, free + 1000, UNLIMITED) - 1e-9
    )
    assert fragmentation.estimate_stranded(need, UNLIMITED, UNLIMITED) == 0
