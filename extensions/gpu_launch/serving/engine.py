"""Which sequences are computed next: slots, prompts in chunks, one token of all at a time. No torch.

One thread owns the pipeline. Requests come from another one, and get their tokens through a function of theirs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gpu_launch.serving.steps import Row, Sampling, Step

_POLL_S = 0.5  # seconds between checks of the idle time


class Finish(StrEnum):
    """Why a sequence ended, as OpenAI's API calls it."""

    STOP = "stop"
    LENGTH = "length"


class EngineFailed(Exception):
    """A rank failed: no sequence is computed any more."""


class QueueFull(Exception):
    """The maximum number of requests waits already."""


class StepRunner(Protocol):
    """What computes steps: a `Pipeline`."""

    def run(self, step: Step) -> list[int]: ...

    def send_heartbeat(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One request: its prompt, and how far it is."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    #: Tokens that end it.
    ends: frozenset[int]
    #: Gets each token, then why there are no more: a `Finish`, or what failed. Called in the engine's thread.
    emit: Callable[[int | Finish | EngineFailed], None]
    #: Tokens whose keys and values are kept, and those that were generated.
    done: int = 0
    tokens: list[int] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def is_prompting(self) -> bool:
        """Return whether a part of the prompt is not computed yet."""
        return self.done < len(self.prompt)


class Engine:
    """The queue and the slots."""

    def __init__(
        self,
        runner: StepRunner,
        *,
        slots: int,
        context: int,
        chunk: int,
        most_waiting: int,
        idle_s: float | None,
        beat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_s` without a request end it; None for never."""
        self._runner, self._context, self._chunk = runner, context, chunk
        self._most_waiting, self._idle_s, self._beat_s, self._clock = most_waiting, idle_s, beat_s, clock
        self._slots: list[Sequence | None] = [None] * slots
        self._arrivals: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._lock = threading.Lock()
        self._count = 0
        self._is_stopping = False
        self._error: EngineFailed | None = None
        self._last_used = self._last_step = clock()

    @property
    def error(self) -> EngineFailed | None:
        """Return why it ended, if a rank failed."""
        return self._error

    @property
    def open(self) -> int:
        """Return the number of sequences that wait or run."""
        return self._count

    def submit(self, sequence: Sequence) -> None:
        """Take a request.

        Raises:
            QueueFull: too many wait.
            EngineFailed: it has ended.
        """
        with self._lock:
            if self._error is not None or self._is_stopping:
                raise self._error or EngineFailed("the server ends")
            if self._count >= len(self._slots) + self._most_waiting:
                raise QueueFull
            self._count += 1
            # Within the lock: an engine that ends takes what is there, and nothing comes later.
            self._arrivals.put(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Compute no more tokens of a request; it gets none after this step."""
        sequence.is_cancelled = True

    def stop(self) -> None:
        """End after the current step; open requests fail."""
        self._is_stopping = True
        self._arrivals.put(None)

    def run(self) -> None:
        """Compute until `stop`, until nobody asks for `idle_s`, or until a rank fails: then it raises what failed."""
        reason = EngineFailed("the server ends")
        try:
            while not self._is_stopping and not self._is_idle_too_long():
                self._take_arrivals()
                if not self._compute():
                    self._wait()
            with self._lock:
                self._is_stopping = True
            self._runner.stop()
        except BaseException as error:
            reason = EngineFailed(f"a part of the model failed: {type(error).__name__}: {error}")
            raise
        finally:
            with self._lock:
                self._error = reason
            self._take_arrivals()
            for sequence in (*self._waiting, *self._slots):
                if sequence is not None:
                    self._end(sequence, reason)

    def _is_idle_too_long(self) -> bool:
        with self._lock:
            if self._count:
                self._last_used = self._clock()
            is_over = self._idle_s is not None and self._clock() - self._last_used >= self._idle_s
            # In the same moment as `submit`: a request is either taken or refused.
            self._is_stopping |= is_over
            return is_over

    def _wait(self) -> None:
        if self._clock() - self._last_step >= self._beat_s:
            self._runner.send_heartbeat()
            self._last_step = self._clock()
        try:
            self._add(self._arrivals.get(timeout=min(_POLL_S, self._beat_s)))
        except queue.Empty:
            return

    def _take_arrivals(self) -> None:
        while True:
            try:
                self._add(self._arrivals.get_nowait())
            except queue.Empty:
                break
        for slot, sequence in enumerate(self._slots):
            if sequence is not None and sequence.is_cancelled:
                self._slots[slot] = None
                self._end(sequence, Finish.STOP)
        for sequence in [sequence for sequence in self._waiting if sequence.is_cancelled]:
            self._waiting.remove(sequence)
            self._end(sequence, Finish.STOP)
        for slot in range(len(self._slots)):
            if self._slots[slot] is None and self._waiting:
                self._slots[slot] = self._waiting.popleft()

    def _add(self, sequence: Sequence | None) -> None:
        if sequence is not None:
            self._waiting.append(sequence)

    def _compute(self) -> bool:
        """Compute a part of one prompt, then a token of each sequence that has its prompt; return whether any did."""
        prompting = next(
            (slot for slot, item in enumerate(self._slots) if item is not None and item.is_prompting), None
        )
        running = [slot for slot, item in enumerate(self._slots) if item is not None and not item.is_prompting]
        if prompting is not None:
            self._compute_prompt(prompting)
        if running:
            self._compute_tokens(running)
        return prompting is not None or bool(running)

    def _compute_prompt(self, slot: int) -> None:
        sequence = self._slots[slot]
        assert sequence is not None  # noqa: S101 - for the type checker
        part = sequence.prompt[sequence.done : sequence.done + self._chunk]
        is_whole = sequence.done + len(part) == len(sequence.prompt)
        row = Row(start=sequence.done, tokens=part, sampling=sequence.sampling)
        tokens = self._run(Step(first_slot=slot, rows=(row,), samples=is_whole))
        sequence.done += len(part)
        if is_whole:
            self._add_token(slot, sequence, tokens[0])

    def _compute_tokens(self, running: list[int]) -> None:
        rows = []
        for slot in range(max(running) + 1):
            item = self._slots[slot]
            # Rows between have a token that nobody sees; what it leaves is written over by the next one there.
            start = 0 if item is None else item.done
            token = item.tokens[-1] if item is not None and slot in running else 0
            rows.append(Row(start=start, tokens=(token,), sampling=Sampling() if item is None else item.sampling))
        tokens = self._run(Step(first_slot=0, rows=tuple(rows), samples=True))
        for slot in running:
            sequence = self._slots[slot]
            assert sequence is not None  # noqa: S101 - for the type checker
            sequence.done += 1
            self._add_token(slot, sequence, tokens[slot])

    def _run(self, step: Step) -> list[int]:
        tokens = self._runner.run(step)
        self._last_step = self._clock()
        return tokens

    def _add_token(self, slot: int, sequence: Sequence, token: int) -> None:
        """Give a sequence its next token, and end it if that is its last."""
        finish: Finish | None = None
        if token in sequence.ends:
            finish = Finish.STOP
        else:
            sequence.tokens.append(token)
            if not sequence.is_cancelled:
                sequence.emit(token)
            if (
                len(sequence.tokens) >= sequence.max_tokens
                or len(sequence.prompt) + len(sequence.tokens) >= self._context
            ):
                finish = Finish.LENGTH
        if finish is not None:
            self._slots[slot] = None
            self._end(sequence, finish)

    def _end(self, sequence: Sequence, how: Finish | EngineFailed) -> None:
        with self._lock:
            self._count -= 1
            self._last_used = self._clock()
        sequence.emit(how)
