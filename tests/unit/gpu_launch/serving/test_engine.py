"""Slots, chunks, cancels and ends, with a pipeline that adds up."""

from __future__ import annotations

import threading
import time

import pytest

from gpu_launch.serving import steps
from gpu_launch.serving.engine import Engine, EngineFailed, Finish, QueueFull, Sequence
from gpu_launch.serving.steps import Row, Sampling, Step


class Adder:
    """A model whose next token is the last one plus one."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.beats, self.stops = 0, 0
        self.failure: Exception | None = None
        self.before: list = []

    def run(self, step: Step) -> list[int]:
        if self.failure is not None:
            raise self.failure
        self.steps.append(step)
        for act in self.before[len(self.steps) - 1 : len(self.steps)]:
            act()
        return [row.tokens[-1] + 1 for row in step.rows] if step.samples else []

    def send_heartbeat(self) -> None:
        self.beats += 1

    def stop(self) -> None:
        self.stops += 1


def build(runner, **changes) -> Engine:
    values = {"slots": 2, "context": 100, "chunk": 4, "most_waiting": 2, "idle_s": None, "beat_s": 60.0}
    return Engine(runner, **values | changes)


def ask(engine, *prompt, most=3, ends=()) -> tuple[Sequence, list]:
    """Submit a request; return it and what it gets. The engine stops with the last one."""
    items: list = []
    sequence = Sequence(prompt=prompt, max_tokens=most, sampling=Sampling(), ends=frozenset(ends), emit=items.append)
    engine.submit(sequence)
    return sequence, items


def run_until_done(engine, timeout_s: float = 10.0) -> None:
    """Run the engine in this thread until nothing is open."""

    def stop() -> None:
        deadline = time.monotonic() + timeout_s
        while engine.open and time.monotonic() < deadline:
            time.sleep(0.001)
        engine.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    engine.run()
    stopper.join()


def test_requests_share_steps_and_get_their_own_tokens():
    """Three requests for two slots, with prompts in chunks and answers of different lengths."""
    runner = Adder()
    engine = build(runner)
    results = [ask(engine, *prompt, most=most)[1] for prompt, most in (((1, 2, 3, 4, 5), 3), ((10,), 6), ((20, 21), 1))]
    run_until_done(engine)
    assert results[0] == [6, 7, 8, Finish.LENGTH]
    assert results[1] == [11, 12, 13, 14, 15, 16, Finish.LENGTH]
    assert results[2] == [22, Finish.LENGTH]
    first = runner.steps[0]
    assert (first.first_slot, first.rows[0].tokens, first.samples) == (0, (1, 2, 3, 4), False)
    assert [len(step.rows) for step in runner.steps].count(2) > 1
    # The third request begins at the start of the slot that became free.
    third = next(step for step in runner.steps if step.rows[0].tokens == (20, 21))
    assert (third.first_slot, third.rows[0].start) == (0, 0)
    assert runner.stops == 1


def test_rows_begin_where_their_sequence_is():
    """The token of a step is not kept before it."""
    runner = Adder()
    engine = build(runner, slots=1)
    ask(engine, 1, 2, most=3)
    run_until_done(engine)
    assert [(step.rows[0].start, step.rows[0].tokens) for step in runner.steps] == [(0, (1, 2)), (2, (3,)), (3, (4,))]


def test_end_token_and_context_end_an_answer():
    """An end token is not part of the answer."""
    engine = build(Adder(), context=5)
    ended, long = ask(engine, 1, most=50, ends=(3,))[1], ask(engine, 10, 11, 12, most=50)[1]
    run_until_done(engine)
    assert ended == [2, Finish.STOP]
    assert long == [13, 14, Finish.LENGTH]


def test_cancelled_requests_get_no_more_and_free_their_slot():
    """One that runs, and one that waits."""
    runner = Adder()
    engine = build(runner, slots=1)
    first, got = ask(engine, 1, most=1000)
    waiting, nothing = ask(engine, 5, most=1000)
    last = ask(engine, 7, most=1)[1]
    runner.before = [lambda: None, lambda: None, lambda: (engine.cancel(first), engine.cancel(waiting))]
    run_until_done(engine)
    assert got == [2, 3, Finish.STOP]
    assert nothing == [Finish.STOP]
    assert last == [8, Finish.LENGTH]


def test_more_than_may_wait_are_refused():
    engine = build(Adder(), slots=1, most_waiting=1)
    ask(engine, 1)
    ask(engine, 1)
    with pytest.raises(QueueFull):
        ask(engine, 1)
    assert engine.open == 2
    run_until_done(engine)


def test_failure_reaches_all_that_are_open_and_all_that_come_later():
    runner = Adder()
    runner.failure = RuntimeError("no link")
    engine = build(runner, slots=1)
    results = [ask(engine, 1)[1] for _ in range(2)]
    with pytest.raises(RuntimeError, match="no link"):
        engine.run()
    for items in results:
        (item,) = items
        assert isinstance(item, EngineFailed)
        assert "RuntimeError: no link" in str(item)
    assert (engine.open, runner.stops) == (0, 0)
    with pytest.raises(EngineFailed, match="no link"):
        ask(engine, 1)


def test_engine_beats_while_it_waits_and_ends_when_nobody_asks():
    """Each look at the clock is a second later; a request delays the end."""
    runner, now = Adder(), iter(range(1000))
    engine = build(runner, idle_s=40.0, beat_s=0.01, clock=lambda: float(next(now)))
    items = ask(engine, 1, most=2)[1]
    engine.run()
    assert items == [2, 3, Finish.LENGTH]
    assert runner.beats > 2
    assert runner.stops == 1
    with pytest.raises(EngineFailed, match="the server ends"):
        ask(engine, 1)


def test_step_travels_as_numbers():
    """Without its tokens, in no more numbers than are sent."""
    sampling = Sampling(temperature=0.7, top_p=0.95, seed=2**61)
    rows = tuple(Row(start=start, tokens=(9, 9), sampling=sampling) for start in (3, 0))
    step = Step(first_slot=1, rows=rows, samples=True)
    numbers = step.pack()
    assert len(numbers) == steps.count_numbers(2)
    assert max(numbers) < 2**63
    received = steps.unpack([*numbers, 0, 0])
    assert [(row.start, row.tokens, row.sampling) for row in received.rows] == [
        (3, (0, 0), sampling),
        (0, (0, 0), sampling),
    ]
    assert (received.first_slot, received.width, received.samples) == (1, 2, True)
