"""What is decided and said of ranks that stay."""

from __future__ import annotations

import pytest

from gpu_launch.errors import UsageError
from gpu_launch.standing import said, words
from gpu_launch.standing.course import INTERRUPT_S, LEFT_S, Course, Step
from gpu_launch.standing.executor import How
from gpu_launch.standing.heard import Heard
from gpu_launch.standing.idle import NOTICE_S, Idle, Patience
from gpu_launch.standing.said import Ended


def test_a_cell_that_ends_well_is_done():
    """When all its ranks have come back."""
    course = Course([0, 2])
    course.end(0, How.DONE, 1.0)
    assert (course.step(1000.0), course.running) == (Step.WAIT, (2,))
    course.end(2, How.DONE, 1000.0)
    assert course.step(1000.0) is Step.DONE


def test_ranks_that_a_failed_one_has_left_are_interrupted_then_given_up():
    """Five seconds after it, and two seconds after that."""
    course = Course([0, 1])
    course.end(1, How.FAILED, 10.0)
    assert course.step(10.0 + LEFT_S - 0.1) is Step.WAIT
    assert course.step(10.0 + LEFT_S) is Step.INTERRUPT
    assert course.step(10.0 + LEFT_S + INTERRUPT_S - 0.1) is Step.WAIT
    assert course.step(10.0 + LEFT_S + INTERRUPT_S) is Step.RENEW
    assert course.running == (0,)


def test_the_group_is_tried_when_all_came_back_but_not_all_well():
    """By themselves, or when they were interrupted."""
    course = Course([0, 1])
    course.end(1, How.FAILED, 10.0)
    course.end(0, How.DONE, 12.0)
    assert course.step(12.0) is Step.CHECK
    course = Course([0, 1])
    course.interrupt()
    assert course.step(0.0) is Step.INTERRUPT
    course.end(0, How.INTERRUPTED, 0.1)
    course.end(1, How.INTERRUPTED, 0.1)
    assert course.step(0.1) is Step.CHECK


def test_a_second_interrupt_does_not_wait():
    """Whoever is not back by then is given up."""
    course = Course([0, 1])
    course.interrupt()
    assert course.step(0.0) is Step.INTERRUPT
    assert course.step(0.1) is Step.WAIT
    course.interrupt()
    assert course.step(0.1) is Step.RENEW


def test_a_dead_rank_costs_the_group():
    """At once: what others hold is of no use without it."""
    course = Course([0])
    course.end(0, How.DONE, 1.0)
    course.die()
    assert course.step(1.0) is Step.RENEW


def test_idle_ranks_stay_unless_others_wait():
    """And then they get notice first, however long they have been idle."""
    patience = Patience(600.0, 0.0)
    assert patience.decide(1e6, is_wanted=False) is Idle.STAY
    assert patience.decide(600 - NOTICE_S - 1, is_wanted=True) is Idle.STAY
    assert patience.decide(600 - NOTICE_S, is_wanted=True) is Idle.WARN
    assert patience.decide(599.0, is_wanted=True) is Idle.STAY
    assert patience.decide(600.0, is_wanted=False) is Idle.STAY
    assert patience.decide(600.0, is_wanted=True) is Idle.END
    late = Patience(0.0, 0.0)
    assert late.decide(1e6, is_wanted=True) is Idle.WARN
    assert late.decide(1e6 + NOTICE_S - 1, is_wanted=True) is Idle.STAY
    assert late.decide(1e6 + NOTICE_S, is_wanted=True) is Idle.END


def test_a_cell_takes_the_notice_back():
    """The next one is given anew, and the broker is asked only when the answer matters."""
    patience = Patience(600.0, 0.0)
    assert not patience.is_to_ask(500.0)
    assert patience.is_to_ask(590.0)
    assert not patience.is_to_ask(591.0)
    assert patience.decide(590.0, is_wanted=True) is Idle.WARN
    patience.touch(640.0)
    assert (patience.idle_s(650.0), patience.is_to_ask(650.0)) == (10.0, False)
    assert patience.decide(1240.0, is_wanted=True) is Idle.WARN


def test_all_output_is_there_when_the_bytes_are():
    """What was passed over counts, and a broken character does not hang it."""
    heard = Heard()
    heard.want(1, [7, 0])
    assert not heard.is_all()
    heard.take([{"kind": "output", "entries": [[1, "stdout", 0, "é\n"], [0, "stdout", 0, "else"]]}, {"kind": "exit"}])
    assert not heard.is_all()
    heard.take([{"entries": [[1, "stdout", 0, None, 4]]}])
    assert heard.is_all()
    heard.want(1, [8, 0])
    assert not heard.is_all()
    heard.take([{"entries": [[1, "stdout", 0, "�"]]}])
    assert (heard.is_all(), heard.total) == (True, 14)


def end(rank, how, error="", at_ns=0):
    """A rank's end."""
    return Ended(rank=rank, node=f"rig{rank + 1}", how=how, error=error, at_ns=at_ns)


OWN = "Traceback (most recent call last):\n  Cell In[7], line 3\n    f()\nValueError: bad data"
LEFT = "Traceback (most recent call last):\n  Cell In[7], line 2\nRuntimeError: [..] Connection closed by peer [10.0.1.3]:1"


def test_the_first_failing_ranks_traceback_comes_first_and_once():
    """One line for each way in which others ended; nothing for those that ended well."""
    text = said.failure_text(
        [
            end(0, How.FAILED, LEFT, at_ns=1),
            end(1, How.DONE),
            end(2, How.FAILED, OWN, at_ns=3),
            end(3, How.FAILED, OWN, at_ns=5),
            end(4, How.INTERRUPTED),
            end(5, None),
            end(6, None),
        ]
    )
    head, _, rest = text.partition("\n\n")
    assert head == "rank 2 on rig3 failed first:"
    assert rest.startswith(f"{OWN}\n\n")
    assert text.count("Traceback") == 1
    assert rest.removeprefix(OWN).strip().splitlines() == [
        "rank 0: lost a peer, RuntimeError: [..] Connection closed by peer [10.0.1.3]:1",
        "rank 3: ValueError: bad data",
        "rank 4: interrupted",
        "ranks 5-6: did not come back from the interrupt, and were killed",
    ]


def test_want_of_gpu_memory_is_told_in_numbers():
    """Before the traceback."""
    error = (
        "Traceback (most recent call last):\n  Cell In[1], line 2\ntorch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 2.00 GiB. GPU 0 has a total capacity of 31.36 GiB of which 419.06 MiB is free."
    )
    text = said.failure_text([Ended(rank=0, node="rig1", how=How.FAILED, error=error, gpu="RTX 5090")])
    head = text.splitlines()[0]
    assert head.startswith("rank 0 on rig1 ran out of GPU memory: ")
    assert "2.00 GiB" in head
    assert "RTX 5090" in head


def test_ranks_that_do_not_come_back_are_named():
    """Where none has failed by itself."""
    assert said.failure_text([end(0, None), end(1, How.INTERRUPTED)]) == (
        "rank 0: did not come back from the interrupt, and was killed\nrank 1: interrupted"
    )


def test_words_of_one_cell_and_of_the_start_are_told_apart():
    """The first ones are no reason for other ranks."""
    asked = words.parse("--nnodes 2 --ranks 2,0 --send a,b --return=loss --model 'RTX 5090' --", cell=True)
    assert asked.launch == ("--nnodes", "2", "--model", "RTX 5090")
    assert (asked.ranks, asked.options.send, asked.options.returns) == ((0, 2), ("a", "b"), ("loss",))
    assert words.start_options(asked.launch).nnodes == 2
    assert words.parse("--restart", cell=True) == words.Words(restart=True)
    assert words.parse("--stop", cell=False).stop
    assert words.parse("--nnodes 2 -h", cell=True).help


@pytest.mark.parametrize(
    ("line", "cell", "text"),
    [
        ("--detach", True, "--detach is not for ranks that stay"),
        ("--dry-run", True, "--dry-run is not for"),
        ("--max-restarts 2", True, "--max-restarts is not for"),
        ("--nnodes 1:3", True, "a fixed number of nodes, such as --nnodes 3"),
        ("--scavenge", True, "--scavenge is not for"),
        ("--ranks a", True, "--ranks a: ranks such as 0,2"),
        ("--ranks", True, "ranks such as 0,2"),
        ("-- 3", True, "takes no arguments, and '3' is one"),
        ("--stop", True, "--stop stands alone"),
        ("--stop --nnodes 2", False, "--stop stands alone"),
        ("--send a", False, "belong to a cell"),
        ("--nodes 2", True, "There is no flag --nodes"),
        ("'", True, "No closing quotation"),
    ],
)
def test_wrong_words_are_refused(line, cell, text):
    """By name, with what would be right."""
    with pytest.raises(UsageError, match=text):
        words.parse(line, cell=cell)


@pytest.mark.parametrize("asked", ["", "--nnodes 2", "--nnodes=2 --role a", "--nproc-per-node 1"])
def test_the_same_words_again_use_the_ranks_that_stand(asked):
    """Also only some of them, or a default that was left out."""
    words.check_same(("--nnodes", "2", "--role=a"), words.parse(asked, cell=True).launch)


@pytest.mark.parametrize("asked", ["--nnodes 3", "--nproc-per-node 2", "--model A", "--nnodes 1"])
def test_other_words_are_no_silent_change(asked):
    """One hears of the ranks that stand, and how to get others."""
    with pytest.raises(UsageError, match=r"These ranks stand: %gpu_ranks --nnodes 2\n.*--restart"):
        words.check_same(("--nnodes", "2"), words.parse(asked, cell=True).launch)
