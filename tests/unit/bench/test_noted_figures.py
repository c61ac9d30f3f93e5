"""Comparison of benchmarks with the figures of docs/benchmarks.md."""

from __future__ import annotations

import re

import pytest

from tests.bench.noted_figures import PAGE, find_worse, read_noted

TABLE = """
| figure | value | unit | what it is |
|---|---|---|---|
| `launch.interrupt_s` | **0.10** | s | from SIGINT |
| `launch.lines_per_s` | 821 000 | lines/s | lines |
| `broker.engine_grants_per_s_8000gpus` | 7,400 | 1/s | fills the cluster |
| `broker.wait_s_ours`, `_fifo` | 16,110 / 412,400 | s | mean wait |
| `slurm.submit_over_sbatch` | 1.78 (1.44) | ratio | paired |
| `gpu_….serve_same_tokens` | 1 | ratio | in all cases |
"""
NOTED = {
    "launch.interrupt_s": 0.1,
    "launch.lines_per_s": 821_000.0,
    "broker.engine_grants_per_s_8000gpus": 7400.0,
    "broker.wait_s_ours": 16_110.0,
    "broker.wait_s_fifo": 412_400.0,
    "slurm.submit_over_sbatch": 1.78,
}


def test_figures_are_read_from_tables() -> None:
    """Separators of thousands, several figures in a row, and emphasis are understood; families of names are left out."""
    assert dict(read_noted(TABLE)) == NOTED


def test_every_figure_of_the_page_is_read() -> None:
    """Nothing that a benchmark prints is without comparison because its row is written unlike the others."""
    noted = dict(read_noted(PAGE.read_text()))
    rows = re.findall(r"^\| (`[^|]+) \|", PAGE.read_text(), re.MULTILINE)
    names = {name for row in rows if "…" not in row for name in re.findall(r"`([a-z_0-9]+\.[^`]+)`", row)}
    assert names <= noted.keys()
    assert noted["broker.api_p99_ms"] > noted["broker.api_p50_ms"] > 1


@pytest.mark.parametrize(
    ("name", "value", "unit", "is_worse"),
    [
        ("launch.interrupt_s", 0.13, "s", False),
        ("launch.interrupt_s", 0.15, "s", True),
        ("launch.lines_per_s", 1_900_000.0, "lines/s", False),
        ("launch.lines_per_s", 500_000.0, "lines/s", True),
        ("slurm.submit_over_sbatch", 2.0, "ratio", False),
        ("slurm.submit_over_sbatch", 2.1, "ratio", True),
        ("not.noted", 99.0, "s", False),
    ],
)
def test_only_more_than_noise_is_worse(name: str, value: float, unit: str, is_worse: bool) -> None:
    """Rates are worse when they are smaller, other figures when they are larger."""
    found = list(find_worse({name: (value, unit)}, NOTED))
    assert [sentence.split()[3] for sentence in found] == ([name] if is_worse else [])
