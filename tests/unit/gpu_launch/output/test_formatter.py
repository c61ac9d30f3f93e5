"""From chunks of ranks' streams to what is shown: whole lines, bars, equal lines once, tracebacks kept back, limits."""

from __future__ import annotations

import pytest

from gpu_launch.output.formatter import (
    CAP_BURST_BYTES,
    LINE_COST,
    MAX_LINE_LENGTH,
    NOTE_PERIOD_S,
    LineBuffer,
    OutputFormatter,
    RateCap,
    collapse_redraws,
    strip_controls,
)
from gpu_launch.output.progress_bars import ProgressTracker
from gpu_launch.output.tracebacks import MAX_HOLD_S

ONE = frozenset({0})
TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\nValueError: bad\n'
ALL = frozenset({0, 1, 2})


def make_formatter():
    """A formatter for ranks on rig1."""
    return OutputFormatter(ProgressTracker())


def flush_text(formatter, active_ranks=ONE, now=0.0, **options):
    """All the text that is shown now."""
    return "".join(text for _, text in formatter.drain(active_ranks, now, **options))


def test_chunks_are_joined_to_lines():
    """Joined until their line ends, each rank and stream for itself."""
    lines = LineBuffer()
    assert lines.feed(1, "stdout", "los", 0.0) == []
    assert lines.feed(0, "stdout", "other\n", 0.0) == ["other"]
    assert lines.feed(1, "stderr", "\n", 0.0) == [""]
    assert lines.feed(1, "stdout", "s 1\nloss 2\r\nrest", 0.1) == ["loss 1", "loss 2"]


def test_overlong_line_is_split():
    """And nothing of it is lost."""
    lines = LineBuffer()
    text = "x" * (MAX_LINE_LENGTH + 1)
    assert lines.feed(0, "stdout", text, 0.0) == [text]
    assert lines.feed(0, "stdout", "y\n", 0.0) == ["y"]


@pytest.mark.parametrize(
    ("line", "seen"),
    [("a", "a"), ("\r10%\r20%", "20%"), ("10%\r20%\r", "20%"), ("\r\r", ""), ("a\rb\r\r", "b")],
)
def test_carriage_returns_collapse_to_what_a_terminal_shows(line, seen):
    """Only the last drawing; a return at the end may still redraw it."""
    assert collapse_redraws(line) == seen
    assert collapse_redraws(line + "\rz") == "z"
    assert collapse_redraws(collapse_redraws(line, keep_end=True)) == seen


def test_incomplete_lines_are_flushed_after_a_delay_and_at_the_end():
    """A prompt without a newline is not kept back; what redraws itself is shown seldom."""
    lines = LineBuffer()
    lines.feed(0, "stdout", "loading", 0.0)
    assert lines.take_overdue(0.2) == []
    assert lines.take_overdue(0.6) == [(0, "stdout", "loading")]
    assert lines.feed(0, "stdout", "\n\nnext\n", 0.6) == ["", "next"]
    lines.feed(0, "stdout", "last", 0.7)
    assert lines.take_overdue(0.7, everything=True) == [(0, "stdout", "last")]
    lines.feed(0, "stdout", "\r10%\r20%", 0.7)
    assert lines.take_overdue(1.5) == []
    assert lines.take_overdue(2.8) == [(0, "stdout", "20%")]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\x1b[31mred\x1b[0m\ttab ü", "\x1b[31mred\x1b[0m\ttab ü"),
        ("\x1b[2J\x1b[1;1Hgone\x1b[A", "gone"),
        ("\x1b]52;c;aGk=\x07paste", "paste"),
        ("\x1b]0;title\x1b\\x", "x"),
        ("bell\x07 back\x08 null\x00 \x7f", "bell back null "),
        ("\x1bcreset", "creset"),
    ],
)
def test_escape_sequences_other_than_colours_are_removed(text, left):
    """A script that prints binary moves no cursor and sets no clipboard."""
    assert strip_controls(text) == left


def test_rate_cap_allows_a_burst_and_refills_over_time():
    """In whole lines, from the first one on."""
    cap = RateCap(rate=10, burst=2 * (10 + LINE_COST))
    lines = ["x" * 10] * 3
    assert cap.consume(lines, 0.0) == 2
    assert cap.consume(lines, 0.0) == 0
    assert cap.consume(lines, (10 + LINE_COST) / 10) == 1
    cap.refund(10 + LINE_COST)
    assert cap.consume(lines, (10 + LINE_COST) / 10) == 1


def test_excess_output_is_truncated_and_its_tail_is_shown():
    """How much was left out is said, and the last lines are there, since they may be what everything ended with."""
    formatter = make_formatter()
    number = 2 * CAP_BURST_BYTES // 30
    formatter.feed(0, "rig1", "stdout", "".join(f"line {index}\n" for index in range(number)) + "done\n", 0.0)
    text = flush_text(formatter, last=True)
    assert text.startswith("[rank 0 · rig1] line 0\n[rank 0 · rig1] line 1\n")
    assert text.endswith("[rank 0 · rig1] done\n")
    lines = text.splitlines()
    (note,) = [line for line in lines if line.startswith("[gpu_launch]")]
    left_out = int(note.split()[1])
    assert note == f"[gpu_launch] {left_out} lines not shown here; the log files have all of it"
    assert left_out + len(lines) - 1 == number + 1
    assert len(text) < 1.5 * CAP_BURST_BYTES


def test_output_of_a_detached_job_is_not_truncated():
    """It goes to a file."""
    formatter = OutputFormatter(ProgressTracker(), shows_all=True)
    lines = 3 * CAP_BURST_BYTES // 100
    formatter.feed(0, "rig1", "stdout", f"{'x' * 99}\n" * lines, 0.0)
    assert flush_text(formatter, last=True).count("\n") == lines


def test_traceback_after_a_progress_bar_is_withheld():
    """tqdm does not end its line before the traceback is written."""
    formatter = make_formatter()
    formatter.feed(0, "rig1", "stderr", f"\r 45%|##  | 45/100 [00:12<00:15, 3.6it/s]{TRACEBACK}", 0.0)
    assert flush_text(formatter, now=0.1) == ""


def test_truncation_notices_are_rate_limited():
    """The first at once, then every two seconds."""
    formatter, told = make_formatter(), []
    chunk = "x" * 100 + "\n"
    for tick in range(90):
        formatter.feed(0, "rig1", "stdout", chunk * 20_000, tick * 0.05)
        told += [tick * 0.05] if "not shown here" in flush_text(formatter, now=tick * 0.05) else []
    assert len(told) == 3
    assert told[1] - told[0] == pytest.approx(NOTE_PERIOD_S)


def test_lines_common_to_all_ranks_count_once():
    """Eight ranks that say the same use no more than one of what may be shown."""
    formatter, ranks = make_formatter(), frozenset(range(8))
    for tick in range(40):
        for rank in ranks:
            formatter.feed(rank, "rig1", "stdout", f"{tick} {'x' * 1000}\n" * 8, tick * 0.05)
        assert flush_text(formatter, ranks, tick * 0.05).count("×8]") == 8


def test_skipped_text_is_reported_and_not_joined():
    """A rank that writes faster than its agent reads."""
    formatter = make_formatter()
    formatter.feed(0, "rig1", "stdout", "beginning of", 0.0)
    formatter.skip(0, "stdout", 5_000_000)
    formatter.feed(0, "rig1", "stdout", "end\n", 0.0)
    assert flush_text(formatter, last=True) == (
        "[rank 0 · rig1] end\n[gpu_launch] 5.0 MB not shown here; the log files have all of it\n"
    )


def test_progress_bars_are_not_output_lines():
    """Of tqdm, drawn over itself, ended by a newline, or followed by something else."""
    steps = ProgressTracker()
    formatter = OutputFormatter(steps)
    formatter.feed(0, "rig1", "stderr", "\r  0%|     | 0/9 [00:00<?, ?it/s]", 0.0)
    formatter.feed(0, "rig1", "stderr", "\r 33%|#    | 3/9 [00:01<00:02,  3.00it/s]", 0.1)
    assert [bar.step for bar in steps.bars()] == [3.0]
    assert flush_text(formatter, now=9.0) == ""
    formatter.feed(0, "rig1", "stderr", "\r100%|#####| 9/9 [00:03<00:00,  3.00it/s]\nwarning\n", 9.1)
    assert flush_text(formatter, now=9.1) == "[rank 0 · rig1] warning\n"
    formatter.feed(0, "rig1", "stderr", "\r 50%|##   | 1/2 [00:01<00:01,  1.00it/s]x.py:3: UserWarning: odd\n", 9.2)
    formatter.feed(0, "rig1", "stderr", "\n\rin:   0%|   | 0/2 [00:00<?, ?it/s]\x1b[A\n", 9.2)
    assert flush_text(formatter, now=9.2) == "[rank 0 · rig1] x.py:3: UserWarning: odd\n[rank 0 · rig1] \n"


def test_the_end_of_a_bar_that_comes_alone_is_not_a_line():
    """Its newline may be in a later chunk than the drawing, also after the drawing was passed on."""
    formatter = OutputFormatter(ProgressTracker())
    drawing = "\r100%|#####| 9/9 [00:03<00:00,  3.00it/s]"
    formatter.feed(0, "rig1", "stderr", drawing, 0.0)
    formatter.feed(0, "rig1", "stderr", "\n", 0.1)
    formatter.feed(0, "rig1", "stderr", drawing, 0.2)
    assert flush_text(formatter, now=9.0) == ""
    formatter.feed(0, "rig1", "stderr", "\nwarning\n", 9.1)
    assert flush_text(formatter, now=9.1) == "[rank 0 · rig1] warning\n"
    formatter.feed(0, "rig1", "stderr", f"\n{drawing}\x1b[A", 9.2)
    assert flush_text(formatter, now=9.2) == ""


def test_traceback_of_a_failing_rank_is_withheld():
    """The failure itself shows it; nor are those of the ranks that it takes with it."""
    formatter = make_formatter()
    formatter.feed(0, "rig1", "stderr", f"careful\n{TRACEBACK}", 0.0)
    assert flush_text(formatter, frozenset({0, 1}), 0.5) == "[rank 0 · rig1] careful\n"
    formatter.end_rank(0, well=False, now=0.6)
    peers = TRACEBACK.replace("\n", "\n[rank1]:").replace("ValueError", "RuntimeError: Connection closed by peer")
    formatter.feed(1, "rig2", "stderr", f"[rank1]:{peers}\n[rank1]:[W1121 12:00:00.1 Proc.cpp:15] warn\nother\n", 0.7)
    formatter.feed(1, "rig2", "stderr", "[rank1]:[E1121 12:00:00.9 Proc.cpp:15] watchdog\n", 0.9)
    assert "Traceback" not in (text := flush_text(formatter, frozenset({1}), 9.0, last=True))
    assert "watchdog" not in text


#: What NCCL's watchdog says on a rank whose peer has ended, shortened.
WATCHDOG = """\
[rank1]:[E1121 23:38:46.851 ProcessGroupNCCL.cpp:612] [Rank 1] Collective WorkNCCL(SeqNum=1) raised an exception: NCCL error
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer
Exception raised from checkForNCCLErrorsInternal at /pytorch/ProcessGroupNCCL.cpp:2770 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7fd416d7305d in libc10.so)
frame #1: c10d::ProcessGroupNCCL::checkForNCCLErrorsInternal(std::shared_ptr<c10d::NCCLComm>&) + 0x380 (0x7fd3622fb160)

[rank1]:[E1121 23:38:46.852 ProcessGroupNCCL.cpp:2303] [PG ID 0 Rank 1]  failure detected by watchdog at work 1
"""


def test_watchdog_message_about_a_lost_peer_is_withheld():
    """It is a consequence, whether it comes before the failure is known or after; in pieces too."""
    for told_at in (0.5, 0.8):
        formatter = make_formatter()
        for at, line in enumerate(WATCHDOG.splitlines(keepends=True)):
            formatter.feed(1, "rig2", "stderr", line, told_at + at / 100)
        formatter.feed(0, "rig1", "stderr", TRACEBACK, 0.6)
        formatter.end_rank(0, well=False, now=0.7)
        formatter.end_rank(1, well=False, now=1.5)
        assert flush_text(formatter, frozenset({1}), 9.0, last=True) == ""


def test_watchdog_message_of_a_rank_that_continues_is_shown():
    """Or is not heard of for a while."""
    formatter = make_formatter()
    formatter.feed(1, "rig2", "stderr", WATCHDOG, 0.0)
    assert flush_text(formatter, frozenset({1}), 0.1) == ""
    formatter.feed(1, "rig2", "stdout", "step 2\n", 1.0)
    assert flush_text(formatter, frozenset({1}), 1.0).replace("[rank 1 · rig2] ", "") == f"{WATCHDOG}step 2\n"
    formatter.feed(1, "rig2", "stderr", WATCHDOG, 2.0)
    assert flush_text(formatter, frozenset({1}), 2.0 + MAX_HOLD_S).replace("[rank 1 · rig2] ", "") == WATCHDOG


def test_logged_traceback_is_shown():
    """As soon as it continues, when it ends well, or after a while; in its place."""
    formatter = make_formatter()
    formatter.feed(0, "rig1", "stderr", TRACEBACK, 0.0)
    assert flush_text(formatter, now=0.1) == ""
    formatter.feed(0, "rig1", "stderr", "going on\n", 1.0)
    assert flush_text(formatter, now=1.0).replace("[rank 0 · rig1] ", "") == f"{TRACEBACK}going on\n"
    formatter.feed(0, "rig1", "stderr", TRACEBACK, 2.0)
    assert flush_text(formatter, now=2.0 + MAX_HOLD_S).replace("[rank 0 · rig1] ", "") == TRACEBACK
    formatter.feed(0, "rig1", "stderr", TRACEBACK, 9.0)
    formatter.end_rank(0, well=True, now=9.1)
    assert flush_text(formatter, now=9.1).replace("[rank 0 · rig1] ", "") == TRACEBACK
    formatter.feed(0, "rig1", "stderr", TRACEBACK, 10.0)
    assert flush_text(formatter, now=10.0, last=True).replace("[rank 0 · rig1] ", "") == TRACEBACK


@pytest.mark.parametrize(
    ("stream", "text"), [("stdout", "step 2\n"), ("stderr", "\r 45%|##  | 45/100 [00:12<00:15, 3.6it/s]")]
)
def test_further_output_shows_that_a_rank_continues(stream, text):
    """On either stream, or by drawing a bar: its traceback was not its end."""
    formatter = make_formatter()
    formatter.feed(0, "rig1", "stderr", TRACEBACK, 0.0)
    formatter.feed(0, "rig1", "stdout", "flushed at the end\n", 0.1)
    assert flush_text(formatter, now=0.1) == "[rank 0 · rig1] flushed at the end\n"
    formatter.feed(0, "rig1", stream, text, 1.0)
    assert flush_text(formatter, now=1.0).replace("[rank 0 · rig1] ", "").startswith(TRACEBACK)


def test_chained_traceback_is_withheld_as_a_whole():
    """Nothing of them shows alone."""
    formatter = make_formatter()
    chained = f"{TRACEBACK}\nThe above exception was the direct cause of the following exception:\n\n{TRACEBACK}more\n"
    formatter.feed(0, "rig1", "stderr", chained, 0.0)
    assert flush_text(formatter, now=0.1) == ""


def test_mute_shows_nothing_and_reset_loses_nothing():
    """What a restart leaves unsaid comes first, then why it restarts."""
    formatter = make_formatter()
    formatter.feed(0, "rig1", "stdout", "unended", 0.0)
    formatter.restart("rank 0 failed", 0.1)
    formatter.feed(0, "rig1", "stdout", "again\n", 0.2)
    assert flush_text(formatter, now=0.2) == "[rank 0 · rig1] unended\nrank 0 failed\n[rank 0 · rig1] again\n"
    formatter.mute()
    formatter.feed(0, "rig1", "stdout", "more\n", 0.3)
    assert flush_text(formatter, now=0.3, last=True) == ""
