"""`python -m tests.bench all|GROUP`: run benchmarks and print `NAME VALUE UNIT` lines."""

from __future__ import annotations

import sys

from tests.bench import broker, launch, mixed, network, prediction, setup, slurm, spawn, storage

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
    for name, measure in GROUPS.items():
        if asked in ("all", name):
            for figure, value, unit in measure():
                print(f"{figure} {value:.4g} {unit}", flush=True)


# Benchmarks that start other processes import this module again.
if __name__ == "__main__":
    main()
