"""What is decided and said of ranks that stay."""

from __future__ import annotations

import pytest

from gpu_launch.errors import UsageError
from gpu_launch.options import rank_session
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.sessions.cell import (
    INTERRUPT_TIMEOUT_S,
    PEER_TIMEOUT_S,
    CellEnd,
    CellStateMachine,
    CellStep,
    format_failure,
)
from gpu_launch.sessions.channel import OutputCounter
from gpu_launch.sessions.executor import CellOutcome
from gpu_launch.sessions.session import NOTICE_S, IdleAction, IdlePolicy


def test_a_cell_that_ends_well_is_done():
    """When all its ranks have come back."""
    course = CellStateMachine([0, 2])
    course.record_end(0, CellOutcome.DONE, 1.0)
    assert (course.next_step(1000.0), course.running) == (CellStep.WAIT, (2,))
    course.record_end(2, CellOutcome.DONE, 1000.0)
    assert course.next_step(1000.0) is CellStep.DONE


def test_peers_of_a_failed_rank_are_interrupted_then_abandoned():
    """Five seconds after it, and two seconds after that."""
    course = CellStateMachine([0, 1])
    course.record_end(1, CellOutcome.FAILED, 10.0)
    assert course.next_step(10.0 + PEER_TIMEOUT_S - 0.1) is CellStep.WAIT
    assert course.next_step(10.0 + PEER_TIMEOUT_S) is CellStep.INTERRUPT
    assert course.next_step(10.0 + PEER_TIMEOUT_S + INTERRUPT_TIMEOUT_S - 0.1) is CellStep.WAIT
    assert course.next_step(10.0 + PEER_TIMEOUT_S + INTERRUPT_TIMEOUT_S) is CellStep.RESTART
    assert course.running == (0,)


def test_process_group_is_checked_after_a_failed_cell():
    """By themselves, or when they were interrupted."""
    course = CellStateMachine([0, 1])
    course.record_end(1, CellOutcome.FAILED, 10.0)
    course.record_end(0, CellOutcome.DONE, 12.0)
    assert course.next_step(12.0) is CellStep.CHECK
    course = CellStateMachine([0, 1])
    course.request_interrupt()
    assert course.next_step(0.0) is CellStep.INTERRUPT
    course.record_end(0, CellOutcome.INTERRUPTED, 0.1)
    course.record_end(1, CellOutcome.INTERRUPTED, 0.1)
    assert course.next_step(0.1) is CellStep.CHECK


def test_second_interrupt_abandons_ranks_at_once():
    """Whoever is not back by then is given up."""
    course = CellStateMachine([0, 1])
    course.request_interrupt()
    assert course.next_step(0.0) is CellStep.INTERRUPT
    assert course.next_step(0.1) is CellStep.WAIT
    course.request_interrupt()
    assert course.next_step(0.1) is CellStep.RESTART


def test_dead_rank_restarts_the_group():
    """At once: what others hold is of no use without it."""
    course = CellStateMachine([0])
    course.record_end(0, CellOutcome.DONE, 1.0)
    course.mark_lost()
    assert course.next_step(1.0) is CellStep.RESTART


def test_idle_ranks_are_kept_unless_users_wait():
    """And then they get notice first, however long they have been idle."""
    policy = IdlePolicy(600.0, 0.0)
    assert policy.decide(1e6, others_wait=False) is IdleAction.KEEP
    assert policy.decide(600 - NOTICE_S - 1, others_wait=True) is IdleAction.KEEP
    assert policy.decide(600 - NOTICE_S, others_wait=True) is IdleAction.WARN
    assert policy.decide(599.0, others_wait=True) is IdleAction.KEEP
    assert policy.decide(600.0, others_wait=False) is IdleAction.KEEP
    assert policy.decide(600.0, others_wait=True) is IdleAction.END
    late = IdlePolicy(0.0, 0.0)
    assert late.decide(1e6, others_wait=True) is IdleAction.WARN
    assert late.decide(1e6 + NOTICE_S - 1, others_wait=True) is IdleAction.KEEP
    assert late.decide(1e6 + NOTICE_S, others_wait=True) is IdleAction.END


def test_new_cell_cancels_the_idle_notice():
    """The next one is given anew, and the broker is asked only when the answer matters."""
    policy = IdlePolicy(600.0, 0.0)
    assert not policy.should_ask(500.0)
    assert policy.should_ask(590.0)
    assert not policy.should_ask(591.0)
    assert policy.decide(590.0, others_wait=True) is IdleAction.WARN
    policy.record_cell(640.0)
    assert (policy.seconds_idle(650.0), policy.should_ask(650.0)) == (10.0, False)
    assert policy.decide(1240.0, others_wait=True) is IdleAction.WARN


def test_output_is_complete_when_all_bytes_arrived():
    """What was passed over counts, displays count, and a broken character does not hang it."""
    heard = OutputCounter()
    heard.expect(1, [7, 0, 1])
    assert not heard.is_complete()
    heard.count([{"kind": "output", "entries": [[1, "stdout", 0, "é\n"], [0, "stdout", 0, "else"]]}, {"kind": "exit"}])
    assert not heard.is_complete()
    heard.count([{"entries": [[1, "stdout", 0, None, 4]]}])
    assert not heard.is_complete()
    heard.count([{"kind": "display", "rank": 1, "count": 1}])
    assert heard.is_complete()
    heard.expect(1, [8, 0, 1])
    assert not heard.is_complete()
    heard.count([{"entries": [[1, "stdout", 0, "�"]]}])
    assert (heard.is_complete(), heard.total_bytes) == (True, 15)


def end(rank, how, error="", at_ns=0):
    """A rank's end."""
    return CellEnd(rank=rank, node=f"rig{rank + 1}", outcome=how, error=error, at_ns=at_ns)


OWN = "Traceback (most recent call last):\n  Cell In[7], line 3\n    f()\nValueError: bad data"
LEFT = "Traceback (most recent call last):\n  Cell In[7], line 2\nRuntimeError: [..] Connection closed by peer [10.0.1.3]:1"


def test_the_first_failing_ranks_traceback_comes_first_and_once():
    """One line for each way in which others ended; nothing for those that ended well."""
    text = format_failure(
        [
            end(0, CellOutcome.FAILED, LEFT, at_ns=1),
            end(1, CellOutcome.DONE),
            end(2, CellOutcome.FAILED, OWN, at_ns=3),
            end(3, CellOutcome.FAILED, OWN, at_ns=5),
            end(4, CellOutcome.INTERRUPTED),
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
        "ranks 5-6: did not return from the interrupt and were killed",
    ]


def test_gpu_out_of_memory_is_reported_with_numbers():
    """Before the traceback."""
    error = (
        "Traceback (most recent call last):\n  Cell In[1], line 2\ntorch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 2.00 GiB. GPU 0 has a total capacity of 31.36 GiB of which 419.06 MiB is free."
    )
    text = format_failure([CellEnd(rank=0, node="rig1", outcome=CellOutcome.FAILED, error=error, gpu="RTX 5090")])
    head = text.splitlines()[0]
    assert head.startswith("rank 0 on rig1 ran out of GPU memory: ")
    assert "2.00 GiB" in head
    assert "RTX 5090" in head


def test_unresponsive_ranks_are_named():
    """Where none has failed by itself."""
    assert format_failure([end(0, None), end(1, CellOutcome.INTERRUPTED)]) == (
        "rank 0: did not return from the interrupt and was killed\nrank 1: interrupted"
    )


def test_cell_options_and_start_options_are_distinguished():
    """The first ones are no reason for other ranks."""
    asked = rank_session.parse("--nnodes 2 --ranks 2,0 --send a,b --return=loss --model 'RTX 5090' --", cell=True)
    assert asked.start_flags == ("--nnodes", "2", "--model", "RTX 5090")
    assert (asked.ranks, asked.options.send, asked.options.returns) == ((0, 2), ("a", "b"), ("loss",))
    assert (asked.start.nnodes, asked.start.send) == (2, ())
    assert rank_session.parse("--restart", cell=True) == rank_session.RankSessionOptions(restart=True)
    assert rank_session.parse("--stop", cell=False).stop
    assert rank_session.parse("--nnodes 2 -h", cell=True).help


@pytest.mark.parametrize(
    ("line", "cell", "text"),
    [
        ("--detach", True, "--detach is not for ranks that stay"),
        ("--dry-run", True, "--dry-run is not for"),
        ("--max-restarts 2", True, "--max-restarts is not for"),
        ("--nnodes 1:3", True, "a fixed number of nodes, such as --nnodes 3"),
        ("--scavenge", True, "--scavenge is not for"),
        ("--ranks a", True, "--ranks a: use ranks such as 0,2"),
        ("--ranks", True, "--ranks needs a value"),
        ("-- 3", True, "takes no arguments, and '3' is one"),
        ("--stop", True, "--stop stands alone"),
        ("--stop --nnodes 2", False, "--stop stands alone"),
        ("--send a", False, "belong to a cell"),
        ("--nodes 2", True, "There is no flag --nodes"),
        ("'", True, "No closing quotation"),
    ],
)
def test_invalid_session_options_are_refused(line, cell, text):
    """By name, with what would be right."""
    with pytest.raises(UsageError, match=text):
        rank_session.parse(line, cell=cell)


def running(line: str) -> LaunchOptions:
    """The options of ranks that were started so."""
    return rank_session.parse(line, cell=False).start


@pytest.mark.parametrize("asked", ["", "--nnodes 2", "--nnodes=2 --role a", "--nproc-per-node 1"])
def test_same_options_reuse_the_running_ranks(asked):
    """Also only some of them, or a default that was left out."""
    rank_session.check_same(running("--nnodes 2 --role=a"), rank_session.parse(asked, cell=True))


@pytest.mark.parametrize("asked", ["--nnodes 3", "--nproc-per-node 2", "--model A", "--nnodes 1"])
def test_different_options_are_refused_while_ranks_run(asked):
    """One hears of the ranks that stand, and how to get others."""
    with pytest.raises(UsageError, match=r"These ranks are running: %gpu_ranks --nnodes 2\n.*--restart"):
        rank_session.check_same(running("--nnodes 2"), rank_session.parse(asked, cell=True))
