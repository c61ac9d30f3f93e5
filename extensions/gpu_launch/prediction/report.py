"""A bench and a prediction as a person reads them: tables, advice, and a chart where matplotlib is installed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpu_launch.errors import UsageError
from gpu_launch.prediction import cost_model, figures
from gpu_launch.prediction.cost_model import StepPrediction
from gpu_launch.prediction.figures import Bench, Network, StepProfile
from gpu_launch.training.comm_modes import AUTO, MATHEMATICS, PERIODS, CommMode

#: More cards are advised if they train faster by at least this factor.
_PAYS = 1.1
#: Parts of a step are named if they take more than this share of it.
_NOTABLE = 0.1
_SLOWER = 1.25


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is kept of a prediction."""

    made_at: str
    profile: StepProfile
    steps: tuple[StepPrediction, ...]
    #: The mode that `--comm auto` takes, by number of ranks.
    modes: dict[int, CommMode]


def build_prediction(profile: StepProfile, bench: Bench) -> Prediction:
    """Return the prediction for all numbers of cards of the bench."""
    steps = tuple(cost_model.predict_all(profile, bench))
    numbers = range(1, len(bench.cards) + 1)
    modes = {number: mode for number in numbers if (mode := cost_model.choose_mode(steps, number)) is not None}
    return Prediction(made_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M}", profile=profile, steps=steps, modes=modes)


def publish(profile: StepProfile, bench: Bench, *, home: Path, key: str) -> None:
    """Keep the prediction of a script in the home, with a chart next to it, and print it."""
    prediction = build_prediction(profile, bench)
    path = figures.get_prediction_path(home, key)
    figures.write_json(path, prediction)
    sys.stdout.write(format_prediction(prediction, bench))
    if draw_chart(prediction, path.with_suffix(".png")):
        sys.stdout.write(f"Chart: {path.with_suffix('.png')}\n")
    sys.stdout.flush()


def resolve_auto(home: Path, key: str, ranks: int) -> CommMode:
    """Return the mode that `--comm auto` stands for.

    Raises:
        UsageError: there is no prediction of this script, or none for this number of ranks.
    """
    try:
        modes = json.loads(figures.get_prediction_path(home, key).read_text(encoding="utf-8"))["modes"]
    except FileNotFoundError:
        raise UsageError(
            f"--comm {AUTO} takes what the last prediction of this script found best, and there is none. Make one with "
            f"%gpu_launch --predict, or name one of {', '.join(CommMode)}."
        ) from None
    if str(ranks) not in modes:
        raise UsageError(
            f"--comm {AUTO}: the last prediction of this script is for {', '.join(modes) or 'no'} ranks, and this "
            f"launch has {ranks}. Measure that many with %gpu_bench, and predict again with %gpu_launch --predict."
        )
    return CommMode(modes[str(ranks)])


def describe_kept(home: Path, key: str, *, ranks: int, comm: str) -> str:
    """Return what the last prediction of a script says of a launch; empty where there is none of that size and mode."""
    try:
        kept = json.loads(figures.get_prediction_path(home, key).read_text(encoding="utf-8"))
        steps = [StepPrediction(**step) for step in kept["steps"]]
        singles = [step for step in steps if len(step.cards) == 1]
        mode = CommMode(comm or CommMode.EXACT)
        same = singles if ranks == 1 else [step for step in steps if len(step.cards) == ranks and step.mode == mode]
        best = max(same, key=lambda step: step.rate)
        speed = best.rate / singles[0].rate
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""
    cards = "one card" if ranks == 1 else f"{ranks} cards with --comm {mode}"
    compared = "" if ranks == 1 else f", {speed:.2f} times the samples of one card"
    return (
        f"Predicted on {kept['made_at']} UTC for {cards}: {best.step_s * 1000:.1f} ms for a step{compared}. "
        "--predict measures it again."
    )


def format_bench(bench: Bench) -> str:
    """Return the tables of a bench."""
    rows = [("rank", "node", "device", "TFLOP/s", "memory", "reads")]
    rows += [
        (
            str(rank),
            card.node,
            card.device,
            f"{card.flops / 1e12:.3g}",
            f"{card.memory_mib / 1024:.3g} GiB",
            f"{card.read_bytes_s / 1e6:.0f} MB/s",
        )
        for rank, card in enumerate(bench.cards)
    ]
    parts = [_format_table(rows)]
    if bench.links:
        networks = [(f"{link.ranks[0]} and {link.ranks[1]}", link.network) for link in bench.links]
        if bench.gang is not None and len(bench.cards) > 2:
            networks.append(("all", bench.gang))
        table = [("ranks", "latency", "all-reduce", "in bfloat16"), *(_format_network(*pair) for pair in networks)]
        parts.append(_format_table(table))
    return "\n\n".join(parts) + f"\n\n{bench.backend}, {bench.measured_at} UTC; kept for --predict\n"


def _format_network(name: str, network: Network) -> tuple[str, ...]:
    rates = (f"{rate * 8 / 1e9:.2f} Gbit/s" for rate in (network.bytes_s, network.bf16_bytes_s))
    return (name, f"{network.latency_s * 1e6:.0f} µs", *rates)


def format_prediction(prediction: Prediction, bench: Bench) -> str:
    """Return the table of a prediction, with what it means."""
    profile = prediction.profile
    gradients = sum(bucket.sizes[CommMode.EXACT] for bucket in profile.buckets)
    head = (
        f"One step of {profile.script}: the median of {profile.steps} on {profile.card.node} ({profile.card.device}), "
        f"with {gradients / 1e6:.1f} MB of gradients in {len(profile.buckets)} "
        f"bucket{'' if len(profile.buckets) == 1 else 's'}, {profile.peak_memory_mib} MiB "
        f"of memory at most. The network is that of the bench of {bench.measured_at} UTC ({bench.backend})."
    )
    if not prediction.steps:
        return f"{head}\n{format_misfit(profile, bench)}\n"
    single = prediction.steps[0]
    rows: list[tuple[str, ...]] = [
        ("cards", "comm", "step", "input", "compute", "exposed", "overlapped", "update", "speed", "nodes")
    ]
    rows += [_format_row(step, single, bench) for step in prediction.steps]
    notes = "\n".join(f"- {line}" for line in advise(prediction, bench))
    return f"{head}\n\n{_format_table(rows)}\n\nSpeed: samples per second of one card. All times in ms.\n{notes}\n"


def format_misfit(profile: StepProfile, bench: Bench) -> str:
    """Return what a model that fits no card lacks."""
    largest = max(card.memory_mib for card in bench.cards)
    return (
        f"It fits no card: the script used {profile.peak_memory_mib} MiB, and the largest card of the bench has "
        f"{largest} MiB, {profile.peak_memory_mib - largest} MiB less. Smaller batches, activation checkpointing or "
        "LoRA need less memory; FSDP divides the model between cards."
    )


def _format_row(step: StepPrediction, single: StepPrediction, bench: Bench) -> tuple[str, ...]:
    times = (
        step.step_s,
        step.input_s,
        step.compute_s + step.compress_s,
        step.exposed_s,
        step.overlapped_s,
        step.update_s,
    )
    mode = str(step.mode) if len(step.cards) > 1 else "-"
    nodes = ", ".join(dict.fromkeys(bench.cards[card].node for card in step.cards))
    speed = f"{step.rate / single.rate:.2f}"
    return (str(len(step.cards)), mode, *(f"{value * 1000:.1f}" for value in times), speed, nodes)


def advise(prediction: Prediction, bench: Bench) -> list[str]:
    """Return whether more cards pay, where the time goes, and what would help, one sentence or two each."""
    single = prediction.steps[0]
    automatic = [step for step in prediction.steps if prediction.modes.get(len(step.cards)) is step.mode]
    best = max(automatic, key=lambda step: step.rate)
    lines = []
    if best.rate < _PAYS * single.rate:
        lines.append(
            "More cards do not pay while all have the same model: none of these sets trains faster than one card by "
            "more than a tenth."
        )
        best = next((step for step in automatic if len(step.cards) == 2), single)
    else:
        lines.append(
            f"{len(best.cards)} cards with --comm {best.mode} train {best.rate / single.rate:.2f} times as many "
            f"samples a second as one: {MATHEMATICS[best.mode]}."
        )
    apart = max((step for step in prediction.steps if step.mode in PERIODS), key=lambda step: step.rate, default=single)
    if apart.rate >= _PAYS * max(best.rate, single.rate):
        lines.append(
            f"With --comm {apart.mode}, {len(apart.cards)} cards would train {apart.rate / single.rate:.2f} times as "
            f"many, but otherwise: {MATHEMATICS[apart.mode]}."
        )
    exact = next(
        (step for step in prediction.steps if step.cards == best.cards and step.mode is CommMode.EXACT), single
    )
    if exact.exposed_s > _NOTABLE * exact.step_s:
        batches = math.ceil(exact.exposed_s / (_NOTABLE * (exact.input_s + exact.compute_s)))
        lines.append(
            f"With exact gradients, {exact.exposed_s / exact.step_s:.0%} of a step on {len(exact.cards)} cards is "
            f"communication that computation does not hide. Adding up the gradients of {batches + 1} batches for each "
            "update (no_sync) would bring it to about a tenth; larger batches help in the same way."
        )
    if best.input_s > _NOTABLE * best.step_s:
        lines.append(
            f"{best.input_s / best.step_s:.0%} of a step waits for samples: more num_workers of the DataLoader, or "
            "data in a format that is faster to read."
        )
    speeds = [bench.cards[card].flops for card in best.cards]
    if max(speeds) > _SLOWER * min(speeds):
        lines.append(
            "The slowest of these cards sets the pace, with equal batches: gpu_launch.balance divides each batch by "
            "speed."
        )
    return lines


def describe_gain(speeds: Mapping[int, float]) -> str:
    """Return one sentence on whether a second machine pays.

    Args:
        speeds: Samples per second by number of machines, over those of one; two machines are among them.
    """
    second, most = speeds[2], max(speeds)
    if second >= _PAYS:
        verdict = "pays"
    else:
        verdict = "does not pay: one is about as fast" if second * _PAYS > 1 else "does harm: one is faster"
    more = f", and {most} give {speeds[most]:.2f} times" if most > 2 else ""
    return f"a second machine {verdict}. Two give {second:.2f} times the samples of one{more}."


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def draw_chart(prediction: Prediction, path: Path) -> bool:
    """Draw the speed by number of cards into a PNG; return False where there is no matplotlib, or nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if len({len(step.cards) for step in prediction.steps}) < 2:
        return False
    single = prediction.steps[0]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for mode in CommMode:
        points = [(1, 1.0)] + [
            (len(step.cards), step.rate / single.rate)
            for step in prediction.steps
            if step.mode is mode and len(step.cards) > 1
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=str(mode))
    most = max(len(step.cards) for step in prediction.steps)
    axes.plot([1, most], [1, most], color="grey", linestyle=":", label="as many times as cards")
    axes.set(xlabel="cards", ylabel="samples per second, of one card", xticks=range(1, most + 1))
    axes.set_title(f"Predicted speed of {prediction.profile.script}")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
