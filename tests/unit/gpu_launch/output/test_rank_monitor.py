"""What the agents tell: the ranks' states, what of their output is shown, and a launch's progress in words."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from gpu_launch.broker import models
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.common.launch_spec import Membership
from gpu_launch.launch import plan as plan_module
from gpu_launch.launch.plan import LaunchPlan
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.output import text as render
from gpu_launch.output.panel import PanelView, RankState
from gpu_launch.output.progress_bars import ProgressBar
from gpu_launch.output.rank_monitor import SILENCE_S, STALLED_S, RankMonitor
from gpu_launch.worker.gpu_monitor import GpuSample

PLAN = LaunchPlan(
    nnodes=2,
    least_nnodes=2,
    nproc_per_node=1,
    includes_notebook=True,
    notebook_gpus=(),
    exclude_nodes=("rig1",),
    demand=GpuRequest(),
)
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def ranks_of(options):
    """Ranks of a start on both nodes."""
    ranks = RankMonitor(options, nnodes=PLAN.nnodes, nproc_per_node=PLAN.nproc_per_node)
    ranks.membership = Membership(includes_notebook=True, workers=(0,), nodes=("rig2",), nproc_per_node=1)
    return ranks


def message(kind="output", node_rank=0, attempt=0, **content):
    """An agent's message."""
    return {"kind": kind, "node_rank": node_rank, "node": f"rig{node_rank + 1}", "attempt": attempt} | content


def test_output_is_shown_as_the_options_say():
    """Streams keep their order; a filtered rank stays silent; old starts are not mixed in."""
    ranks = ranks_of(LaunchOptions(shown_ranks=(0,), redirects="2"))
    entries = [[0, "stdout", 1, "a\n"], [0, "stderr", 1, "hidden\n"], [0, "stdout", 1, "b\n"]]
    assert ranks.process([message(entries=entries)], 0.0, last=True) == [
        ("stdout", "[rank 0 · rig1] a\n[rank 0 · rig1] b\n")
    ]
    assert ranks.process([message(entries=entries, attempt=7)], 0.0) == []


def end(rank, exit_code=1, error="", at_ns=1, **parts):
    """How a rank ended, as an agent tells it."""
    return {"rank": rank, "node": f"rig{rank + 1}", "exit_code": exit_code, "error": error, "at_ns": at_ns} | parts


OWN = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\nValueError: bad data'
LEFT = OWN.replace("ValueError: bad data", "RuntimeError: Connection closed by peer [10.0.1.3]:1")


def test_equal_lines_are_merged_and_others_delayed_briefly():
    """A rank that has ended is not waited for."""
    ranks = ranks_of(LaunchOptions())
    both = [
        message(entries=[[0, "stdout", 1, "same\nmine\n"]]),
        message(node_rank=1, entries=[[1, "stdout", 1, "same\n"]]),
    ]
    assert ranks.process(both, 0.0) == [("stdout", "[ranks 0-1 ×2] same\n")]
    assert ranks.process([], 0.2) == [("stdout", "[rank 0 · rig1] mine\n")]
    ranks.process([message("exit", node_rank=1, code=0, ends=[end(1, 0)], note="")], 0.3)
    assert ranks.process([message(entries=[[0, "stdout", 1, "last\n"]])], 0.3) == [("stdout", "[rank 0 · rig1] last\n")]


def test_first_failure_is_known_before_its_node_ends():
    """Its victims' tracebacks are not shown, and it stays to blame although theirs come with earlier clocks."""
    ranks = ranks_of(LaunchOptions())
    ranks.process([message(entries=[]), message(node_rank=1, entries=[])], 0.0)
    assert (ranks.has_failed(), ranks.find_first_failure()) == (False, None)
    ranks.process([message("failed", node_rank=1, end=end(1, error=OWN, at_ns=9))], 0.1)
    assert (ranks.has_failed(), ranks.find_first_failure().rank, ranks.all_ended()) == (True, 1, False)
    shown = ranks.process(
        [message(entries=[[0, "stderr", 1, f"{LEFT}\n"], [0, "stdout", 1, "so far\n"]])], 0.2, last=True
    )
    assert shown == [("stdout", "[rank 0 · rig1] so far\n")]
    ends = [message("exit", code=1, ends=[end(0, error=LEFT, at_ns=5)], note=""),
            message("exit", node_rank=1, code=1, ends=[end(1, None)], note="")]  # fmt: skip
    ranks.process(ends, 0.3)
    assert (ranks.find_first_failure().rank, ranks.find_first_failure().exit_code) == (1, 1)
    assert ranks.describe_failure(logs="~/l").startswith(
        f"rank 1 on rig2 failed: exit code 1\n\n{OWN}\n\nrank 0 (rig1): lost a peer"
    )
    assert ranks.build_view().ranks == {RankState.FAILED: (0, 1)}


def test_a_restart_shows_why():
    """Once, since the failed ranks' tracebacks were kept back; not where the ranks only lost their peers."""
    ranks = ranks_of(LaunchOptions(max_restarts=1))
    ranks.process([message("failed", end=end(0, error=OWN)), message(entries=[[0, "stderr", 1, f"{OWN}\n"]])], 0.0)
    ranks.start_next_attempt()
    ((stream, text),) = ranks.process([], 0.1)
    assert (stream, text.count("ValueError: bad data"), ranks.attempt, ranks.has_failed()) == ("stderr", 1, 1, False)
    assert text.startswith("rank 0 on rig1 failed: exit code 1\n")
    ranks.process([message("failed", attempt=1, end=end(0, error=LEFT))], 0.2)
    ranks.start_next_attempt()
    assert ranks.process([], 0.3) == []


def test_messages_of_newer_versions_are_ignored():
    """Kinds and fields that are not known are passed over."""
    ranks = ranks_of(LaunchOptions())
    assert ranks.process([message("weather", text="fine"), message("failed", end=end(0, colour="red"))], 0.0) == []
    assert ranks.find_first_failure().rank == 0


def test_ranks_that_wait_for_peers_are_reported():
    """A rank that exits with 0 while others hang."""
    ranks = ranks_of(LaunchOptions())
    ranks.process([message("exit", code=0, ends=[end(0, 0)], note=""), message(node_rank=1, entries=[])], 0.0)
    assert ranks.format_waiting() == ""
    ranks.process([], 2.0)
    assert ranks.format_waiting() == "rank 0 has finished, waiting for rank 1"
    assert ranks.build_view().ranks == {RankState.RUNNING: (1,), RankState.FINISHED: (0,)}
    ranks.process([message("ended", node_rank=1, end=end(1, 0))], 3.0)
    assert ranks.format_waiting() == ""


def test_gpu_readings_and_steps_are_collected():
    """In the order of the nodes; what is not known is not guessed."""
    ranks = ranks_of(LaunchOptions())
    reading = {
        "uuid": "GPU-1a2b3c",
        "model": "NVIDIA GeForce RTX 5090",
        "use_percent": 93,
        "memory_mib": 9,
        "power_w": None,
    }
    told = [message("gpus", node_rank=1, readings=[reading]), message("gpus", readings=[{"uuid": "GPU-2", "use_percent": "x"}]),
            message("progress", rank=0, step=4, total=8, text="train", metrics={})]  # fmt: skip
    ranks.process(told, 0.0)
    view = ranks.build_view()
    assert view.gpus == (GpuSample(node="rig1", uuid="GPU-2"),
                          GpuSample(node="rig2", uuid="GPU-1a2b3c", model="RTX 5090", use_percent=93, memory_mib=9))  # fmt: skip
    assert view.bars == (ProgressBar(text="train", step=4, total=8),)
    ranks.start_next_attempt()
    assert ranks.build_view() == PanelView()


def test_lost_node_is_reported_with_the_failure():
    """The other ranks only know that a peer is gone."""
    ranks = ranks_of(LaunchOptions())
    ranks.process([message(entries=[]), message(node_rank=1, entries=[])], 0.0)
    ranks.process([], 2.0)
    ranks.process([message("failed", end=end(0, error=LEFT))], 4.0)
    text = ranks.describe_failure(logs="~/l")
    assert text.startswith("rank 0 on rig1 lost a peer: no message from rig2 (rank 1) for 4 s\n")


def test_interrupt_during_processing_loses_no_later_output():
    """What waited for its equals may be lost, nothing that comes later is."""
    ranks = ranks_of(LaunchOptions())

    def broken():
        yield message(entries=[[0, "stdout", 1, "waits\n"]])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranks.process(broken(), 0.0)
    assert ranks.process([message(entries=[[0, "stdout", 1, "later\n"]])], 0.1, last=True) == [
        ("stdout", "[rank 0 · rig1] later\n")
    ]


def test_failure_before_any_rank_shows_torchruns_message():
    """Such as a port in use."""
    ranks = ranks_of(LaunchOptions())
    ends = [{"rank": 0, "node": "rig1", "exit_code": None, "error": "", "at_ns": 0}]
    ranks.process([message("exit", code=1, ends=ends, note="Address already in use")], 0.0)
    assert ranks.has_failed()
    assert "The ranks on rig1 could not be run: Address already in use" in ranks.describe_failure(logs="~/l")


def test_a_silent_node_fails_the_launch():
    """By name, after a deadline."""
    ranks = ranks_of(LaunchOptions())
    ranks.process([message(entries=[]), message(node_rank=1, entries=[])], 0.0)
    for second in range(1, int(SILENCE_S) + 2):
        assert ranks.silent_nodes() == frozenset()
        ranks.process([message(entries=[])], second)
    assert ranks.silent_nodes() == {1}
    assert ranks.silent_nodes(STALLED_S) == frozenset()
    ranks.check_alive({0})
    with pytest.raises(
        Exception, match=r"^rig2 has not sent a message for 10 s: the worker or the node is gone, and with it rank 1\.$"
    ):
        ranks.check_alive({1})


def test_hung_node_is_distinguished_from_a_lost_node():
    """Its worker is there, and says nothing of its ranks."""
    ranks = ranks_of(LaunchOptions())
    ranks.process([message(entries=[]), message(node_rank=1, entries=[])], 0.0)
    for second in range(1, int(STALLED_S) + 2):
        ranks.process([message(entries=[])], second)
    with pytest.raises(
        Exception,
        match=r"^rig2 sent no message about rank 1 for 60 s, although the worker runs: its file accesses hang",
    ):
        ranks.check_alive({1})


def test_pending_messages_are_read_before_a_node_is_declared_lost():
    """A notebook that was held up for long hears what has waited for it before it judges."""
    ranks = ranks_of(LaunchOptions())
    ranks.process([message(entries=[]), message(node_rank=1, entries=[])], 0.0)
    assert ranks.silent_nodes() == frozenset()
    ranks.process([message(entries=[])], 100.0)
    assert ranks.silent_nodes() == frozenset()
    for second in range(101, 101 + int(SILENCE_S)):
        ranks.process([message(entries=[])], second)
    assert ranks.silent_nodes() == frozenset()
    ranks.process([message(entries=[])], 101.5 + SILENCE_S)
    assert ranks.silent_nodes() == {1}


def gpu(node, model, memory_mib=0):
    """A GPU."""
    return models.Gpu(uuid=f"GPU-{node}", node=node, model=model, memory_mib=memory_mib)


def worker(index=0, node="rig2", model="RTX 5070", state="running"):
    """A worker with one GPU."""
    return models.Worker(
        index=index, node=node, gpus=(gpu(node, model, 12_227),), state=state, exit_code=None, message=None
    )


def job(state, **parts):
    """A job on the wire."""
    values = {"position": None, "waiting_for": None, "workers": (), "reason": None, "renew_within_s": 30.0} | parts
    return models.Job(id="j", run_id="r", state=state, version=1, **values)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, ""),
        ({"position": 2}, ": position 2"),
        ({"position": 2, "waiting_for": "RTX 5070 held by ada"}, ": position 2; waits for RTX 5070 held by ada"),
        ({"waiting_for": "RTX 5070 held by ada"}, ": waits for RTX 5070 held by ada"),
        ({"position": 2, "expected_start": 23.4 * 60, "waiting_for": "RTX 5090 held by ada"},
         ": position 2, expected to start in about 25 min; waits for RTX 5090 held by ada"),
        ({"position": 1, "expected_start": -5}, ": position 1, expected to start within a minute"),
        ({"position": 1, "expected_start": 200}, ": position 1, expected to start in about 4 min"),
        ({"position": 1, "expected_start": 5 * 3600}, ": position 1, expected to start in about 5 hours"),
    ],
)  # fmt: skip
def test_waiting_line_has_position_time_and_reason(parts, text):
    """As far as the broker knows them."""
    if "expected_start" in parts:
        parts = parts | {"expected_start": NOW + timedelta(seconds=parts["expected_start"])}
    plan = dataclasses.replace(PLAN, nnodes=3, least_nnodes=3)
    assert plan_module.format_job_state(job("waiting", **parts), plan, NOW) == f"waiting for 2 GPUs on 2 nodes{text}"


def test_elastic_launch_shows_its_range_of_nodes():
    """What it waits for is the least."""
    plan = dataclasses.replace(PLAN, nnodes=4, least_nnodes=2, nproc_per_node=2)
    assert plan_module.format_requested_gpus(plan) == "2 to 6 GPUs on 1 to 3 nodes"
    assert plan_module.format_requested_gpus(dataclasses.replace(plan, least_nnodes=1)) == "2 to 6 GPUs on 1 to 3 nodes"


def test_progress_lines():
    """Nodes and models while starting; a state that is not known as the broker calls it."""
    started = job("starting", workers=(worker(),))
    assert plan_module.format_job_state(started, PLAN, NOW) == "starting 1 worker on rig2 RTX 5070"
    assert render.format_nodes(started.workers, "rig1 RTX 5090") == "rig1 RTX 5090, rig2 RTX 5070"
    staging = dataclasses.replace(PLAN, demand=dataclasses.replace(PLAN.demand, stage=("datasets/a", "datasets/b")))
    text = "starting 1 worker on rig2 RTX 5070, after datasets/a and datasets/b are copied there"
    assert plan_module.format_job_state(started, staging, NOW) == text
    assert plan_module.format_job_state(job("preempting"), PLAN, NOW) == "preempted, the workers end"
    assert plan_module.format_job_state(job("a state of tomorrow"), PLAN, NOW) == "the job is a state of tomorrow"
    assert render.format_gpus([gpu("rig1", "RTX 5090")] * 2) == "2 × RTX 5090"


@pytest.mark.parametrize(
    ("note", "own", "text"),
    [
        (None, None, None),
        ("mixed cards: 1 × A, 1 × B", None, "mixed cards: 1 × A, 1 × B"),
        (None, "RTX 5070", None),
        (None, "RTX 5090", "mixed cards: 1 × RTX 5090, 1 × RTX 5070; the slowest sets the pace"),
        ("mixed cards: 1 × A", "RTX 5090", "mixed cards: 1 × RTX 5090, 1 × RTX 5070; the slowest sets the pace"),
        ("one switch", "RTX 5090", "one switch; mixed cards: 1 × RTX 5090, 1 × RTX 5070; the slowest sets the pace"),
    ],
)
def test_mixed_gpu_models_include_the_notebooks_gpu(note, own, text):
    """The broker does not know that the notebook's GPU takes part."""
    own_cards = (gpu("rig1", own, 32_607),) if own else ()
    assert render.format_grant_note(job("running", note=note), (worker(),), own_cards) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([2], "rank 2"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([3, 1], "ranks 1, 3"), (range(64), "ranks 0-63")],
)
def test_format_ranks(numbers, text):
    """Neighbours as a range."""
    assert render.format_ranks(numbers) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min"), (125, "2 min 5 s"), (3600, "1 h"), (90_000, "1 d 1 h"), (-3, "0 s")],
)
def test_format_durations(seconds, text):
    """Two units at most."""
    assert render.format_exact_span(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 bytes"), (1500, "1.5 kB"), (3_400_000, "3.4 MB"), (7e12, "7000 GB")]
)
def test_format_sizes(size, text):
    """In powers of ten."""
    assert render.format_size(size) == text


def test_ended_and_running_nodes_are_known():
    """A node says that it was told to end."""
    ranks = ranks_of(LaunchOptions())
    ranks.process([message(entries=[]), message("leaving", node_rank=1)], 0.0)
    assert (ranks.terminating_nodes(), ranks.running_nodes()) == ({1}, {0, 1})
    ranks.process([message("exit", node_rank=1, code=143, ends=[], note="")], 1.0)
    assert (ranks.has_failed(), ranks.has_succeeded(), ranks.running_nodes()) == (True, False, {0})
    ranks.start_next_attempt()
    assert (ranks.terminating_nodes(), ranks.membership, ranks.attempt) == (frozenset(), None, 1)
