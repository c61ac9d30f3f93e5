"""A task file's accelerators: which GPU models, and how many a node. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_launch.errors import UsageError
from gpu_launch.wire import Cluster, Gpu

_MOST = 64
#: What makers add to a model's name, and task files leave out: `H100 80GB HBM3`, `A100-SXM4-80GB`.
_ADDED = re.compile(r"\d+gb|sxm\d*|pcie|hbm\d*e?|nvl|vram")
_MEMORY = re.compile(r"(\d+)gb")
#: A card sold as 80 GB reports some 2 % less.
_ENOUGH = 0.95


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """So many GPUs a node, of any of these models, best liked first; no model for any."""

    models: tuple[str, ...] = ()
    count: int = 1


def parse(value: Any) -> Accelerators:
    """`A100:8`, `{A100: 8}`, or several of them of which any will do: a list, or `{'A100:8', 'H100:8'}`.

    Raises UsageError for parts of GPUs, other numbers for other models, and what is none of these.
    """
    pairs = [_pair(item) for item in _items(value)]
    if not pairs:
        raise UsageError("names no GPU; A100:8 would be one.")
    counts = sorted({count for _, count in pairs})
    if len(counts) > 1:
        raise UsageError(
            f"asks for {counts[0]} of one model or {counts[-1]} of another a node; give all of them the same number."
        )
    return Accelerators(models=tuple(dict.fromkeys(name for name, _ in pairs)), count=counts[0])


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    """Names, each with its number as written; None for none."""
    if isinstance(value, str):
        return [_split(value)]
    if isinstance(value, Mapping):
        # YAML reads {A100:1, H100:1} as keys without values.
        return [_split(str(key)) if number is None else (str(key), number) for key, number in value.items()]
    if isinstance(value, list | set | tuple) and all(isinstance(item, str) for item in value):
        return [_split(item) for item in value]
    raise UsageError("is neither NAME:NUMBER nor a list or mapping of them.")


def _split(text: str) -> tuple[str, str | None]:
    name, has_number, number = text.partition(":")
    return name.strip(), number.strip() if has_number else None


def _pair(item: tuple[str, Any]) -> tuple[str, int]:
    name, number = item
    if not name:
        raise UsageError("has a number without a model; A100:8 would be right.")
    if number is None:
        return name, 1
    try:
        count = float(number)
    except (TypeError, ValueError):
        raise UsageError(f"asks for {name}:{number}, and {number} is no number.") from None
    if count != int(count):
        raise UsageError(f"asks for {name}:{number}: parts of a GPU are for notebooks here; a task gets whole ones.")
    if not 1 <= count <= _MOST:
        raise UsageError(f"asks for {name}:{number}; 1 to {_MOST} GPUs a node can be asked for.")
    return name, int(count)


def find_models(accelerators: Accelerators, cluster: Cluster) -> tuple[str, ...]:
    """The cluster's own names for the models. Raises UsageError where it has none of them."""
    cards = [card for node in cluster.nodes for card in node.gpus]
    found = dict.fromkeys(
        card.model for name in accelerators.models for card in cards if _is_named(card, _tokens(name))
    )
    if accelerators.models and not found:
        raise UsageError(
            f"asks for {' or '.join(accelerators.models)}, and the cluster has "
            f"{', '.join(cluster.models()) or 'no GPUs'}. --model takes one of these instead."
        )
    return tuple(found)


def _is_named(card: Gpu, wanted: frozenset[str]) -> bool:
    """Whether a task file's name is this card's, as far as it says: H100 is an `H100 80GB HBM3`, not an `H100 Ti`."""
    has = _tokens(card.model)
    lacking = {token for token in wanted - has if not _has_memory(card, token)}
    return not lacking and all(_ADDED.fullmatch(token) for token in has - wanted)


def _has_memory(card: Gpu, token: str) -> bool:
    match = _MEMORY.fullmatch(token)
    return match is not None and card.memory_mib >= int(match[1]) * 1024 * _ENOUGH


def _tokens(name: str) -> frozenset[str]:
    """`RTX5090`, `RTX-5090` and `RTX 5090` are one; so are `RTX5070Ti` and `RTX 5070 Ti`."""
    apart = re.sub(r"(?<=\d)(?=(ti|super|ada)\b)|(?<=rtx)(?=\d)|(?<=gtx)(?=\d)", " ", name.lower())
    return frozenset(re.findall(r"[a-z0-9.]+", apart))
