"""The files that a recipe's program leaves in its folder."""

from __future__ import annotations

from pathlib import Path

from gpu_launch.recipes.run_record import METRICS, RunRecord


def test_a_line_that_a_kill_has_cut_off_does_not_stop_the_next_start(tmp_path: Path) -> None:
    """It is left out, and gone once the run continues."""
    record = RunRecord(tmp_path)
    record.append(step=10, loss=2.5)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 20, "lo')
    assert record.read_metrics() == [{"step": 10, "loss": 2.5}]
    record.continue_from(10)
    record.append(step=20, loss=2.0)
    assert [line["step"] for line in record.read_metrics()] == [10, 20]
