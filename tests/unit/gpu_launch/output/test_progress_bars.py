"""Progress: what tqdm draws, what scripts report, and the time that is left."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from tqdm import tqdm

from gpu_launch.output.formatter import collapse_redraws, strip_controls
from gpu_launch.output.progress_bars import ProgressBar, ProgressTracker, parse_bar


@pytest.mark.parametrize(
    ("line", "bar", "rest"),
    [
        ("45%|████▌ | 45/100 [00:12<00:15, 3.6it/s]",
         ProgressBar(step=45, total=100, remaining_s=15, note="3.6it/s"), ""),
        ("train:  45%|####| 45/100 [1:00:12<2:00:15,  3.60s/it, loss=0.3, x=[1, 2]]",
         ProgressBar(text="train", step=45, total=100, remaining_s=7215, note="3.60s/it · loss=0.3 · x=[1 · 2]"), ""),
        ("  0%|          | 0/9 [00:00<?, ?it/s]", ProgressBar(step=0, total=9), ""),
        ("a: b: 10%|#| 1.20k/3.00M [00:00<00:01, 1.7MB/s]done",
         ProgressBar(text="a: b", step=1200, total=3e6, remaining_s=1, note="1.7MB/s"), "done"),
        ("123it [00:12, 9.1it/s]", ProgressBar(step=123, note="9.1it/s"), ""),
        ("files: 3file [00:00, 5.0file/s, last=x] more", ProgressBar(text="files", step=3, note="5.0file/s · last=x"), " more"),
    ],
)  # fmt: skip
def test_parse_tqdm_progress_bars(line, bar, rest):
    """With and without a description, a total, scaled units, and what follows."""
    assert parse_bar(line) == (bar, rest)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "loss 45%",
        "45%| no bar",
        "100%|",
        "3 items/s [see above]",
        "speed 3it/s [12]",
        "| 45%|x| [00:00<00:00]",
        "%|" * 5000,
    ],
)
def test_other_lines_are_not_progress_bars(line):
    """However much they look like one."""
    assert parse_bar(line) is None


@pytest.mark.parametrize(
    "options",
    [{}, {"desc": "train"}, {"total": None}, {"unit": "B", "unit_scale": True}, {"ascii": True}, {"postfix": {"loss": 0.5}},
     {"desc": "loss [0.3]: x", "ncols": 60}],
)  # fmt: skip
def test_parse_output_of_the_installed_tqdm(options):
    """The installed version, drawing to what is no terminal."""
    out = io.StringIO()
    with tqdm(**{"total": 40, "file": out, "mininterval": 0, **options}) as bar:
        for _ in range(40):
            bar.update(1)
    drawn = [part for part in out.getvalue().replace("\n", "").split("\r") if part]
    found = [parse_bar(strip_controls(collapse_redraws(part))) for part in drawn]
    assert all(one is not None and not one[1].strip() for one in found)
    assert [one[0].step for one in found][-1] == 40


def test_nested_bars_are_shown_and_finished_ones_omitted():
    """The one that changes most often last; a description that changes makes no new bar."""
    steps = ProgressTracker()
    steps.record_bar(0, ProgressBar(text="epoch", step=1, total=3))
    for step in range(1, 10):
        steps.record_bar(0, ProgressBar(text=f"loss {step}", step=step, total=10))
    assert [bar.text for bar in steps.bars()] == ["epoch", "loss 9"]
    steps.record_bar(0, ProgressBar(text="x", step=10, total=10))
    assert [bar.text for bar in steps.bars()] == ["epoch"]
    steps.record_bar(0, ProgressBar(text="epoch", step=3, total=3))
    assert [bar.text for bar in steps.bars()] == ["epoch"]


def test_lowest_rank_wins_and_reports_precede_bars():
    """Other ranks draw the same."""
    steps = ProgressTracker()
    steps.record_bar(1, ProgressBar(text="one", step=1))
    steps.record_bar(0, ProgressBar(text="zero", step=1))
    assert steps.bars()[0].text == "zero"
    steps.record_report(
        1, {"step": 2, "total": 4, "text": "told", "metrics": {"loss": 0.123456, "lr": 1, "why": "x"}}, 0.0
    )
    assert steps.bars() == (ProgressBar(text="told", step=2, total=4, note="loss 0.1235 · lr 1 · why x"),)
    steps.clear()
    assert steps.bars() == ()


def test_the_time_left_follows_the_latest_reports():
    """And begins anew when the script begins anew."""
    steps = ProgressTracker()

    def left(step, now, total=100):
        steps.record_report(0, {"step": step, "total": total}, now)
        return steps.bars()[0].remaining_s

    assert left(0, 0.0) is None
    assert left(10, 5.0) == pytest.approx(45.0)
    assert left(20, 20.0) == pytest.approx(80.0)
    assert left(100, 60.0) == 0.0
    assert left(1, 61.0) is None
    assert left(2, 62.0, total=None) is None


@pytest.mark.parametrize(
    "told",
    [{}, {"step": None}, {"step": "3"}, {"step": True}, {"step": float("nan")}, {"step": 1e30}, {"step": [1]}],
)
def test_report_without_a_number_is_ignored(told):
    """Whatever a script hands over."""
    steps = ProgressTracker()
    steps.record_report(0, told, 0.0)
    assert steps.bars() == ()


def test_fraction_is_clamped():
    """A script may count further than it said."""
    assert ProgressBar(step=150, total=100).fraction == 1.0
    assert ProgressBar(step=-1, total=100).fraction == 0.0
    assert ProgressBar(step=1, total=0).fraction is None
    assert ProgressBar(step=1).fraction is None


def test_bars_of_each_rank_that_has_drawn():
    """The outer loop first, also when it was drawn last; the latest three."""
    steps = ProgressTracker()
    outer, inner = ProgressBar(step=0, total=2), ProgressBar(step=5, total=10)
    for bar in (outer, inner, replace(outer, step=1)):
        steps.record_bar(1, bar)
    assert steps.pop_redrawn() == {1: (replace(outer, step=1), inner)}
    assert steps.pop_redrawn() == {}
    for total in (20, 30):
        steps.record_bar(1, ProgressBar(step=0, total=total))
    assert [bar.total for bar in steps.pop_redrawn()[1]] == [2, 20, 30]
    steps.record_bar(0, outer)
    steps.clear()
    assert steps.pop_redrawn() == {}
