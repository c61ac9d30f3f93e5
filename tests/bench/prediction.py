"""Predicted and measured steps of a training on the network of a practice closet, with links of several speeds.

Three nodes are network namespaces of this machine, without containers. Each rank is a CPU process with gloo that sleeps
instead of computing (a GPU does not use the CPU either) and sends real gradients over the shaped links. Needs root.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_launch.prediction import bench_main, figures, report, step_profiler
from gpu_launch.training.comm_modes import LOCAL_PERIOD, PERIODS, VARIABLE, CommMode
from gpuhub_closet import network
from gpuhub_closet.topology import ClosetPlan, NodeLink, build_nodes, build_subnet
from tests.support.launch import profiled_script
from tests.support.launch.launched_ranks import run_launched
from tests.support.launch.step_times import read_step_time, sum_parts

_INSTANCE = "ghstep"
#: Links so slow, and a computation so long, that other work on this machine changes little.
_RATES_MBIT = (100, 400)
_WIDTH, _SECONDS = 1000, 1.0
#: Steps that are not counted, those that are, and the exact ones before `powersgd` and `local`.
_SKIPPED, _COUNTED, _EXACT = 2, LOCAL_PERIOD, 4
_KEY = "bench"


@dataclass(frozen=True)
class _Case:
    """One training: predicted and measured seconds of a step."""

    rate_mbit: int
    ranks: int
    mode: CommMode
    predicted_s: float
    measured_s: float

    @property
    def error_percent(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1) * 100


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `prediction`; every case is a line on stderr."""
    cases = [case for rate in _RATES_MBIT for case in _measure_rate(rate)]
    errors = [case.error_percent for case in cases]
    yield "closet.prediction_error_percent", statistics.median(errors), "%"
    yield "closet.prediction_worst_error_percent", max(errors), "%"


def _measure_rate(rate_mbit: int) -> Iterator[_Case]:
    with _closet(rate_mbit) as plan, tempfile.TemporaryDirectory() as name:
        home = Path(name)
        count = len(plan.nodes)
        _run(plan, ["-m", bench_main.__name__], count, {"HOME": name})
        _level_speeds(home)
        _train(plan, home, 1, 1000, {step_profiler.VARIABLE: _KEY})
        kept = json.loads(figures.get_prediction_path(home, _KEY).read_text(encoding="utf-8"))
        for ranks in range(2, count + 1):
            for mode in CommMode:
                (step,) = (step for step in kept["steps"] if len(step["cards"]) == ranks and step["mode"] == mode)
                case = _Case(rate_mbit, ranks, mode, sum_parts(step), _time_step(plan, home, ranks, mode))
                print(
                    f"{rate_mbit} Mbit/s, {ranks} ranks, {mode}: predicted {case.predicted_s * 1000:.0f} ms, "
                    f"measured {case.measured_s * 1000:.0f} ms, error {case.error_percent:.1f} %",
                    file=sys.stderr,
                    flush=True,
                )
                yield case


def _level_speeds(home: Path) -> None:
    """Give all cards of the bench the same speed: ranks that sleep have it, and the CPU's depends on other work."""
    bench = figures.read_bench(home)
    cards = tuple(replace(card, flops=1e9) for card in bench.cards)
    figures.write_json(figures.get_bench_path(home), replace(bench, cards=cards))
    print(report.format_bench(bench), file=sys.stderr)


def _time_step(plan: ClosetPlan, home: Path, ranks: int, mode: CommMode) -> float:
    """Return the seconds of a step."""
    skipped = _EXACT + LOCAL_PERIOD if mode in (CommMode.POWERSGD, CommMode.LOCAL) else _SKIPPED
    _train(plan, home, ranks, skipped + PERIODS.get(mode, _COUNTED), {VARIABLE: mode})
    return read_step_time(home / "steps.json", mode, skipped)


def _train(plan: ClosetPlan, home: Path, ranks: int, steps: int, environ: dict[str, str]) -> None:
    command = ["-m", profiled_script.__name__, str(home), str(steps), str(_WIDTH), str(_SECONDS), str(_EXACT)]
    _run(plan, command, ranks, environ | {"HOME": str(home)})


def _run(plan: ClosetPlan, command: list[str], ranks: int, environ: dict[str, str]) -> None:
    """Run a command in the first nodes, one rank in each."""
    outputs = run_launched(
        command,
        ranks,
        environ,
        address=str(plan.nodes[0].address),
        interface="eth0",
        prefixes=[("ip", "netns", "exec", plan.netns_name(node)) for node in plan.nodes],
    )
    for output in outputs:
        assert output.code == 0, output.stdout + output.stderr


@contextmanager
def _closet(rate_mbit: int) -> Iterator[ClosetPlan]:
    """Make the network of a practice closet, without its daemons."""
    subnet = build_subnet(_INSTANCE)
    nodes = build_nodes(subnet, dict.fromkeys(("rig1", "rig2", "rig3"), ()))
    plan = ClosetPlan(instance=_INSTANCE, subnet=subnet, nodes=nodes, link=NodeLink(rate_mbit=rate_mbit))
    try:
        network.ensure_network(plan)
        yield plan
    finally:
        network.remove_network(plan)
