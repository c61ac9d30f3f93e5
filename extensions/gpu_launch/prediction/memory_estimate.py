"""The GPU memory of fine-tuning a language model, by method and number of cards, and what fits. No torch.

The estimate is for AdamW. `full` has weights in float32 and autocast in bfloat16; `lora` and `qlora` have frozen
weights in bfloat16 and 4 bits (NF4), and adapters in float32. FSDP2 divides all of it but activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpu_launch import units
from gpu_launch.errors import UsageError

_GIB = 1 << 30
#: CUDA's context, cuBLAS's and NCCL's buffers.
_CONTEXT = 1 * _GIB
#: Memory that torch's allocator holds, as a multiple of what tensors need.
_FRAGMENTATION = 1.06
#: Activations with autocast over those of a model in bfloat16, measured: the sums between layers stay in float32.
_AUTOCAST = 1.2
#: Bytes of a parameter of AdamW that is trained in float32: itself, its gradient, two averages.
_FLOAT32, _ADAM = 4, 8
#: 4 bits, and NF4's scales for blocks of 64, which are quantised too.
_NF4 = 0.5 + 1 / 64 + 4 / 64 / 256
#: Copies of the logits in float32 in the loss besides the one that is kept: their gradient, and another type's.
_LOGITS = 2


class Method(StrEnum):
    """A way to fine-tune."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


#: Names of the methods in the estimate.
TITLES: Mapping[Method, str] = {Method.FULL: "all weights", Method.LORA: "LoRA", Method.QLORA: "QLoRA"}


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """The sizes of a model: numbers of parameters, and bytes of what a step keeps."""

    name: str
    batch: int
    sequence: int
    checkpointing: bool
    parameters: int
    #: Parameters in linear layers, except the last, which are those that QLoRA quantises.
    linear: int
    #: Parameters in the largest block, which FSDP gathers at once, and outside all blocks.
    block: int
    outside: int
    #: Parameters of LoRA's matrices.
    adapters: int
    full_activations: int
    lora_activations: int
    #: Bytes of the logits in float32.
    logits: int


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """A card and its memory."""

    name: str
    memory_mib: int


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """The bytes that each of some cards needs; with several cards, FSDP divides what it can."""

    method: Method
    cards: int
    weights: int
    #: Gradients and the optimizer's state.
    training: int
    activations: int
    #: The context, DDP's or FSDP's buffers, and what the allocator holds.
    other: int

    @property
    def total_mib(self) -> int:
        """All of it, in MiB."""
        return -(-(self.weights + self.training + self.activations + self.other) >> 20)


def compute_need(trace: ModelTrace, method: Method, cards: int = 1, *, ranks: int = 1) -> MemoryNeed:
    """Return what each card needs; `cards` above 1 are those that FSDP2 divides the model between.

    Args:
        trace: The model.
        method: How it is trained.
        cards: The number of parts.
        ranks: Cards that train; DDP has buckets for the gradients of several.
    """
    trained = trace.parameters if method is Method.FULL else trace.adapters
    kept = trace.full_activations if method is Method.FULL else trace.lora_activations
    activations = kept + _LOGITS * trace.logits
    if method is Method.FULL:
        weights = trace.parameters * _FLOAT32
        if cards == 1:
            # Autocast keeps copies in bfloat16 during the step.
            weights += trace.parameters * 2
            activations = round(kept * _AUTOCAST) + _LOGITS * trace.logits
    elif method is Method.LORA:
        weights = trace.parameters * 2 + trained * _FLOAT32
    else:
        weights = round(trace.linear * _NF4) + (trace.parameters - trace.linear) * _FLOAT32 + trained * _FLOAT32
    training = trained * (_FLOAT32 + _ADAM)
    buffers = trained * _FLOAT32 if ranks > 1 else 0
    if cards > 1:
        weights, training = -(-weights // cards), -(-training // cards)
        # Two blocks and what is in no block, gathered in bfloat16, and where all is trained their gradients.
        buffers = (2 * trace.block + trace.outside) * (4 if method is Method.FULL else 2)
    held = weights + training + activations + buffers
    other = _CONTEXT + buffers + round(held * (_FRAGMENTATION - 1))
    return MemoryNeed(
        method=method, cards=cards, weights=weights, training=training, activations=activations, other=other
    )


class MemoryEstimate:
    """What `gpu_launch.estimate_memory` returns: print it, or call `check` before a launch."""

    def __init__(self, trace: ModelTrace, cards: Sequence[CardMemory]) -> None:
        #: The sizes of the model.
        self.trace = trace
        #: The cards, the one with the most memory first.
        self.cards = tuple(sorted(cards, key=lambda card: -card.memory_mib))

    def compute(self, method: str, cards: int = 1, *, ranks: int = 1) -> MemoryNeed:
        """Return what each card needs; with several cards, FSDP2 divides the model between them.

        Of several `ranks` with `cards=1`, each has the whole model.

        Raises:
            UsageError: there is no such method, or the number of cards is not positive.
        """
        if method not in set(Method):
            raise UsageError(f"{method!r} is not a method: choose one of {', '.join(Method)}")
        if cards < 1:
            raise UsageError(f"cards is {cards}: give the number of cards that FSDP divides the model between, from 1")
        if method == Method.QLORA and cards > 1:
            raise UsageError("qlora is for one card: FSDP2 does not divide weights of 4 bits. Take lora, or cards=1")
        return compute_need(self.trace, Method(method), cards, ranks=ranks)

    def count_fitting(self, method: str, cards: int = 1) -> int:
        """Return the number of cards that have the memory that each of `cards` cards needs."""
        need = self.compute(method, cards)
        return sum(card.memory_mib >= need.total_mib for card in self.cards)

    def check(self, method: str, cards: int = 1, *, ranks: int = 1) -> MemoryNeed:
        """Return what each card needs, if enough cards have it; call it before a launch.

        Args:
            method: `full`, `lora` or `qlora`.
            cards: The number of cards that FSDP2 divides the model between; 1 without FSDP.
            ranks: The number of cards that train, each with the whole model or its part of it.

        Raises:
            UsageError: says what is short, by how much, and what would fit.
        """
        need, number = self.compute(method, cards, ranks=ranks), max(cards, ranks)
        if number > len(self.cards):
            raise UsageError(f"{number} cards are asked for, and there are {len(self.cards)}")
        smallest = self.cards[number - 1]
        if smallest.memory_mib >= need.total_mib:
            return need
        title = TITLES[need.method] + (f" with FSDP over {cards} cards" if cards > 1 else "")
        which = "the largest card" if number == 1 else f"number {number} of the cards by memory"
        fitting = self.list_fitting()
        advice = f"What fits: {'; '.join(fitting)}." if fitting else "Nothing fits: take a smaller model, or 4 bits."
        raise UsageError(
            f"{self.trace.name} does not fit: training {title} with {self.trace.batch} × {self.trace.sequence} tokens "
            f"needs {format_gib(need.total_mib)} of a card, and {which}, {smallest.name}, has "
            f"{format_gib(smallest.memory_mib)}: {format_gib(need.total_mib - smallest.memory_mib)} are short. {advice}"
        )

    def list_fitting(self) -> list[str]:
        """Return what fits, one phrase each: methods on one card, and the fewest cards for FSDP."""
        phrases = []
        for method in Method:
            if number := self.count_fitting(method):
                phrases.append(f"{TITLES[method]} on one card ({number} of {len(self.cards)} have the memory)")
            elif method is not Method.QLORA and (cards := self.find_fewest(method)):
                phrases.append(f"{TITLES[method]} with FSDP over {cards} cards")
        return phrases

    def find_fewest(self, method: str) -> int | None:
        """Return the fewest cards, from 2, between which FSDP2 can divide the model; None if all are not enough."""
        return next(
            (cards for cards in range(2, len(self.cards) + 1) if self.count_fitting(method, cards) >= cards), None
        )

    def __str__(self) -> str:
        trace = self.trace
        head = (
            f"{trace.name}: {trace.parameters / 1e9:.3g} billion parameters, {trace.batch} × {trace.sequence} tokens "
            f"on each card, activations {'computed again' if trace.checkpointing else 'kept'} for the gradients, AdamW"
        )
        rows: list[tuple[str, ...]] = [("method", "weights", "training", "activations", "other", "each card", "fits")]
        for method in Method:
            rows.append(self._build_row(self.compute(method)))
            if method is not Method.QLORA and len(self.cards) > 1:
                rows.append(self._build_row(self.compute(method, self.find_fewest(method) or len(self.cards))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([head, "", *lines, "", "GiB of each card. Training: gradients and the optimizer's state."])

    def _repr_pretty_(self, printer: object, _cycle: object) -> None:
        printer.text(str(self))  # type: ignore[attr-defined]

    def _build_row(self, need: MemoryNeed) -> tuple[str, ...]:
        title = TITLES[need.method] + (f", FSDP over {need.cards}" if need.cards > 1 else "")
        parts = (need.weights, need.training, need.activations, need.other)
        return (title, *(f"{part / _GIB:.1f}" for part in parts), f"{need.total_mib / 1024:.1f}", self._describe(need))

    def _describe(self, need: MemoryNeed) -> str:
        if not self.cards:
            return "no card is known"
        number = sum(card.memory_mib >= need.total_mib for card in self.cards)
        if number >= need.cards:
            return f"{number} of {len(self.cards)} cards"
        card = self.cards[need.cards - 1]
        return f"no: {format_gib(need.total_mib - card.memory_mib)} short on {card.name}"


def parse_cards(sizes: Sequence[str]) -> list[CardMemory]:
    """Return cards of these sizes, such as `24G`.

    Raises:
        UsageError: one of them is not a size.
    """
    if isinstance(sizes, str):
        raise UsageError(f'cards is a list of sizes, such as ["24G", "12G"], not {sizes!r}')
    return [
        CardMemory(name=f"card {number} ({size})", memory_mib=units.parse_memory("cards", size))
        for number, size in enumerate(sizes)
    ]


def format_gib(mib: int) -> str:
    """Return a size with one digit after the point, such as `31.8 GiB`."""
    return f"{mib / 1024:.1f} GiB"
