"""GPUs of a task file: models and their number, and the cluster's own names of the models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_launch.broker.models import Cluster, Gpu
from gpu_launch.errors import UsageError

_MAX_GPUS = 64
#: Parts of model names that task files leave out: `H100 80GB HBM3`, `A100-SXM4-80GB`.
_SUFFIX = re.compile(r"\d+gb|sxm\d*|pcie|hbm\d*e?|nvl|vram")
_MEMORY = re.compile(r"(\d+)gb")
#: Part of the named memory that a GPU must report: one sold as 80 GB reports some 2 % less.
_MEMORY_TOLERANCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """Models in order of preference, empty for any, and the number of GPUs on each node."""

    models: tuple[str, ...] = ()
    count: int = 1

    def format(self) -> str:
        """Return `A100:8`, or `A100 or H100:8`."""
        return f"{' or '.join(self.models)}:{self.count}"


def parse_accelerators(value: Any) -> tuple[Accelerators, ...]:
    """Parse `A100:8`, `{A100: 8}`, or several alternatives as a list or set: `{'A100:8', 'H100:8'}`.

    Neighbouring models with the same number are one of the returned alternatives.

    Raises:
        UsageError: The value requests parts of GPUs, or has another format.
    """
    pairs = [_parse_pair(item) for item in _list_items(value)]
    if not pairs:
        raise UsageError("names no GPU; A100:8 would be one.")
    return tuple(
        Accelerators(models=tuple(dict.fromkeys(name for name, _ in group)), count=count)
        for count, group in itertools.groupby(pairs, key=lambda pair: pair[1])
    )


def _list_items(value: Any) -> Iterable[tuple[str, Any]]:
    """Return names with their numbers as written; None without a number."""
    if isinstance(value, str):
        return [_split_item(value)]
    if isinstance(value, Mapping):
        # YAML reads {A100:1, H100:1} as keys without values.
        return [_split_item(str(key)) if number is None else (str(key), number) for key, number in value.items()]
    if isinstance(value, list | set | tuple) and all(isinstance(item, str) for item in value):
        return [_split_item(item) for item in value]
    raise UsageError("is neither NAME:NUMBER nor a list or mapping of them.")


def _split_item(text: str) -> tuple[str, str | None]:
    name, has_number, number = text.partition(":")
    return name.strip(), number.strip() if has_number else None


def _parse_pair(item: tuple[str, Any]) -> tuple[str, int]:
    name, number = item
    if not name:
        raise UsageError("has a number without a model; A100:8 would be right.")
    if number is None:
        return name, 1
    try:
        count = float(number)
    except (TypeError, ValueError):
        raise UsageError(f"asks for {name}:{number}, and {number} is not a number.") from None
    if count != int(count):
        raise UsageError(f"asks for {name}:{number}: parts of a GPU are for notebooks here; a task gets whole ones.")
    if not 1 <= count <= _MAX_GPUS:
        raise UsageError(f"asks for {name}:{number}; 1 to {_MAX_GPUS} GPUs a node can be asked for.")
    return name, int(count)


def find_models(accelerators: Accelerators, cluster: Cluster) -> tuple[str, ...]:
    """Return the cluster's own names of the models.

    Raises:
        UsageError: The cluster has none of them.
    """
    gpus = [gpu for node in cluster.nodes for gpu in node.gpus]
    models = dict.fromkeys(
        gpu.model for name in accelerators.models for gpu in gpus if _matches_name(gpu, _tokenize(name))
    )
    if accelerators.models and not models:
        raise UsageError(
            f"asks for {' or '.join(accelerators.models)}, and the cluster has "
            f"{', '.join(cluster.list_models()) or 'no GPUs'}. --model takes one of these instead."
        )
    return tuple(models)


def _matches_name(gpu: Gpu, requested: frozenset[str]) -> bool:
    """Return whether a task file's name matches a GPU: H100 matches `H100 80GB HBM3`, not `H100 Ti`."""
    tokens = _tokenize(gpu.model)
    lacking = {token for token in requested - tokens if not _has_memory(gpu, token)}
    return not lacking and all(_SUFFIX.fullmatch(token) for token in tokens - requested)


def _has_memory(gpu: Gpu, token: str) -> bool:
    match = _MEMORY.fullmatch(token)
    return match is not None and gpu.memory_mib >= int(match[1]) * 1024 * _MEMORY_TOLERANCE


def _tokenize(name: str) -> frozenset[str]:
    """Split a name so that `RTX5090`, `RTX-5090` and `RTX 5090` are equal; so are `RTX5070Ti` and `RTX 5070 Ti`."""
    apart = re.sub(r"(?<=\d)(?=(ti|super|ada)\b)|(?<=rtx)(?=\d)|(?<=gtx)(?=\d)", " ", name.lower())
    return frozenset(re.findall(r"[a-z0-9.]+", apart))
