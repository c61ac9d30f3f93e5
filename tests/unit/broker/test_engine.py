"""The embedded engine: exact first come, first served; best fit; all or nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhub.engines.base import Decision, Request, Slot, Supply
from gpuhub.engines.builtin import candidates, decide, infeasible
from gpuhub.gpus import Card, Requirement

BIG, MIDDLE, SMALL = (
    Card(model="RTX 5090", memory_mib=32607),
    Card(model="RTX 5070", memory_mib=12227),
    Card(model="RTX 5060", memory_mib=8151),
)


def slots(*nodes: list[Card]) -> tuple[Slot, ...]:
    """`slots([BIG], [SMALL, SMALL])`: nodes n0, n1 with GPUs n0-0, n1-0, n1-1."""
    return tuple(
        Slot(uuid=f"n{n}-{i}", node=f"n{n}", index=i, card=card)
        for n, cards in enumerate(nodes)
        for i, card in enumerate(cards)
    )


def supply(*nodes: list[Card], held: dict[str, str] | None = None, max_gpus: int | None = None) -> Supply:
    """All nodes up and without notebooks."""
    names = {f"n{n}": 0 for n in range(len(nodes))}
    return Supply(slots=slots(*nodes), held=held or {}, notebooks=names, max_gpus=max_gpus)


def one(name: str, **parts: object) -> Request:
    return Request(**{"id": name, "owner": name, **parts})  # type: ignore[arg-type]


def granted(decision: Decision, name: str) -> list[str]:
    return [slot.uuid for share in decision.grants[name] for slot in share.slots]


def test_the_least_capable_card_that_satisfies_is_given() -> None:
    """Who asks for any GPU gets the smallest, and leaves the large one for who needs it."""
    there = supply([BIG], [MIDDLE], [SMALL])
    assert granted(decide([one("a")], there), "a") == ["n2-0"]
    at_least = Requirement(least_memory_mib=12 * 1024)
    assert granted(decide([one("a", requirement=at_least)], there), "a") == ["n1-0"]


def test_among_equal_cards_the_fuller_node_is_used() -> None:
    """A node that is partly used is filled before a whole one is broken."""
    there = supply([SMALL, SMALL], [SMALL, SMALL], held={"n1-0": "x"})
    assert granted(decide([one("a")], there), "a") == ["n1-1"]


def test_a_gang_gets_equal_cards_where_it_can() -> None:
    """Two nodes with the same card are taken rather than two with different ones, even where those are smaller."""
    there = supply([SMALL], [MIDDLE], [BIG], [BIG])
    assert granted(decide([one("a", nodes=2)], there), "a") == ["n2-0", "n3-0"]
    assert granted(decide([one("a", nodes=3)], there), "a") == ["n0-0", "n1-0", "n2-0"]


def test_a_gang_gets_all_or_nothing() -> None:
    """With one of three nodes held, a gang of three takes none of the other two."""
    decision = decide([one("a", nodes=3)], supply([BIG], [MIDDLE], [SMALL], held={"n0-0": "x"}))
    assert decision.grants == {}
    assert decision.waits["a"].claims == {"n0-0", "n1-0", "n2-0"}
    assert decision.waits["a"].text == "1 × any GPU on each of 3 nodes: held by x"


def test_a_later_request_takes_only_what_no_earlier_waiter_could_use() -> None:
    """Behind a waiter for the large card, the small one is free to give; behind a waiter for any card it is not."""
    large = Requirement(model="RTX 5090")
    there = supply([BIG], [SMALL], held={"n0-0": "x"})
    decision = decide([one("a", requirement=large), one("b")], there)
    assert granted(decision, "b") == ["n1-0"]
    blocked = decide([one("a", nodes=2), one("b")], there)
    assert blocked.grants == {}
    assert blocked.waits["b"].text == "1 × any GPU: held by x; asked for by others before"


def test_excluded_nodes_are_not_claimed() -> None:
    """A gang that leaves a node out neither uses nor reserves that node's GPU."""
    gang = one("a", nodes=2, exclude=frozenset({"n0"}))
    decision = decide([gang, one("b")], supply([BIG], [SMALL], [SMALL], held={"n1-0": "x"}))
    assert granted(decision, "b") == ["n0-0"]


def test_an_owner_at_the_limit_waits_and_delays_nobody() -> None:
    """Who holds as many GPUs as allowed waits, is told so, and others pass."""
    queue = [one("a", owner="ada"), one("b", owner="ben")]
    decision = decide(queue, supply([BIG], [SMALL], held={"n0-0": "ada"}, max_gpus=1))
    assert decision.waits["a"].text == "ada holds 1 of at most 1 GPUs and asks for 1 more"
    assert granted(decision, "b") == ["n1-0"]


def test_the_limit_counts_what_was_granted_just_now() -> None:
    """Two requests of one owner in one pass are not both granted beyond the limit."""
    queue = [one("a", owner="ada"), one("b", owner="ada")]
    decision = decide(queue, supply([BIG], [SMALL], max_gpus=1))
    assert (set(decision.grants), set(decision.waits)) == ({"a"}, {"b"})


def test_a_notebook_without_gpu_goes_where_fewest_are() -> None:
    """CPU-only notebooks spread over the nodes, also within one pass, and need no free GPU."""
    full = supply([BIG], [SMALL], held={"n0-0": "x", "n1-0": "y"})
    decision = decide([one(name, gpus_per_node=0) for name in "abc"], full)
    assert [decision.grants[name][0].node for name in "abc"] == ["n0", "n1", "n0"]


def test_nothing_goes_to_a_node_that_takes_no_work() -> None:
    """GPUs of a node that is not up are neither given nor given to others behind a waiter for them."""
    there = Supply(slots=slots([BIG]), held={}, notebooks={})
    assert decide([one("a")], there).grants == {}
    assert decide([one("a", gpus_per_node=0)], there).waits["a"].text == "no node can be reached at present"


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (one("a", nodes=4), "4 nodes were asked for and the cluster has 3: n0, n1, n2"),
        (
            one("a", nodes=3, exclude=frozenset({"n0"})),
            "3 nodes were asked for and the cluster has 2 besides n0: n1, n2",
        ),
        (one("a", requirement=Requirement(model="H200")), "1 × H200 on one node was asked for, which no of the nodes"),
        (one("a", gpus_per_node=3), "3 × any GPU on one node was asked for, which no of the nodes can give"),
        (one("a", nodes=2, gpus_per_node=2), "2 × any GPU on each of 2 nodes was asked for, which 1 of the nodes"),
        (one("a", exclude=frozenset({"zz"})), "no node 'zz' to leave out; there is: n0 with"),
    ],
)
def test_the_impossible_is_named_with_what_there_is(request_: Request, text: str) -> None:
    """What can never be granted is refused, whoever holds what now."""
    cards = {"n0": (BIG,), "n1": (SMALL, SMALL), "n2": (MIDDLE,)}
    assert (infeasible(request_, cards) or "").startswith(text)


def test_a_node_not_read_yet_may_have_anything() -> None:
    """Right after the first start nothing is called impossible that may be possible."""
    wants = one("a", requirement=Requirement(model="H200"))
    assert infeasible(wants, {"n0": (BIG,), "n1": None}) is None
    assert infeasible(wants, {"n0": (BIG,), "n1": ()}) is not None


cards = st.sampled_from([BIG, MIDDLE, SMALL])
clusters = st.lists(st.lists(cards, max_size=3), min_size=1, max_size=4)
requirements = st.sampled_from(
    [Requirement(), Requirement(model="RTX 5090"), Requirement(least_memory_mib=12 * 1024), Requirement(model="H1")]
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Request], Supply]:
    """A cluster with some GPUs held or broken, some nodes down, and a queue."""
    there = slots(*draw(clusters))
    broken = draw(st.sets(st.sampled_from(there))) if there else set()
    there = tuple(Slot(uuid=s.uuid, node=s.node, index=s.index, card=s.card, available=s not in broken) for s in there)
    held = {s.uuid: draw(st.sampled_from("xyz")) for s in there if draw(st.booleans())}
    nodes = sorted({s.node for s in there})
    up = {node: draw(st.integers(0, 3)) for node in nodes if draw(st.integers(0, 4))}
    queue = [
        Request(
            id=f"r{n}",
            owner=draw(st.sampled_from("xyz")),
            nodes=draw(st.integers(1, 3)),
            gpus_per_node=draw(st.integers(0, 2)),
            requirement=draw(requirements),
            exclude=draw(st.frozensets(st.sampled_from(["n0", "n1"]), max_size=1)),
        )
        for n in range(draw(st.integers(0, 8)))
    ]
    limit = draw(st.sampled_from([None, 1, 2, 4]))
    return queue, Supply(slots=there, held=held, notebooks=up, max_gpus=limit)


@given(situations())
def test_no_gpu_is_given_twice_and_gangs_are_whole(situation: tuple[list[Request], Supply]) -> None:
    """Every request is granted wholly or waits; no GPU goes to two, nor to one while held, broken or unreachable."""
    queue, there = situation
    decision = decide(queue, there)
    by_id = {request.id: request for request in queue}
    given_ = Counter(slot.uuid for shares in decision.grants.values() for share in shares for slot in share.slots)
    usable = {slot.uuid: slot for slot in there.slots if slot.available and slot.node in there.notebooks}
    assert set(decision.grants) | set(decision.waits) == set(by_id)
    assert not set(decision.grants) & set(decision.waits)
    assert all(count == 1 for count in given_.values())
    assert not set(given_) & set(there.held)
    assert set(given_) <= set(usable)
    for name, shares in decision.grants.items():
        wanted = by_id[name]
        assert len({share.node for share in shares}) == len(shares) == wanted.nodes
        assert not {share.node for share in shares} & wanted.exclude
        for share in shares:
            assert len(share.slots) == wanted.gpus_per_node
            assert all(slot.node == share.node and wanted.requirement.accepts(slot.card) for slot in share.slots)


@given(situations())
def test_no_earlier_waiter_is_ever_delayed(situation: tuple[list[Request], Supply]) -> None:
    """What comes later in the queue changes nothing for what stands before: no grant, no place and no claim."""
    queue, there = situation
    whole = decide(queue, there)
    for length in range(len(queue)):
        first = decide(queue[:length], there)
        assert first.grants == {name: whole.grants[name] for name in first.grants}
        assert first.waits == {name: whole.waits[name] for name in first.waits}


@given(situations())
def test_a_grant_takes_nothing_an_earlier_waiter_could_use(situation: tuple[list[Request], Supply]) -> None:
    """Even GPUs that an earlier waiter could use only later, when others end, are left to it."""
    queue, there = situation
    decision = decide(queue, there)
    holds = Counter(there.held.values())
    for place, request in enumerate(queue):
        if request.id not in decision.grants:
            continue
        got = {slot.uuid for share in decision.grants[request.id] for slot in share.slots}
        for earlier in queue[:place]:
            if earlier.id in decision.waits and decision.waits[earlier.id].claims:
                assert not got & candidates(earlier, there.slots)
    if there.max_gpus is not None:
        for request in queue:
            if request.id in decision.grants:
                holds[request.owner] += request.size
                assert not request.size or holds[request.owner] <= there.max_gpus


@given(situations())
def test_the_head_of_the_queue_is_served_whenever_it_fits(situation: tuple[list[Request], Supply]) -> None:
    """The first request waits only where its nodes, cards or its owner's limit leave no way."""
    queue, there = situation
    if not queue:
        return
    head = queue[0]
    decision = decide(queue, there)
    free = Counter(
        slot.node
        for slot in there.slots
        if slot.available
        and slot.uuid not in there.held
        and slot.node in there.notebooks
        and slot.node not in head.exclude
        and head.requirement.accepts(slot.card)
    )
    able = [n for n in there.notebooks if n not in head.exclude and free[n] >= head.gpus_per_node]
    mine = sum(owner == head.owner for owner in there.held.values())
    allowed = there.max_gpus is None or not head.size or mine + head.size <= there.max_gpus
    assert (head.id in decision.grants) == (len(able) >= head.nodes and allowed)
