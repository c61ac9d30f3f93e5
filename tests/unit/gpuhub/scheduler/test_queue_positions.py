"""Where requests go: the least card that will do, gangs together, parts of GPUs, nodes for oneself."""

from __future__ import annotations

from gpuhub.common.gpu import GpuRequirement
from gpuhub.scheduler.interface import NodeCapacity
from tests.support.scheduler_snapshots import (
    BIG,
    HOUR,
    MIDDLE,
    NOW,
    SMALL,
    WANTS_BIG,
    ask,
    build_scheduler,
    granted_gpus,
    hold,
    node,
    nodes,
    slot,
    with_unavailable_gpu,
)


def test_least_capable_sufficient_gpu_is_granted() -> None:
    """Who asks for any GPU gets the smallest, and leaves the large one for who needs it."""
    there = nodes([BIG], [MIDDLE], [SMALL])
    assert granted_gpus(build_scheduler(there, ask("a")).decide(NOW), "a") == ["n2-0"]
    at_least = GpuRequirement(least_memory_mib=12 * 1024)
    assert granted_gpus(build_scheduler(there, ask("a", requirement=at_least)).decide(NOW), "a") == ["n1-0"]


def test_models_are_tried_in_order_of_preference() -> None:
    """The first model with a free GPU is given, though a later one would be smaller."""
    there = nodes([BIG], [MIDDLE], [SMALL])
    liked = GpuRequirement(models=("RTX 5090", "RTX 5060"))
    decision = build_scheduler(there, ask("a", requirement=liked), ask("b", requirement=liked)).decide(NOW)
    assert (granted_gpus(decision, "a"), granted_gpus(decision, "b")) == (["n0-0"], ["n2-0"])


def test_nodes_with_old_drivers_or_gpus_are_excluded() -> None:
    """The least driver is the node's, the least compute capability the card's; what is not known is not enough."""
    there = [node("n0", BIG, driver="550.1"), node("n1", BIG), node("n2", SMALL, driver="575.2"), node("n3", MIDDLE)]
    newer = ask("a", requirement=GpuRequirement(least_driver="570"))
    capable = ask("b", requirement=GpuRequirement(least_capability=(12, 0)))
    decision = build_scheduler(there, newer, capable).decide(NOW)
    assert (granted_gpus(decision, "a"), granted_gpus(decision, "b")) == (["n2-0"], ["n3-0"])


def test_fuller_node_is_used_for_equal_gpus() -> None:
    """A node that is partly used is filled before a whole one is broken."""
    there = nodes([SMALL, SMALL], [SMALL, SMALL])
    assert granted_gpus(build_scheduler(there, ask("a"), hold(ask("x"), slot(there, "n1-0"))).decide(NOW), "a") == [
        "n1-1"
    ]


def test_gang_gets_equal_gpus_if_possible() -> None:
    """Two nodes with the same card rather than two with different ones; mixed cards are said."""
    there = nodes([SMALL], [MIDDLE], [BIG], [BIG])
    alike = build_scheduler(there, ask("a", nodes=2)).decide(NOW)
    assert (granted_gpus(alike, "a"), alike.grants["a"].note) == (["n2-0", "n3-0"], None)
    mixed = build_scheduler(there[1:3], ask("a", nodes=2)).decide(NOW)
    assert mixed.grants["a"].note == "mixed cards: 1 × RTX 5070, 1 × RTX 5090; the slowest sets the pace"


def test_same_model_can_be_requested() -> None:
    """Where no model has enough, the request waits rather than mixing."""
    there = nodes([SMALL], [MIDDLE], [BIG])
    assert build_scheduler(there, ask("a", nodes=2, same_model=True)).decide(NOW).grants == {}
    twice = build_scheduler([*there, node("n3", BIG)], ask("a", nodes=2, same_model=True)).decide(NOW)
    assert granted_gpus(twice, "a") == ["n2-0", "n3-0"]


def test_gpus_of_one_node_are_equal_if_possible() -> None:
    """On a mixed node two equal cards are taken before two different, smaller ones."""
    there = nodes([SMALL, MIDDLE, MIDDLE])
    assert granted_gpus(build_scheduler(there, ask("a", gpus_per_node=2)).decide(NOW), "a") == ["n0-1", "n0-2"]


def test_gang_is_granted_as_a_whole_or_not_at_all() -> None:
    """With one of three nodes held, a gang of three takes none of the other two."""
    there = nodes([BIG], [MIDDLE], [SMALL])
    assert build_scheduler(there, ask("a", nodes=3), hold(ask("x"), slot(there, "n0-0"))).decide(NOW).grants == {}


def test_gang_prefers_one_switch_then_one_rack() -> None:
    """One switch before one rack, one rack before anywhere."""
    there = [
        node("n0", BIG, switch="s0", rack="r0"),
        node("n1", BIG, switch="s1", rack="r1"),
        node("n2", BIG, switch="s2", rack="r1"),
        node("n3", BIG, switch="s2", rack="r2"),
    ]
    assert granted_gpus(build_scheduler(there, ask("a", nodes=2)).decide(NOW), "a") == ["n2-0", "n3-0"]
    assert granted_gpus(build_scheduler(there[:3], ask("a", nodes=2)).decide(NOW), "a") == ["n1-0", "n2-0"]
    assert len(granted_gpus(build_scheduler(there, ask("a", nodes=3)).decide(NOW), "a")) == 3


def test_a_spread_request_uses_the_fewest_nodes() -> None:
    """So many GPUs in all, wherever they are, most of them together."""
    there = nodes([SMALL], [SMALL, SMALL, SMALL], [SMALL, SMALL])
    decision = build_scheduler(there, ask("a", spread=5)).decide(NOW)
    assert {share.node: len(share.slots) for share in decision.grants["a"].node_allocations} == {"n1": 3, "n2": 2}
    assert build_scheduler(there, ask("a", spread=7)).decide(NOW).grants == {}


def test_elastic_request_takes_the_free_nodes() -> None:
    """As many nodes as are free, if they are enough."""
    there = nodes([BIG], [BIG], [BIG])
    held = hold(ask("x"), slot(there, "n0-0"))
    assert granted_gpus(build_scheduler(there, ask("a", nodes=4, least_nodes=2), held).decide(NOW), "a") == [
        "n1-0",
        "n2-0",
    ]
    assert build_scheduler(there, ask("a", nodes=4, least_nodes=3), held).decide(NOW).grants == {}


def test_notebooks_without_gpu_are_spread_over_nodes() -> None:
    """CPU-only notebooks spread over the nodes, also within one decision, and need no free GPU."""
    there = nodes([BIG], [SMALL])
    full = [hold(ask("x"), slot(there, "n0-0")), hold(ask("y"), slot(there, "n1-0"))]
    decision = build_scheduler(there, *full, *(ask(name, gpus_per_node=0) for name in "abc")).decide(NOW)
    assert [decision.grants[name].node_allocations[0].node for name in "abc"] == ["n0", "n1", "n0"]


def test_cpu_and_memory_limits_of_nodes_are_respected() -> None:
    """A node whose CPU or memory is promised takes no more, though GPUs are free."""
    there = [node("n0", BIG, BIG, BIG, cpu_milli=8000, memory_mib=64000)]
    asks = [ask("a", cpu_milli=6000, time_limit_s=HOUR), ask("b", cpu_milli=4000), ask("c", cpu_milli=2000)]
    made = build_scheduler(there, *asks)
    assert set(made.decide(NOW).grants) == {"a", "c"}
    assert made.explain_pending("b", NOW).text.endswith("too little CPU or memory is left on the nodes")


def test_exclusive_request_gets_an_empty_node_alone() -> None:
    """It takes only an empty node, and nothing comes beside it, not even a notebook without GPU."""
    there = nodes([BIG, BIG], [SMALL])
    made = build_scheduler(there, hold(ask("x", gpus_per_node=0), on=("n0",)), ask("a", exclusive=True))
    assert granted_gpus(made.decide(NOW), "a") == ["n1-0"]
    made.put_request(ask("b", gpus_per_node=0))
    made.put_request(ask("c", exclusive=True))
    assert [share.node for share in made.decide(NOW).grants["b"].node_allocations] == ["n0"]


def test_gpu_shares_use_already_shared_gpus_first() -> None:
    """Up to so many parts of one GPU; other parts and whole requests go elsewhere."""
    there = nodes([SMALL], [BIG])
    half = [ask(name, share=2, requirement=WANTS_BIG if name == "a" else GpuRequirement()) for name in "abc"]
    decision = build_scheduler(there, *half, ask("d", share=4), ask("e")).decide(NOW)
    assert [granted_gpus(decision, name) for name in "abc"] == [["n1-0"], ["n1-0"], ["n0-0"]]
    assert set(decision.grants) == {"a", "b", "c"}


def test_unavailable_nodes_and_gpus_are_not_granted() -> None:
    """What is down or broken is not given, is named, and is not waited for at others' cost."""
    down: list[NodeCapacity] = [node("n0", BIG, takes_work=False, unavailable_reason="does not answer")]
    made = build_scheduler(down, ask("a"), ask("b", gpus_per_node=0))
    assert made.decide(NOW).grants == {}
    assert (
        made.explain_pending("a", NOW).text == "1 × any GPU on one node: currently not available: n0 (does not answer)"
    )
    assert made.explain_pending("b", NOW).text == "no node can be reached"
    broken = [with_unavailable_gpu(node("n0", BIG, BIG), "n0-0", "in use outside gpuhub: 2 processes, 5.1 GiB")]
    assert granted_gpus(build_scheduler(broken, ask("a")).decide(NOW), "a") == ["n0-1"]
    passed = build_scheduler(broken, ask("a", gpus_per_node=2), ask("b"))
    assert set(passed.decide(NOW).grants) == {"b"}


def test_candidates_include_all_usable_gpus() -> None:
    """Free or held, on nodes that have enough of them and are not left out."""
    there = nodes([BIG, BIG], [SMALL], [MIDDLE, SMALL])
    made = build_scheduler(there, hold(ask("x"), slot(there, "n0-0")))
    assert made.find_candidates(ask("a", gpus_per_node=2)) == {"n0-0", "n0-1", "n2-0", "n2-1"}
    assert made.find_candidates(ask("a", exclude=frozenset({"n0"}), requirement=WANTS_BIG)) == frozenset()
    assert made.find_candidates(ask("a", spread=4, time_limit_s=HOUR)) == {s.uuid for n in there for s in n.slots}
