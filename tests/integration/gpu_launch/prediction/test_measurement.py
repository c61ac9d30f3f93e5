"""A bench of three ranks over gloo, and from it the prediction of an unmodified script."""

from __future__ import annotations

import json
import math
import textwrap

import pytest

from gpu_launch.prediction import bench_main, figures, step_profiler
from gpu_launch.training.comm_modes import CommMode
from tests.support.launch import profiled_script
from tests.support.launch.launched_ranks import run_launched

pytestmark = pytest.mark.torch

RANKS = 3
WIDTH, SECONDS = 600, 0.08
KEY = "key"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with a bench and the prediction of a script; its output is in `output`."""
    home = tmp_path_factory.mktemp("home")
    environ = {"HOME": str(home), "GPUHUB_NODE": "rig1"}
    ranks = run_launched(["-m", bench_main.__name__], RANKS, environ)
    assert [rank.code for rank in ranks] == [0] * RANKS, ranks[0].stderr
    (home / "bench").write_text(ranks[0].stdout)
    command = ["-m", profiled_script.__name__, str(home), "1000", str(WIDTH), str(SECONDS)]
    (rank,) = run_launched(command, 1, environ | {step_profiler.VARIABLE: KEY})
    assert rank.code == 0, rank.stderr
    (home / "output").write_text(rank.stdout)
    return home


def test_bench_has_all_cards_and_pairs(home):
    """Positive figures of each, and a table."""
    bench = figures.read_bench(home)
    assert [link.ranks for link in bench.links] == [(0, 1), (0, 2), (1, 2)]
    assert len(bench.cards) == RANKS
    assert {(card.node, card.device) for card in bench.cards} == {("rig1", "CPU")}
    networks = [*(link.network for link in bench.links), bench.gang]
    values = [value for network in networks for value in (network.latency_s, network.bytes_s, network.bf16_bytes_s)]
    values += [value for card in bench.cards for value in (card.flops, card.memory_mib, card.read_bytes_s)]
    assert all(value > 0 and math.isfinite(value) for value in values)
    assert "kept for --predict" in (home / "bench").read_text()
    assert not list(home.glob(".gpu_launch-bench*"))


def test_profile_has_the_parts_of_a_step_and_the_buckets_of_ddp(home):
    """Half of the sleep is forward; the second layer's gradients come first, and fill the bucket of 1 MiB."""
    kept = json.loads(figures.get_prediction_path(home, KEY).read_text())["profile"]
    assert SECONDS < kept["compute_s"] < kept["compute_s"] + kept["update_s"]
    assert [bucket["sizes"]["exact"] for bucket in kept["buckets"]] == [4 * WIDTH * (WIDTH + 1)] * 2
    assert [bucket["sizes"]["bf16"] for bucket in kept["buckets"]] == [2 * WIDTH * (WIDTH + 1)] * 2
    first, last = (bucket["ready_s"] for bucket in kept["buckets"])
    assert SECONDS / 2 < first < last - SECONDS / 4
    assert last == pytest.approx(kept["compute_s"])
    assert all(0 < bucket["sizes"]["powersgd"] < bucket["sizes"]["exact"] / 10 for bucket in kept["buckets"])
    assert set(kept["compress_s"]) == {CommMode.BF16, CommMode.POWERSGD}
    assert kept["parameter_bytes"] == 2 * 4 * WIDTH * (WIDTH + 1)


def test_accumulated_gradients_do_not_make_the_model_larger(home, tmp_path):
    """Modes that exchange parameters send each once, however many backward passes a step has."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch

            model = torch.nn.Linear(100, 100)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(1000):
                for _ in range(3):
                    model(torch.ones(1, 100)).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            """
        )
    )
    (rank,) = run_launched([str(script)], 1, {"HOME": str(home), step_profiler.VARIABLE: "accumulated"})
    assert rank.code == 0, rank.stderr
    kept = json.loads(figures.get_prediction_path(home, "accumulated").read_text())["profile"]
    assert kept["parameter_bytes"] == 4 * 100 * 101


def test_profile_ends_the_script_and_prints_the_table(home):
    """The script itself would write the times of its 1000 steps at its end."""
    assert not (home / "steps.json").exists()
    assert "One step of profiled_script.py: the median of 20 on rig1 (CPU)" in (home / "output").read_text()


def test_script_with_too_few_steps_has_no_prediction(home):
    """It runs to its end, and says how many are needed."""
    command = ["-m", profiled_script.__name__, str(home), "4", "10", "0"]
    (rank,) = run_launched(command, 1, {"HOME": str(home), step_profiler.VARIABLE: "other"})
    assert "the script made 4 steps of an optimizer of torch.optim, and 23 are needed" in rank.stderr
    assert not figures.get_prediction_path(home, "other").exists()


def test_profile_without_a_bench_ends_before_the_script(tmp_path):
    """With the command that measures."""
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    (rank,) = run_launched([str(script)], 1, {"HOME": str(tmp_path), step_profiler.VARIABLE: KEY})
    assert rank.code == 1
    assert "Measure them with %gpu_bench" in rank.stderr
    assert not rank.stdout


def test_many_ranks_are_measured_with_their_neighbours():
    """In a ring; few ranks in all pairs."""
    assert bench_main.list_pairs(3) == [(0, 1), (0, 2), (1, 2)]
    assert bench_main.list_pairs(12) == [*((first, first + 1) for first in range(11)), (0, 11)]
