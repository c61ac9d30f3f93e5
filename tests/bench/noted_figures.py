"""The figures noted in docs/benchmarks.md, and which new ones are worse by more than such runs differ anyway."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
#: How much worse a figure may be than the noted one without a change of the code: ratios are measured in pairs in one
#: run; other figures differ with the machine and its hour.
RATIO_NOISE, NOISE = 0.15, 0.4
#: Units and words in names of figures that are better when they are larger.
_RATES = frozenset({"1/s", "MB/s", "lines/s", "tokens/s", "index"})
_LARGER_IS_BETTER = (
    "utilisation",
    "grants_over",
    "mixed_over",
    "mixed_plain_over",
    "fanout_over",
    "overlay_over",
    "speedup",
)

_ROW = re.compile(r"\| (?P<names>`[^|]+) \| (?P<values>[^|]+) \| (?P<unit>[^|]+) \|")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def read_noted(text: str) -> Iterator[tuple[str, float]]:
    """Yield the figures of the page's tables, by name.

    A row has one figure, or several with values in the same order: "`broker.api_p50_ms`, `broker.api_p99_ms` | 336 /
    958"; a name that begins with an underscore replaces the end of the first.
    """
    for row in _ROW.finditer(text):
        names = re.findall(r"`([^`]+)`", row["names"])
        values = [_NUMBER.search(re.sub(r"[ ,](?=\d{3})", "", part)) for part in row["values"].split("/")]
        if len(names) != len(values):
            continue
        for name, value in zip(names, values, strict=True):
            full = re.sub(r"_[^_]*$", name, names[0]) if name.startswith("_") else name
            if value is not None and "…" not in full:
                yield full, float(value[0])


def find_worse(figures: Mapping[str, tuple[float, str]], noted: Mapping[str, float]) -> Iterator[str]:
    """Yield a sentence for each figure, a value and its unit, that is worse than the noted one by more than noise."""
    for name, (value, unit) in figures.items():
        before = noted.get(name)
        if before is None:
            continue
        is_larger_better = unit in _RATES or any(word in name for word in _LARGER_IS_BETTER)
        noise = RATIO_NOISE if unit == "ratio" else NOISE
        limit = before / (1 + noise) if is_larger_better else before * (1 + noise)
        if (value < limit) if is_larger_better else (value > limit):
            yield (
                f"worse than noted: {name} is {value:.4g} {unit}, docs/benchmarks.md has {before:.4g};"
                f" up to {limit:.4g} is noise"
            )
