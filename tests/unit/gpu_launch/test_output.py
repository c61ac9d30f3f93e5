"""Ranks' output as it is shown, and the choice and wording of a failure."""

from __future__ import annotations

import pytest

from gpu_launch import failure, render, wire
from gpu_launch.options import Options
from gpu_launch.plan import Plan
from gpu_launch.progress import SILENCE_S, Ranks
from gpu_launch.spec import RankEnd
from gpu_launch.tail import Tail

PLAN = Plan(nnodes=2, nproc_per_node=1, own=True, workers=1, exclude_nodes=("rig1",), model=None)


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
    ranks = Ranks(PLAN, Options(shown_ranks=(0,), redirects="2"))
    entries = [[0, "stdout", 1, "a\n"], [0, "stderr", 1, "hidden\n"], [0, "stdout", 1, "b\n"]]
    assert ranks.take([message(entries=entries)], 0.0) == [("stdout", "[rank 0 · rig1] a\n[rank 0 · rig1] b\n")]
    assert ranks.take([message(entries=entries, attempt=7)], 0.0) == []


def test_passed_over_text_is_said():
    """A rank that writes faster than anybody reads."""
    ranks = Ranks(PLAN, Options())
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
    ranks = Ranks(PLAN, Options())
    ends = [{"rank": 0, "node": "rig1", "exit_code": None, "error": "", "at_ns": 0}]
    ranks.take([message("exit", code=1, ends=ends, said="Address already in use")], 0.0)
    assert ranks.failed()
    assert "torchrun on rig1 failed: Address already in use" in ranks.describe(logs="~/l")


def test_a_silent_node_fails_the_launch():
    """By name, after a deadline."""
    ranks = Ranks(PLAN, Options())
    ranks.take([message(entries=[]), message(node_rank=1, entries=[])], 0.0)
    ranks.take([message(entries=[])], SILENCE_S)
    with pytest.raises(Exception, match="rig2 has not been heard of"):
        ranks.check_alive(SILENCE_S + 1)


def test_progress_lines():
    """Position and holder while waiting; nodes and models while starting."""
    gpu = wire.Gpu(uuid="u", node="rig2", model="RTX 5070")
    worker = wire.Worker(index=0, node="rig2", gpus=(gpu,), state="running", exit_code=None, message=None)
    job = wire.Job(
        id="j", run_id="r", state="waiting", version=1, position=2, waiting_for="RTX 5070 held by ada", workers=(),
        reason=None, renew_within_s=30.0,
    )  # fmt: skip
    assert render.job_text(job, gpus=2, workers=2) == (
        "waiting for 2 GPUs on 2 nodes: position 2 (RTX 5070 held by ada)"
    )
    started = wire.Job(**{**job.__dict__, "state": "starting", "workers": (worker,)})
    assert render.job_text(started, gpus=1, workers=1) == "starting 1 worker on rig2 RTX 5070"
    assert render.nodes_text(started, "rig1 RTX 5090") == "rig1 RTX 5090, rig2 RTX 5070"


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
