"""One step of the pipeline: the tokens that all stages compute at once, and how the next ones are chosen. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Factor of fractions in a step's numbers.
_FRACTION = 1_000_000
_FIELDS = 4


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a sequence's next token is chosen."""

    #: 0 for the most probable token.
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sequence's part of a step; the slot of row N is the step's first slot + N."""

    #: Tokens of the sequence before those of this step.
    start: int
    #: The tokens themselves, the same number in all rows.
    tokens: tuple[int, ...]
    sampling: Sampling = Sampling()


@dataclass(frozen=True, kw_only=True)
class Step:
    """Some tokens of one sequence, or one token of several."""

    first_slot: int
    rows: tuple[Row, ...]
    #: The next token of each row is needed.
    samples: bool

    @property
    def width(self) -> int:
        """Return the number of tokens of each row."""
        return len(self.rows[0].tokens)

    def pack(self) -> list[int]:
        """Return the step without its tokens as numbers; later stages get hidden states in their place."""
        numbers = [self.first_slot, len(self.rows), self.width, int(self.samples)]
        for row in self.rows:
            chosen = row.sampling
            numbers += [row.start, round(chosen.temperature * _FRACTION), round(chosen.top_p * _FRACTION), chosen.seed]
        return numbers


def count_numbers(slots: int) -> int:
    """Return the most numbers that `Step.pack` returns."""
    return 4 + _FIELDS * slots


def unpack(numbers: Sequence[int]) -> Step:
    """Return the step of `Step.pack`; its tokens are 0."""
    first, rows, width, samples = numbers[:4]
    return Step(
        first_slot=first,
        samples=bool(samples),
        rows=tuple(
            Row(
                start=fields[0],
                tokens=(0,) * width,
                sampling=Sampling(temperature=fields[1] / _FRACTION, top_p=fields[2] / _FRACTION, seed=fields[3]),
            )
            for fields in (numbers[4 + _FIELDS * row : 4 + _FIELDS * (row + 1)] for row in range(rows))
        ),
    )
