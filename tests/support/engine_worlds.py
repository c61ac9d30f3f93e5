"""Small worlds for tests of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuhub.engines.base import Decision, Holding, NodeSupply, Request, Rules, Share, Slot, World
from gpuhub.engines.builtin import BuiltinEngine
from gpuhub.gpus import Card, Requirement

BIG, MIDDLE, SMALL = (
    Card(model="RTX 5090", memory_mib=32607, capability=(12, 0)),
    Card(model="RTX 5070", memory_mib=12227, capability=(12, 0)),
    Card(model="RTX 5060", memory_mib=8151, capability=(8, 9)),
)
WANTS_BIG = Requirement(models=("RTX 5090",))
#: When tests begin.
NOW = 1_000_000.0
HOUR = 3600.0


def node(name: str, *cards: Card, **parts: Any) -> NodeSupply:
    """A node with GPUs `name-0`, `name-1`, …"""
    slots = tuple(Slot(uuid=f"{name}-{i}", node=name, index=i, card=card) for i, card in enumerate(cards))
    return NodeSupply(name=name, slots=slots, **parts)


def nodes(*cards: list[Card]) -> list[NodeSupply]:
    """`nodes([BIG], [SMALL, SMALL])`: n0 with n0-0, n1 with n1-0 and n1-1."""
    return [node(f"n{number}", *of_node) for number, of_node in enumerate(cards)]


def ask(name: str, **parts: Any) -> Request:
    """A request of an owner of the same name, made in alphabetical order unless said."""
    made = {"id": name, "owner": name, "created_at": NOW - 1000 + ord(name[0])}
    if "nodes" in parts:
        made["least_nodes"] = parts["nodes"]
    return Request(**{**made, **parts})


def hold(request: Request, *slots: Slot, on: tuple[str, ...] = (), **parts: Any) -> Holding:
    """A holding of these GPUs, or of nodes without GPUs."""
    names = dict.fromkeys([*(slot.node for slot in slots), *on])
    shares = tuple(Share(node=name, slots=tuple(slot for slot in slots if slot.node == name)) for name in names)
    ends_at = None if request.time_limit_s is None else NOW - HOUR + request.time_limit_s
    return Holding(**{"request": request, "shares": shares, "granted_at": NOW - HOUR, "ends_at": ends_at, **parts})


def engine(
    there: list[NodeSupply], *known: Request | Holding, rules: Rules | None = None, **parts: Any
) -> BuiltinEngine:
    """An engine that knows these nodes, requests and holdings."""
    made = BuiltinEngine(rules or Rules())
    made.rebuild(
        World(
            nodes=there,
            requests=[each for each in known if isinstance(each, Request)],
            holdings=[each for each in known if isinstance(each, Holding)],
            **parts,
        )
    )
    return made


def got(decision: Decision, name: str) -> list[str]:
    """The GPUs that a request was granted."""
    return [slot.uuid for share in decision.grants[name].shares for slot in share.slots]


def slot(there: list[NodeSupply], uuid: str) -> Slot:
    """A GPU by name."""
    return next(each for supply in there for each in supply.slots if each.uuid == uuid)


def without(supply: NodeSupply, uuid: str, trouble: str) -> NodeSupply:
    """The node with one GPU not available."""
    slots = tuple(replace(s, available=False, trouble=trouble) if s.uuid == uuid else s for s in supply.slots)
    return replace(supply, slots=slots)
