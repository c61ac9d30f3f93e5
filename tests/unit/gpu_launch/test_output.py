"""Ranks' output as it is shown, and the choice and wording of a failure."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from gpu_launch import failure, render, wire
from gpu_launch.demand import Demand
from gpu_launch.options import Options
from gpu_launch.plan import Plan
from gpu_launch.progress import SILENCE_S, Ranks
from gpu_launch.roster import Roster
from gpu_launch.spec import RankEnd
from gpu_launch.tail import Tail

PLAN = Plan(
    nnodes=2,
    least_nnodes=2,
    nproc_per_node=1,
    own=True,
    own_cards=(),
    exclude_nodes=("rig1",),
    demand=Demand(),
)
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def ranks_of(options):
    """Ranks of a start on both nodes."""
    ranks = Ranks(PLAN, options)
    ranks.roster = Roster(own=True, workers=(0,), nodes=("rig2",), nproc_per_node=1)
    return ranks


def message(kind="output", node_rank=0, attempt=0, **content):
    """An agent's message."""
    return {"kind": kind, "node_rank": node_rank, "node": f"rig{node_rank + 1}", "attempt": attempt} | content


def test_lines_are_whole_and_prefixed():
    """Chunks are joined until their line ends."""
    lines = render.Lines()
    assert lines.feed(1, "rig2", "stdout", "los", 0.0) == []
    assert lines.feed(0, "rig1", "stdout", "other\n", 0.0) == ["[rank 0 · rig1] other\n"]
    assert lines.feed(1, "rig2", "stdout", "s 1\nloss 2\n", 0.1) == [
        "[rank 1 · rig2] loss 1\n",
        "[rank 1 · rig2] loss 2\n",
    ]


def test_progress_bars_collapse_to_what_a_terminal_shows():
    """Only the last drawing of a line, and seldom while it goes on."""
    lines = render.Lines()
    assert lines.feed(0, "rig1", "stderr", "\r10%\r20%", 0.0) == []
    assert lines.overdue(1.0) == []
    assert lines.overdue(2.0) == [("stderr", "[rank 0 · rig1] 20%\n")]
    assert lines.feed(0, "rig1", "stderr", "\r90%\r100%\r\nend\r\n", 2.1) == [
        "[rank 0 · rig1] 100%\n",
        "[rank 0 · rig1] end\n",
    ]


def test_unended_lines_show_after_a_moment_and_at_the_end():
    """A prompt without a newline is not kept back."""
    lines = render.Lines()
    lines.feed(0, "rig1", "stdout", "loading", 0.0)
    assert lines.overdue(0.2) == []
    assert lines.overdue(0.6) == [("stdout", "[rank 0 · rig1] loading\n")]
    lines.feed(0, "rig1", "stdout", "last", 0.7)
    assert lines.overdue(0.7, everything=True) == [("stdout", "[rank 0 · rig1] last\n")]


def test_the_cap_lets_a_burst_through_and_counts_the_rest():
    """And lets more through as time goes on."""
    cap = render.Cap(rate=10, burst=20)
    assert [cap.take(10, 0.0) for _ in range(3)] == [True, True, False]
    assert cap.skipped() == 1
    assert cap.skipped() == 0
    assert cap.take(10, 1.0)


def test_output_is_shown_as_the_options_say():
    """Streams keep their order; a filtered rank stays silent; old starts are not mixed in."""
    ranks = ranks_of(Options(shown_ranks=(0,), redirects="2"))
    entries = [[0, "stdout", 1, "a\n"], [0, "stderr", 1, "hidden\n"], [0, "stdout", 1, "b\n"]]
    assert ranks.take([message(entries=entries)], 0.0) == [("stdout", "[rank 0 · rig1] a\n[rank 0 · rig1] b\n")]
    assert ranks.take([message(entries=entries, attempt=7)], 0.0) == []


def test_passed_over_text_is_said():
    """A rank that writes faster than anybody reads."""
    ranks = ranks_of(Options())
    ((_, text),) = ranks.take([message(entries=[[0, "stdout", 1, None, 5000], [0, "stdout", 1, "end\n"]])], 0.0)
    assert "5000 bytes passed over" in text


def end(rank, exit_code, error="", at_ns=0):
    """How a rank ended."""
    return RankEnd(rank=rank, node=f"rig{rank + 1}", exit_code=exit_code, error=error, at_ns=at_ns)


OWN = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\nValueError: bad data'
LEFT = 'Traceback (most recent call last):\n  File "t.py", line 9\nRuntimeError: [..] Connection closed by peer [10.0.1.3]:1'


def test_the_rank_with_an_error_of_its_own_is_blamed():
    """Although its victim's clock says that it ended earlier."""
    assert failure.first_failure([end(0, 1, LEFT, 5), end(1, 1, OWN, 9), end(2, None)]).rank == 1


def test_of_two_own_errors_the_earlier_is_blamed():
    """By when it was written, not by rank."""
    assert failure.first_failure([end(0, 1, OWN, 9), end(1, 1, OWN, 5)]).rank == 1


def test_a_killed_rank_is_blamed_before_those_it_left():
    """Out of memory leaves no traceback."""
    assert failure.first_failure([end(0, 1, LEFT, 5), end(1, -9, "", 9), end(2, -15)]).rank == 1


def test_nobody_failed():
    """Nobody is blamed."""
    assert failure.first_failure([end(0, 0), end(1, 0)]) is None


def test_the_text_begins_with_the_own_traceback():
    """Then one line for each other rank, then where the logs are."""
    text = failure.describe(
        [end(0, 1, LEFT, 5), end(1, 1, f"noise\n[rank1]: {OWN}".replace("\n ", "\n[rank1]:  "), 9)], logs="~/l"
    )
    assert text.startswith(f"rank 1 on rig2 failed: exit code 1\n\n{OWN}\n\nrank 0 (rig1): exit code 1, RuntimeError: ")
    assert text.endswith("\nLogs: ~/l")


def test_chained_tracebacks_stay_together():
    """What an exception was raised from is shown as well; an earlier, handled one is not."""
    chained = f"{OWN}\n\nThe above exception was the direct cause of the following exception:\n\n{OWN.replace('bad', 'worse')}"
    assert failure.own_error(f"{OWN}\nwarning: unrelated\n{chained}\n") == chained


def test_without_a_traceback_the_last_lines_are_shown():
    """Such as a syntax error's, or a crash's."""
    assert failure.own_error('  File "x.py", line 1\n    a b\nSyntaxError: invalid syntax\n').endswith(
        "SyntaxError: invalid syntax"
    )
    assert failure.last_line(OWN) == "ValueError: bad data"


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (3, "exit code 3"), (None, "stopped"), (-15, "SIGTERM"), (-99, "signal 99")]
)
def test_exit_codes_in_words(code, text):
    """Signals by name."""
    assert failure.exit_text(code) == text


def test_a_failure_before_any_rank_shows_torchruns_own_words():
    """Such as a port in use."""
    ranks = ranks_of(Options())
    ends = [{"rank": 0, "node": "rig1", "exit_code": None, "error": "", "at_ns": 0}]
    ranks.take([message("exit", code=1, ends=ends, said="Address already in use")], 0.0)
    assert ranks.failed()
    assert "torchrun on rig1 failed: Address already in use" in ranks.describe(logs="~/l")


def test_a_silent_node_fails_the_launch():
    """By name, after a deadline."""
    ranks = ranks_of(Options())
    ranks.take([message(entries=[]), message(node_rank=1, entries=[])], 0.0)
    ranks.take([message(entries=[])], SILENCE_S)
    with pytest.raises(Exception, match="rig2 has not been heard of"):
        ranks.check_alive(SILENCE_S + 1)


def gpu(node, model, memory_mib=0):
    """A GPU."""
    return wire.Gpu(uuid=f"GPU-{node}", node=node, model=model, memory_mib=memory_mib)


def worker(index=0, node="rig2", model="RTX 5070", state="running"):
    """A worker with one GPU."""
    return wire.Worker(
        index=index, node=node, gpus=(gpu(node, model, 12_227),), state=state, exit_code=None, message=None
    )


def job(state, **parts):
    """A job on the wire."""
    values = {"position": None, "waiting_for": None, "workers": (), "reason": None, "renew_within_s": 30.0} | parts
    return wire.Job(id="j", run_id="r", state=state, version=1, **values)


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
def test_who_waits_sees_place_time_and_reason(parts, text):
    """As far as the broker knows them."""
    if "expected_start" in parts:
        parts = parts | {"expected_start": NOW + timedelta(seconds=parts["expected_start"])}
    plan = dataclasses.replace(PLAN, nnodes=3, least_nnodes=3)
    assert render.job_text(job("waiting", **parts), plan, NOW) == f"waiting for 2 GPUs on 2 nodes{text}"


def test_an_elastic_launch_says_between_what():
    """What it waits for is the least."""
    plan = dataclasses.replace(PLAN, nnodes=4, least_nnodes=2, nproc_per_node=2)
    assert render.asked_text(plan) == "2 to 6 GPUs on 1 to 3 nodes"
    assert render.asked_text(dataclasses.replace(plan, least_nnodes=1)) == "2 to 6 GPUs on 1 to 3 nodes"


def test_progress_lines():
    """Nodes and models while starting; a state that is not known as the broker calls it."""
    started = job("starting", workers=(worker(),))
    assert render.job_text(started, PLAN, NOW) == "starting 1 worker on rig2 RTX 5070"
    assert render.nodes_text(started.workers, "rig1 RTX 5090") == "rig1 RTX 5090, rig2 RTX 5070"
    assert render.job_text(job("preempting"), PLAN, NOW) == "preempted, the workers end"
    assert render.job_text(job("a state of tomorrow"), PLAN, NOW) == "the broker says: a state of tomorrow"
    assert render.cards_text([gpu("rig1", "RTX 5090")] * 2) == "2 × RTX 5090"


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
def test_mixed_cards_are_said_with_the_notebooks_own_counted_in(note, own, text):
    """The broker does not know that the notebook's GPU takes part."""
    own_cards = (gpu("rig1", own, 32_607),) if own else ()
    assert render.note_text(job("running", note=note), (worker(),), own_cards) == text


def test_who_left_and_who_still_runs_is_known():
    """A node says that it was told to end; one that is silent for long does not count as busy."""
    ranks = ranks_of(Options())
    ranks.take([message(entries=[]), message("leaving", node_rank=1)], 0.0)
    assert (ranks.leaving(), ranks.busy(1.0)) == ({1}, {0, 1})
    ranks.take([message("exit", node_rank=1, code=143, ends=[], said="")], 1.0)
    assert (ranks.failed(), ranks.ended_well(), ranks.busy(2.0)) == (True, False, {0})
    assert ranks.busy(SILENCE_S + 3) == frozenset()
    ranks.restart()
    assert (ranks.leaving(), ranks.roster, ranks.attempt) == (frozenset(), None, 1)


def test_log_files_are_followed_by_rank_and_stream(tmp_path):
    """Split characters are joined, a reader far behind jumps ahead, another run's files are left alone."""
    for folder in ("run-1_abc", "old_abc"):
        for local in ("0", "1"):
            (tmp_path / folder / "attempt_0" / local).mkdir(parents=True)
            for stream in ("stdout", "stderr"):
                (tmp_path / folder / "attempt_0" / local / f"{stream}.log").write_text(
                    "old\n" if folder[0] == "o" else ""
                )
    tail = Tail(tmp_path, run_id="run-1", first_rank=2, processes=2)
    path = tmp_path / "run-1_abc" / "attempt_0" / "1" / "stdout.log"
    assert tail.read() == []
    path.write_bytes("ü".encode()[:1])
    assert [entry[3] for entry in tail.read()] == [""]
    path.write_bytes("ü\n".encode())
    ((rank, stream, _, text),) = tail.read()
    assert (rank, stream, text) == (3, "stdout", "ü\n")
    with path.open("ab") as file:
        file.write(b"x" * 5_000_000)
    passed, rest = tail.read()
    assert (passed[3], passed[4] + len(rest[3])) == (None, 5_000_000)
    assert tail.end_of(2) == ("", 0)
