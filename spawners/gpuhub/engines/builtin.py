"""The embedded engine: all or nothing, best fit, fair share, and backfill that delays nobody who is protected.

Requests are served in the order of `order.py`. What does not fit is planned (`backfill.py`), and later requests leave
alone what the plans count on unless they end in time. Everything is kept in memory and up to date change by change, so
that a decision looks at what changed, not at the whole cluster:

- requests that ask for the same form one group, and stand or fall together;
- `fits.py` knows for each kind of demand the nodes it fits on, `times.py` those it will fit on and when;
- a decision goes down the line of groups (`walk.py`) and leaves a group at its first request that does not fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from gpuhub.engines import explain, feasible, forecast
from gpuhub.engines.base import (
    Decision,
    Holding,
    NodeSupply,
    Request,
    Reservation,
    Rights,
    Rules,
    Spent,
    Usage,
    Why,
    World,
)
from gpuhub.engines.candidates import candidate_slots
from gpuhub.engines.mirror import Mirror
from gpuhub.engines.order import Entry, entry_of
from gpuhub.engines.placement import MakePolicy
from gpuhub.engines.policies import make_policy as least_waste
from gpuhub.engines.walk import Walk
from gpuhub.gpus import Card


class BuiltinEngine:
    """An `Engine`."""

    def __init__(self, rules: Rules | None = None, make_policy: MakePolicy = least_waste) -> None:
        self._rules = rules or Rules()
        self._make_policy = make_policy
        self._mirror = Mirror(World(), self._rules, make_policy)

    def rebuild(self, world: World) -> None:
        """Forget everything and begin from this."""
        self._mirror = Mirror(world, self._rules, self._make_policy)

    def put_node(self, node: NodeSupply) -> None:
        """Add or replace a node."""
        self._mirror.stock.put_node(node)

    def put_request(self, request: Request) -> None:
        """Add or replace a waiting request."""
        self._mirror.put_request(request)

    def put_holding(self, holding: Holding) -> None:
        """Add or replace what is held; a waiting request of the same id no longer waits."""
        self._mirror.drop_request(holding.request.id)
        self._mirror.put_holding(holding)

    def drop(self, request_id: str, now: float) -> None:
        """A request or a holding is over; what was held is free from now on, its time is spent until now."""
        self._mirror.drop_request(request_id)
        self._mirror.drop_holding(request_id, now)

    def put_rights(self, owner: str, rights: Rights) -> None:
        """Add or replace an owner's limits and weight."""
        self._mirror.rights[owner] = rights

    def put_spent(self, spent: Spent) -> None:
        """Add GPU-time that `drop` does not see: of parts given back early, or until a holding was quarantined."""
        self._mirror.accounts.spend(spent)

    def put_reservations(self, reservations: Iterable[Reservation]) -> None:
        """Replace all reservations."""
        self._mirror.put_reservations(reservations)

    def decide(self, now: float) -> Decision:
        """What to grant and what to preempt now."""
        self._mirror.learn()
        walk = Walk(self._mirror, now)
        walk.run()
        for request_id in walk.grants:
            self._mirror.drop_request(request_id)
            self._mirror.accounts.begin(self._mirror.stock.holdings[request_id])
        return walk.decision()

    def order(self, now: float) -> list[str]:
        """All waiting requests in the order in which they are served."""
        penalties = self._mirror.penalties(now)
        places = []
        for owner, entries in self._mirror.entries.items():
            penalty = penalties[owner]
            places += [(made_at + penalty, seq, request_id) for made_at, seq, request_id in entries]
        return [request_id for _, _, request_id in sorted(places)]

    def why(self, request_id: str, now: float, *, in_full: bool = False) -> Why:
        """Why a request waits; KeyError when it does not wait. `in_full` looks for obstacles as well."""
        mirror = self._mirror
        request = mirror.requests[request_id]
        position = self._position(request, now)
        walk = Walk(mirror, now)
        walk.run()
        text = explain.waits_for(request, mirror.group_of[request_id], walk, mirror)
        walk.undo()
        return Why(
            position=position,
            text=text,
            expected_start=forecast.expected_start(mirror, walk, request_id, position),
            obstacles=forecast.obstacles(mirror, request, now, position) if in_full else (),
        )

    def starts_now(self, request: Request, now: float) -> bool:
        """Whether this request, made now, would be granted at once."""
        known = self._mirror.requests.get(request.id)
        self._mirror.put_request(request)
        walk = Walk(self._mirror, now)
        walk.run()
        walk.undo()
        if known is None:
            self._mirror.drop_request(request.id)
        else:
            self._mirror.put_request(known)
        return request.id in walk.grants

    def candidates(self, request: Request) -> frozenset[str]:
        """Every GPU that the request could ever use, free or not."""
        return frozenset[str]().union(*candidate_slots(request, self._mirror.stock).values())

    def infeasible(self, request: Request, cards: Mapping[str, Sequence[Card] | None]) -> str | None:
        """Why the request can never be granted, for a person; None when it can."""
        nodes = {name: node.supply for name, node in self._mirror.stock.nodes.items()}
        return feasible.infeasible(request, cards, nodes)

    def usage(self, now: float) -> Mapping[str, Usage]:
        """What each known owner has and had."""
        accounts = self._mirror.accounts
        penalties, decayed = self._mirror.penalties(now), accounts.decayed(now)
        return {
            owner: Usage(
                gpus=accounts.held(owner),
                gpu_hours_week=accounts.hours(owner, now),
                decayed_gpu_hours=decayed(owner) / 3600.0,
                penalty_s=penalties.get(owner, 0.0),
            )
            for owner in sorted({*accounts.owners, *penalties})
        }

    def _position(self, request: Request, now: float) -> int:
        penalties = self._mirror.penalties(now)
        made_at, seq, request_id = entry_of(request, self._rules)
        at = made_at + penalties[request.owner]
        before = 0
        for owner, entries in self._mirror.entries.items():
            # Never by a difference of sums that `order` does not make.
            before += bisect_left(entries, (at, seq, request_id), key=_put_back(penalties[owner]))
        return before + 1


def _put_back(penalty: float) -> Callable[[Entry], Entry]:
    return lambda entry: (entry[0] + penalty, entry[1], entry[2])
