"""`python -m tests.bench all|GROUP`: run benchmarks, print `NAME VALUE UNIT` lines, and say on standard error which
figures are worse than those of docs/benchmarks.md.
"""

from __future__ import annotations

import sys

from tests.bench import broker, launch, mixed, network, noted_figures, prediction, setup, slurm, spawn, storage

GROUPS = {
    "setup": setup.measure,
    "spawn": spawn.measure,
    "spawn-trace": spawn.trace,
    "storm": spawn.measure_storm,
    "launch": launch.measure,
    "mixed": mixed.measure,
    "prediction": prediction.measure,
    "broker": broker.measure,
    "slurm": slurm.measure,
    "storage": storage.measure,
    "network": network.measure,
}


def main() -> None:
    """Run the given groups and print their figures; an unknown group is refused with the list of groups."""
    asked = sys.argv[1] if len(sys.argv) == 2 else "all"
    if asked != "all" and asked not in GROUPS:
        sys.exit(f"{asked!r} is no group of benchmarks: choose all, {', '.join(GROUPS)}")
    figures = {}
    for name, measure in GROUPS.items():
        if asked in ("all", name):
            for figure, value, unit in measure():
                print(f"{figure} {value:.4g} {unit}", flush=True)
                figures[figure] = value, unit
    for sentence in noted_figures.find_worse(figures, dict(noted_figures.read_noted(noted_figures.PAGE.read_text()))):
        print(sentence, file=sys.stderr)


# Benchmarks that start other processes import this module again.
if __name__ == "__main__":
    main()
