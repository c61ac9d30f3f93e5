"""Where a request goes: one node, or nodes that go well together. Pure but for what `Fits` remembers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from gpuhub.engines.base import NodeSupply, Request, Share
from gpuhub.engines.fits import Bans, Fits, Option
from gpuhub.engines.placement import WHOLE, Choice

#: What the policy says of a node: rank, name, the node, and the GPUs chosen there.
Ranked = tuple[tuple[float, ...], str, Option, Choice]


def place(request: Request, ways: Sequence[Fits], bans: Bans | None, most: int | None) -> tuple[Share, ...] | None:
    """Where the request goes now; None when it does not fit. `most` GPUs may be granted at most; None for no limit."""
    least, wanted = request.least_nodes, request.nodes
    if most is not None and request.gpus_per_node and request.spread is None:
        wanted = min(wanted, most // request.gpus_per_node)
    needed = needed_units(request)
    open_ways = [(way, count) for way in ways if (count := way.count(bans)) >= needed]
    if not open_ways or wanted < least:
        return None
    if request.spread is not None:
        return _spread(request.spread, open_ways[0][0], bans)
    way, count = max(open_ways, key=lambda pair: min(pair[1], wanted))
    nodes = min(count, wanted)
    if nodes == 1 and (request.gpus_per_node < 2 or not way.is_mixed):
        best = way.best(bans)
        return (_share(*best),) if best else None
    return _gang(nodes, request.gpus_per_node, way, bans)


def needed_units(request: Request) -> int:
    """What must be open to serve a request, as `Fits.count` counts: GPUs if they may be spread, else nodes."""
    return request.spread if request.spread is not None else request.least_nodes


def note(shares: Sequence[Share]) -> str | None:
    """What a person should know about the cards; None when there is nothing to say."""
    models = Counter(slot.card.model for share in shares for slot in share.slots)
    if len(models) < 2:
        return None
    return f"mixed cards: {describe_models(models)}; the slowest sets the pace"


def describe_models(models: Counter[str]) -> str:
    """For a person: `1 × RTX 5090, 2 × RTX 5070`."""
    return ", ".join(f"{count} × {model}" for model, count in models.items())


def _share(option: Option, choice: Choice) -> Share:
    return Share(node=option.node.supply.name, slots=option.node.picked(option.view[1], choice.gpus))


def _gang(nodes: int, gpus: int, way: Fits, bans: Bans | None) -> tuple[Share, ...] | None:
    """Equal cards if possible, then one switch, then one rack; of such nodes those that suit best."""
    options = way.options(bans)
    for card in _cards(options, way, gpus):
        ranked = _ranked(options, way, gpus, card)
        if len(ranked) >= nodes:
            near = _near(ranked, lambda group: len(group) >= nodes)
            return tuple(_share(option, choice) for _, _, option, choice in sorted(near, key=_rating)[:nodes])
    return None


def _rating(ranked: Ranked) -> tuple[tuple[float, ...], str]:
    return ranked[0], ranked[1]


def _ranked(options: Sequence[Option], way: Fits, gpus: int, card: int) -> list[Ranked]:
    found = []
    for option in options:
        choice = way.choose(option, gpus, card) if card < 0 or card in option.view[0].cards else None
        if choice is not None:
            found.append((choice.rank, option.node.supply.name, option, choice))
    return found


def _cards(options: Sequence[Option], way: Fits, gpus: int) -> Iterator[int]:
    """Cards to try alone, best liked first; -1 stands for mixed cards (or none)."""
    if gpus:
        states = {option.view[0] for option in options}
        there = frozenset[int]().union(*(state.cards for state in states))
        yield from (number for number in way.liked_numbers if number in there)
    yield -1


def _near(found: list[Ranked], suffices: Callable[[list[Ranked]], bool]) -> list[Ranked]:
    """Those on one switch, or else in one rack, if they suffice: the smallest such group, so that large ones stay."""
    if len(found) < 2:
        return found
    for label in (_switch, _rack):
        groups: defaultdict[str, list[Ranked]] = defaultdict(list)
        for each in found:
            where = label(each[2].node.supply)
            if where is not None:
                groups[where].append(each)
        enough = [(len(group), where) for where, group in groups.items() if suffices(group)]
        if enough:
            return groups[min(enough)[1]]
    return found


def _switch(node: NodeSupply) -> str | None:
    return node.switch


def _rack(node: NodeSupply) -> str | None:
    return node.rack


def _spread(gpus: int, way: Fits, bans: Bans | None) -> tuple[Share, ...] | None:
    """Equal cards if possible, near each other, on as few nodes as possible."""
    options = way.options(bans)
    for card in _cards(options, way, gpus):
        ranked = _ranked(options, way, 1, card)
        rooms = {name: _room(option, way, card) for _, name, option, _ in ranked}

        def suffices(group: Sequence[Ranked], rooms: dict[str, int] = rooms) -> bool:
            return sum(rooms[each[1]] for each in group) >= gpus

        if suffices(ranked):
            return _fewest(gpus, _near(ranked, suffices), rooms, way, card)
    return None


def _room(option: Option, way: Fits, card: int) -> int:
    if card < 0:
        return option.room
    state = option.view[0]
    return sum(no == card and milli == WHOLE for no, milli in zip(state.cards, state.free, strict=True))


def _fewest(
    gpus: int, found: Sequence[Ranked], rooms: dict[str, int], way: Fits, card: int
) -> tuple[Share, ...] | None:
    """The nodes with most room first; the last part goes where it leaves least."""
    left = sorted(found, key=lambda each: (-rooms[each[1]], *_rating(each)))
    shares: list[Share] = []
    while gpus:
        fitting = [each for each in left if rooms[each[1]] >= gpus]
        best = min(fitting, key=lambda each: (rooms[each[1]], *_rating(each))) if fitting else left[0]
        left.remove(best)
        taken = min(gpus, rooms[best[1]])
        choice = way.choose(best[2], taken, card)
        if choice is None:
            return None
        shares.append(_share(best[2], choice))
        gpus -= taken
    return tuple(sorted(shares, key=_node))


def _node(share: Share) -> tuple[int, str]:
    return -len(share.slots), share.node
