"""How a model's layers are divided between cards, in proportion to their memory, and what is short. No torch.

A stage is what one card computes: some layers in a row, the first one with the embedding, the last one with the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_launch.errors import UsageError
from gpu_launch.prediction.memory_estimate import CardMemory, format_gib
from gpu_launch.serving.model_files import ModelDescription

_MIB = 1 << 20
#: CUDA's context, cuBLAS's and NCCL's buffers, and what torch's allocator holds over what tensors need.
CONTEXT_MIB = 1024
_FRAGMENTATION = 1.05
#: The broker's own: a card sold as 32 GB reports some 2 % less.
MEMORY_TOLERANCE = 0.95
#: Tokens of a prompt that are computed at once.
CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class ServingNeed:
    """What must be in memory besides the weights: sequences at the same time, and tokens of each."""

    slots: int
    context: int

    @property
    def tokens(self) -> int:
        """Return the tokens whose keys and values are kept."""
        return self.slots * self.context


def check_context(model: ModelDescription, context: int | None, default: int) -> int:
    """Return the longest sequence that is served: as asked, else the model's, `default` at most.

    Raises:
        UsageError: the model has no such long sequences.
    """
    if context is None:
        return min(default, model.context)
    if context > model.context:
        raise UsageError(f"--context {context}: {model.name} has sequences of {model.context} tokens at most.")
    return context


def count_layer(model: ModelDescription, layer: int, need: ServingNeed) -> int:
    """Return the bytes of a layer and its part of the caches."""
    return model.layer_bytes[layer] + model.count_cache(need.tokens)


def count_working(model: ModelDescription, need: ServingNeed, *, is_last: bool) -> int:
    """Return the bytes of what one step computes in a stage besides its result."""
    rows = max(CHUNK, need.slots)
    # The hidden states with their residual, query, key and value, and the two halves of the feed-forward layer.
    states = rows * (6 * model.hidden + 3 * model.intermediate) * model.element
    # The mask, and the scores of one kernel's tile are small beside it.
    mask = CHUNK * need.context + need.slots * need.context
    logits = need.slots * model.vocabulary * 4 * 4 if is_last else 0
    return states + mask + logits


def count_stage(model: ModelDescription, layers: range, need: ServingNeed) -> int:
    """Return the MiB that the card of a stage needs."""
    is_last = layers.stop == model.layers
    held = sum(count_layer(model, layer, need) for layer in layers)
    held += (model.first_bytes if layers.start == 0 else 0) + (model.last_bytes if is_last else 0)
    if layers.start == 0 and is_last and model.is_tied:
        held -= model.embedding_bytes
    held += count_working(model, need, is_last=is_last)
    return -(-round(held * _FRAGMENTATION) // _MIB) + CONTEXT_MIB


def choose_layers(model: ModelDescription, memory_mib: Sequence[int], need: ServingNeed) -> tuple[range, ...]:
    """Return the layers of each stage, such that the fullest card is as empty as possible, as a part of its memory.

    Args:
        model: The model.
        memory_mib: The memory of each card, by rank.
        need: What is in memory besides the weights.

    Raises:
        UsageError: there are more cards than layers, or the model does not fit them: what is short, and where.
    """
    _check_number(model, len(memory_mib))
    best = _minimize_fullest(model, memory_mib, need)
    for rank, (layers, memory) in enumerate(zip(best, memory_mib, strict=True)):
        needed = count_stage(model, layers, need)
        if needed > memory:
            raise UsageError(
                f"{_describe_need(model, memory_mib, need)}, card {rank} needs {format_gib(needed)} and has "
                f"{format_gib(memory)}: {format_gib(needed - memory)} are short. Take more cards (--nnodes) or larger "
                "ones (--memory), or less of --context or --slots."
            )
    return best


def _minimize_fullest(model: ModelDescription, memory_mib: Sequence[int], need: ServingNeed) -> tuple[range, ...]:
    """Return the division whose largest ratio of need to memory is smallest, by dynamic programming over ranks."""
    layers = model.layers
    #: For each number of layers that the ranks so far have: the smallest largest ratio, and where each begins.
    states: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for rank, memory in enumerate(memory_mib):
        later = len(memory_mib) - rank - 1
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (ratio, begins) in states.items():
            ends = [layers] if not later else range(begin + 1, layers - later + 1)
            for end in ends:
                own = count_stage(model, range(begin, end), need) / max(1, memory)
                worst = max(ratio, own)
                if end not in following or worst < following[end][0]:
                    following[end] = (worst, (*begins, begin))
        states = following
    begins = states[layers][1]
    return tuple(range(begin, end) for begin, end in zip(begins, (*begins[1:], layers), strict=True))


def _check_number(model: ModelDescription, number: int) -> None:
    if number > model.layers:
        raise UsageError(
            f"{number} cards are more than {model.name} has layers, {model.layers}: take {model.layers} or less."
        )


def _describe_need(model: ModelDescription, memory_mib: Sequence[int], need: ServingNeed) -> str:
    total = format_gib(-(-model.total_bytes // _MIB))
    caches = format_gib(-(-model.count_cache(need.tokens) * model.layers // _MIB))
    cards = " + ".join(format_gib(size) for size in memory_mib)
    return (
        f"{model.name} does not fit: it has {total} of weights, and {need.slots} sequences of {need.context} tokens "
        f"need {caches} of caches. Divided between {len(memory_mib)} card{'s' if len(memory_mib) > 1 else ''} ({cards})"
    )


def check_cards(model: ModelDescription, cards: Sequence[CardMemory], number: int, need: ServingNeed) -> int | None:
    """Return the memory in MiB that each of `number` cards must have; None if that is not known, or not enough.

    Raises:
        UsageError: no cards of the cluster fit it, whoever holds them: what is short, and how many would be enough.
    """
    _check_number(model, number)
    known = sorted((card.memory_mib for card in cards if card.memory_mib), reverse=True)
    if not model.layer_bytes or len(known) < number:
        return None
    try:
        choose_layers(model, known[:number], need)
    except UsageError as error:
        raise UsageError(f"{error} {_advise(model, known, number, need)}") from None
    return choose_least_memory(model, known, number, need)


def choose_least_memory(model: ModelDescription, known: Sequence[int], number: int, need: ServingNeed) -> int | None:
    """Return the memory in MiB with which any `number` of the cards fit the model; None if no bound ensures that.

    The scheduler chooses the cards, so that the smallest ones that a request allows must be enough.

    Args:
        model: The model.
        known: The memory of each card.
        number: The number of cards.
        need: What is in memory besides the weights.
    """
    for least in sorted(set(known)):
        # A request for that memory also accepts a card that reports a little less.
        allowed = sorted(size for size in known if size >= least * MEMORY_TOLERANCE)[:number]
        if len(allowed) < number:
            return None
        try:
            choose_layers(model, allowed, need)
        except UsageError:
            continue
        return least
    return None


def _advise(model: ModelDescription, known: Sequence[int], number: int, need: ServingNeed) -> str:
    for more in range(number + 1, min(len(known), model.layers) + 1):
        try:
            choose_layers(model, known[:more], need)
        except UsageError:
            continue
        return f"It would fit {more} of the cluster's cards."
    return f"It fits no set of the cluster's {len(known)} cards with these settings."


def format_stages(
    model: ModelDescription, stages: Sequence[range], memory_mib: Sequence[int], need: ServingNeed
) -> str:
    """Return one line for each stage, for people."""
    return "\n".join(
        f"card {rank}: layers {layers.start}-{layers.stop - 1}, {format_gib(count_stage(model, layers, need))} of "
        f"{format_gib(memory)}"
        for rank, (layers, memory) in enumerate(zip(stages, memory_mib, strict=True))
    )
