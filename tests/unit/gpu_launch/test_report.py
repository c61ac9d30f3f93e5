"""gpu_launch.report: what a rank tells of its progress."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import timeit

import pytest

import gpu_launch


@pytest.fixture
def path(tmp_path, monkeypatch):
    found = tmp_path / "progress-0.json"
    monkeypatch.setenv("GPU_LAUNCH_PROGRESS", str(found))
    return found


def test_the_first_and_the_last_step_are_written(path):
    """Whole files only, and nothing else in the folder."""
    for step in range(11):
        gpu_launch.report(step, 10, "epoch 1", loss=1 / (step + 1))
        if step == 0:
            assert json.loads(path.read_text())["step"] == 0
    assert json.loads(path.read_text()) == {"step": 10, "total": 10, "text": "epoch 1", "metrics": {"loss": 1 / 11}}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_report_writes_at_most_five_times_a_second(path, monkeypatch):
    """By the clock, not by the number of steps."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seen = set()
    for step in range(1000):
        now[0] += 0.001
        gpu_launch.report(step)
        seen.add(path.read_text())
    assert 4 <= len(seen) <= 6


def test_report_outside_a_launch_does_nothing(monkeypatch, tmp_path):
    """So that a script runs anywhere."""
    monkeypatch.delenv("GPU_LAUNCH_PROGRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    gpu_launch.report(1, 2, loss=object())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "told"),
    [(1, 1), (0.5, 0.5), (True, True), ("a", "a"), (None, None), (float("nan"), "nan"), (object, "<class 'object'>")],
)
def test_metrics_are_numbers_or_text(path, value, told):
    """And always JSON."""
    gpu_launch.report(1, 1, value=value)
    assert json.loads(path.read_text())["metrics"] == {"value": told}


def test_missing_folder_does_not_end_the_training(tmp_path, monkeypatch):
    """Nor does it cost anything from then on."""
    monkeypatch.setenv("GPU_LAUNCH_PROGRESS", str(tmp_path / "gone" / "progress-0.json"))
    for step in range(3):
        gpu_launch.report(step, 2)


@pytest.mark.process
def test_report_imports_neither_torch_nor_ipython(path):
    """Neither torch nor IPython is imported."""
    code = (
        "import sys, gpu_launch; gpu_launch.report(3, total=9); "
        "print([name for name in ('torch', 'IPython', 'ipyparallel', 'zmq', 'cloudpickle') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert json.loads(path.read_text())["step"] == 3


def test_a_call_costs_some_microseconds(path):
    """Cheap enough for every step; the best of some batches, because other programs run at the same time."""
    batches = timeit.repeat(lambda: gpu_launch.report(1, 10, loss=0.5), number=1000, repeat=20)
    assert path.exists()
    assert min(batches) / 1000 < 50e-6
