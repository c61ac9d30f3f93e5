"""Stacks of ranks: read from faulthandler's text and torch's flight recorder, grouped, and shown."""

from __future__ import annotations

import json

import pytest

from gpu_launch.output import stacks
from gpu_launch.output.stacks import Frame, RankStacks

PACKAGES = "/opt/venv/lib/python3.11/site-packages"
#: Recorded with Python 3.11 and torch 2.13 from a rank of gloo that waits in all_reduce, paths shortened.
REDUCING = f"""\
Thread 0x00007f52297fa6c0 (most recent call first):
  <no Python frame>

Current thread 0x00007f5252f9f2c0 (most recent call first):
  File "{PACKAGES}/torch/distributed/distributed_c10d.py", line 3026 in all_reduce
  File "{PACKAGES}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/ada/train.py", line 88 in step
  File "/home/ada/train.py", line 101 in <module>
  File "{PACKAGES}/gpu_launch/worker/rank_main.py", line 92 in _execute
"""
LOADING = f"""\
Thread 0x00007f5252f9f2c0 (most recent call first):
  File "{PACKAGES}/torch/utils/data/dataloader.py", line 733 in __next__
  File "/home/ada/train.py", line 41 in <module>
"""
MAIN = 0x7F5252F9F2C0


def answer(rank, text=REDUCING, **parts):
    """An agent's answer for a rank."""
    return {"rank": rank, "main": MAIN, "text": text, "problem": "", "trace": ""} | parts


def found(*answers):
    return [stacks.parse_answer(one, f"rig{one['rank'] // 4 + 1}") for one in answers]


def read_source(file, line):
    return {88: "    dist.all_reduce(grad)\n", 41: "for batch in loader:\n"}[line]


def test_main_thread_is_found_by_its_id_else_as_the_oldest():
    frames = stacks.parse_main_thread(REDUCING, MAIN)
    assert frames[2] == Frame(file="/home/ada/train.py", line=88, function="step")
    assert len(frames) == 5
    assert stacks.parse_main_thread(REDUCING, 0x7F52297FA6C0) == ()
    assert stacks.parse_main_thread(REDUCING, 1) == frames
    assert stacks.parse_main_thread("", MAIN) == ()


def test_names_and_unknown_lines_of_other_pythons_are_read():
    """Python 3.14 adds the thread's name; a frame without code has no line."""
    text = 'Current thread 0x0000000000000010 [MainThread] (most recent call first):\n  File "a.py", line ??? in f\n'
    assert stacks.parse_main_thread(text, 16) == (Frame(file="a.py", line=0, function="f"),)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (REDUCING, "in all_reduce at train.py:88 in step"),
        (LOADING, "in __next__ (torch/utils/data/dataloader.py) at train.py:41"),
        ('Thread 0x10 (most recent call first):\n  File "Cell In[3]", line 2 in f\n', "at Cell In[3]:2 in f"),
        (
            f'Thread 0x10 (most recent call first):\n  File "{PACKAGES}/torch/a.py", line 9 in load\n',
            "in load (torch/a.py:9)",
        ),
        ("Thread 0x10 (most recent call first):\n  <no Python frame>\n", "in no Python function"),
    ],
    ids=["collective", "data loader", "cell", "no code of the user", "native thread"],
)
def test_place_names_the_users_line_and_the_function_that_it_called(text, place):
    assert stacks.describe_place(stacks.parse_main_thread(text, MAIN)) == place


def test_ranks_at_the_same_place_are_one_group_and_silent_ones_come_last():
    ranks = [answer(rank) for rank in (0, 1, 2, 4, 5, 6)]
    ranks += [answer(3, LOADING), answer(7, "", problem="does not answer the signal")]
    groups = stacks.group_ranks(found(*ranks), source=read_source)
    assert [(group.ranks, group.place, group.source) for group in groups] == [
        ((0, 1, 2, 4, 5, 6), "in all_reduce at train.py:88 in step", "dist.all_reduce(grad)"),
        ((3,), "in __next__ (torch/utils/data/dataloader.py) at train.py:41", "for batch in loader:"),
        ((7,), "does not answer the signal (rig2)", ""),
    ]
    assert stacks.format_stacks(found(*ranks)).splitlines() == [
        "where the 8 ranks are:",
        "  6 ranks (0-2, 4-6): in all_reduce at train.py:88 in step",
        "  rank 3: in __next__ (torch/utils/data/dataloader.py) at train.py:41",
        "  rank 7: does not answer the signal (rig2)",
    ]


def test_all_threads_are_shown_on_request():
    text = stacks.format_stacks(found(answer(0)), full=True)
    assert text.startswith("where the rank is:\n  rank 0: in all_reduce at train.py:88 in step\n\nrank 0 on rig1\n")
    assert "Thread 0x00007f52297fa6c0 (most recent call first):\n  <no Python frame>\n" in text


def trace(number, name="all_reduce"):
    """The flight recorder of torch 2.13 (version 2.10) with gloo: the fields that are read."""
    entries = [
        {"collective_seq_id": one, "process_group": ["0", "default_pg"], "profiling_name": f"gloo:{name}"}
        for one in range(1, number + 1)
    ]
    sent = {"collective_seq_id": 99, "process_group": ["0", "default_pg"], "profiling_name": "gloo:send"}
    return json.dumps({"entries": [*entries, sent | {"is_p2p": True}], "version": "2.10"})


def test_ranks_that_called_fewer_collectives_are_named():
    ranks = found(*(answer(rank, trace=trace(42)) for rank in range(3)), answer(3, trace=trace(41, "barrier")))
    assert stacks.describe_collectives(ranks) == [
        "collectives of default_pg (gloo): ranks 0-2 called number 42 (all_reduce); rank 3 called number 41 (barrier)"
    ]
    assert stacks.describe_collectives(ranks[:3]) == []
    assert stacks.describe_collectives(found(answer(0))) == []


def test_json_has_groups_and_threads_of_every_rank():
    (group,) = stacks.build_json(
        [RankStacks(rank=1, node="rig1", text="t", frames=(Frame(file="a", line=1, function="f"),))]
    )
    assert group == {
        "ranks": [1],
        "nodes": {"1": "rig1"},
        "place": "at a:1 in f",
        "source": "",
        "frames": [["a", 1, "f"]],
        "threads": {"1": "t"},
    }
