"""Predictions as people read them, and what is kept of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from gpu_launch.errors import UsageError
from gpu_launch.prediction import figures, report
from gpu_launch.training.comm_modes import CommMode
from tests.support.launch.measured import CARD, NETWORK, PROFILE, build_bench


def test_bench_is_shown_with_cards_and_links():
    """Bandwidths in Gbit/s, as networks are sold."""
    text = report.format_bench(build_bench(1e13, 0.5e13))
    assert "rank  node  device    TFLOP/s  memory    reads\n0     rig1  RTX 5090  10       31.2 GiB  1000 MB/s" in text
    assert "0 and 1  1000 µs  2.50 Gbit/s  2.50 Gbit/s" in text


def test_bench_is_read_as_it_was_written(tmp_path):
    """From the home."""
    bench = build_bench(1e13, 0.5e13, 1e12, gang=NETWORK)
    figures.write_json(figures.get_bench_path(tmp_path), bench)
    assert figures.read_bench(tmp_path) == bench


@pytest.mark.parametrize("text", ["", "{}", '{"cards": [], "links": [], "gang": null}', '{"cards": [1]}', "[]"])
def test_bench_of_another_form_is_refused(tmp_path, text):
    """With the command that measures again."""
    path = figures.get_bench_path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(UsageError, match="%gpu_bench"):
        figures.read_bench(tmp_path)


def test_prediction_without_a_bench_is_refused(tmp_path):
    """Before anything starts."""
    with pytest.raises(UsageError, match=r"there are none yet. Measure them with %gpu_bench --nnodes N"):
        figures.read_bench(tmp_path)


def test_table_has_each_number_of_cards_and_each_mode():
    """And says whether more cards pay, and what would help."""
    bench = build_bench(1e13, 1e13)
    text = report.format_prediction(report.build_prediction(PROFILE, bench), bench)
    rows = [line.split() for line in text.splitlines() if line[:3] in ("1  ", "2  ")]
    assert [(row[0], row[1]) for row in rows] == [("1", "-"), *(("2", str(mode)) for mode in CommMode)]
    assert rows[0][2:9] == ["330.0", "10.0", "300.0", "0.0", "0.0", "20.0", "1.00"]
    assert rows[1][2:9] == ["412.0", "10.0", "300.0", "82.0", "82.0", "20.0", "1.60"]
    assert "50.0 MB of gradients in 2 buckets, 10000 MiB of memory" in text
    assert "2 cards with --comm bf16 train 1.76 times as many samples a second as one: gradients are rounded" in text
    assert "With exact gradients, 20% of a step on 2 cards is communication" in text


def test_kept_prediction_is_described_for_a_launch(tmp_path):
    """In its mode and for its number of cards; empty without one, for another number, and for a damaged file."""
    bench = build_bench(1e13, 1e13)
    report.publish(PROFILE, bench, home=tmp_path, key="k")

    def describe(ranks, comm=""):
        return re.sub(r" on \S+ \S+ UTC", "", report.describe_kept(tmp_path, "k", ranks=ranks, comm=comm))

    again = "--predict measures it again."
    assert describe(1, "bf16") == f"Predicted for one card: 330.0 ms for a step. {again}"
    exact = "Predicted for 2 cards with --comm exact: 412.0 ms for a step, 1.60 times the samples of one card."
    assert describe(2) == f"{exact} {again}"
    assert "with --comm bf16" in describe(2, "bf16")
    assert describe(3) == ""
    figures.get_prediction_path(tmp_path, "k").write_text('{"steps": [{"cards": [0]}]}')
    assert describe(1) == ""
    assert report.describe_kept(tmp_path, "other", ranks=1, comm="") == ""


def test_advice_where_more_cards_do_not_pay():
    """A network a thousand times slower; no mode that --comm auto takes is faster than one card, and no other either."""
    bench = build_bench(1e13, 1e13, network=replace(NETWORK, latency_s=0.5, bytes_s=3e5, bf16_bytes_s=3e5))
    lines = report.advise(report.build_prediction(PROFILE, bench), bench)
    assert lines[0].startswith("More cards do not pay while all have the same model")
    assert "no_sync" in lines[1]


def test_modes_with_different_models_are_named_where_they_are_faster():
    """With what they change, below what --comm auto would take."""
    bench = build_bench(1e13, 1e13, network=replace(NETWORK, bytes_s=50e6, bf16_bytes_s=50e6, latency_s=0.2))
    lines = report.advise(report.build_prediction(PROFILE, bench), bench)
    assert lines[0].startswith("More cards do not pay while all have the same model")
    assert re.match(
        r"With --comm diloco, 2 cards would train 1\.\d\d times as many, but otherwise: each node", lines[1]
    )
    bench = build_bench(1e13, 1e13, network=replace(NETWORK, bytes_s=1e10, bf16_bytes_s=1e10))
    assert not any("would train" in line for line in report.advise(report.build_prediction(PROFILE, bench), bench))


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [
        ({1: 1.0, 2: 1.1, 3: 1.5}, "pays. Two give 1.10 times the samples of one, and 3 give 1.50 times."),
        ({1: 1.0, 2: 1.05}, "does not pay: one is about as fast. Two give 1.05 times the samples of one."),
        ({1: 1.0, 2: 0.92}, "does not pay: one is about as fast. Two give 0.92 times the samples of one."),
        ({1: 1.0, 2: 0.45}, "does harm: one is faster. Two give 0.45 times the samples of one."),
    ],
)
def test_second_machine_pays_from_a_tenth_more_samples(speeds, verdict):
    """As in the advice of a prediction; up to a tenth less is no harm."""
    assert report.describe_gain(speeds) == f"a second machine {verdict}"


def test_advice_for_slow_input_and_mixed_cards():
    """Each with its remedy."""
    fast = replace(NETWORK, latency_s=1e-6, bytes_s=1e11, bf16_bytes_s=1e11)
    bench = build_bench(1e13, 0.7e13, network=fast)
    lines = report.advise(report.build_prediction(replace(PROFILE, input_s=0.4), bench), bench)
    assert any("waits for samples: more num_workers" in line for line in lines)
    assert any("gpu_launch.balance" in line for line in lines)


def test_model_that_fits_no_card_is_told_what_is_short():
    """By how much, and what needs less."""
    bench = build_bench(1e13)
    text = report.format_prediction(report.build_prediction(replace(PROFILE, peak_memory_mib=40_000), bench), bench)
    assert "the script used 40000 MiB, and the largest card of the bench has 32000 MiB, 8000 MiB less" in text


@pytest.mark.process  # matplotlib asks fontconfig for fonts, once
def test_automatic_mode_is_that_of_the_kept_prediction(tmp_path, capsys):
    """By number of ranks; a chart is drawn where matplotlib is installed."""
    report.publish(PROFILE, build_bench(1e13, 1e13), home=tmp_path, key="k")
    assert "One step of train.py" in capsys.readouterr().out
    assert report.resolve_auto(tmp_path, "k", 1) is CommMode.EXACT
    assert report.resolve_auto(tmp_path, "k", 2) is CommMode.BF16
    with pytest.raises(UsageError, match=r"is for 1, 2 ranks, and this launch has 3"):
        report.resolve_auto(tmp_path, "k", 3)
    with pytest.raises(UsageError, match=r"there is none. Make one with %gpu_launch --predict"):
        report.resolve_auto(tmp_path, "other", 2)


@pytest.mark.process  # matplotlib asks fontconfig for fonts, once
def test_prediction_is_kept_with_its_figures(tmp_path):
    """As JSON, for other programs."""
    report.publish(PROFILE, build_bench(1e13), home=tmp_path, key="k")
    kept = json.loads(figures.get_prediction_path(tmp_path, "k").read_text())
    assert kept["profile"]["card"]["device"] == CARD.device
    assert [step["mode"] for step in kept["steps"]] == ["exact"]
