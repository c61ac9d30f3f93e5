"""Layers in proportion to memory, and what is short."""

from __future__ import annotations

import pytest

from gpu_launch.errors import UsageError
from gpu_launch.prediction.memory_estimate import CardMemory
from gpu_launch.serving import partition
from gpu_launch.serving.partition import ServingNeed
from tests.support.launch.model_folders import describe

NEED = ServingNeed(slots=8, context=4096)


def cards(*gib: int) -> list[CardMemory]:
    return [CardMemory(name=f"{size}G", memory_mib=size * 1024) for size in gib]


def test_layers_follow_the_memory():
    """Every card is about as full as the others; the first and the last one have less room for layers."""
    model, memory = describe(), [24 * 1024, 12 * 1024, 8 * 1024]
    stages = partition.choose_layers(model, memory, NEED)
    assert [layer for layers in stages for layer in layers] == list(range(32))
    parts = [partition.count_stage(model, layers, NEED) / size for layers, size in zip(stages, memory, strict=True)]
    assert max(parts) - min(parts) < 0.15
    assert len(stages[0]) > len(stages[1]) > len(stages[2])


def test_no_division_has_a_less_full_card():
    """Compared with all others, for layers of different size."""
    model = describe(layers=6, layer_bytes=tuple(size << 20 for size in (900, 100, 700, 300, 500, 400)))
    memory = [9000, 6000, 7000]

    def worst(stages):
        needs = [partition.count_stage(model, layers, NEED) for layers in stages]
        return max(need / size for need, size in zip(needs, memory, strict=True))

    others = [
        (range(first), range(first, second), range(second, 6))
        for first in range(1, 5)
        for second in range(first + 1, 6)
    ]
    assert worst(partition.choose_layers(model, memory, NEED)) == min(map(worst, others))


def test_need_counts_weights_caches_and_the_ends():
    """Of one whole tied model its embedding once; more slots and tokens need more."""
    tied, plain = describe(is_tied=True), describe()
    weights = (32 * 400 + 1000) * 1.05
    whole = partition.count_stage(tied, range(32), ServingNeed(slots=1, context=16))
    assert weights + partition.CONTEXT_MIB < whole < weights + partition.CONTEXT_MIB + 200
    assert partition.count_stage(plain, range(32), NEED) > partition.count_stage(tied, range(32), NEED) + 1000
    middle = [partition.count_stage(plain, range(4, 6), ServingNeed(slots=slots, context=4096)) for slots in (1, 2)]
    # Keys and values of two layers for 4096 tokens.
    assert middle[1] - middle[0] == pytest.approx(2 * 2 * 8 * 128 * 2 * 4096 / 2**20 * 1.05, abs=2)


def test_what_is_short_is_said():
    with pytest.raises(
        UsageError, match=r"has 14.5 GiB of weights, and 8 sequences of 4096 tokens need 4.0 GiB of"
    ) as short:
        partition.choose_layers(describe(), [8 * 1024, 8 * 1024], NEED)
    assert "Divided between 2 cards (8.0 GiB + 8.0 GiB), card" in str(short.value)
    assert "GiB are short. Take more cards (--nnodes)" in str(short.value)
    with pytest.raises(UsageError, match="3 cards are more than big has layers, 2: take 2 or less"):
        partition.choose_layers(describe(layers=2), [9999] * 3, NEED)


def test_cluster_is_asked_for_enough_memory():
    """The scheduler may choose the smallest cards that a request allows."""
    model = describe()
    assert partition.check_cards(model, cards(32, 32, 12, 12, 8), 1, NEED) == 32 * 1024
    assert partition.check_cards(model, cards(32, 32, 12, 12, 8), 2, NEED) == 12 * 1024
    assert partition.check_cards(model, cards(32, 12, 8, 8), 3, NEED) == 8 * 1024
    # 32 and 8 GiB would be enough, 8 and 8 would not, and no bound on the memory excludes that.
    assert partition.check_cards(model, cards(32, 8, 8), 2, NEED) is None
    # Cards that report a little less than the bound are granted too.
    close = [CardMemory(name="", memory_mib=size) for size in (12_000, 11_500)]
    assert partition.check_cards(model, close, 2, NEED) == 11_500
    assert partition.check_cards(describe(layer_bytes=()), cards(8), 1, NEED) is None


@pytest.mark.parametrize(
    ("memory", "number", "advice"),
    [
        ((8, 8, 8, 8), 2, "It would fit 3 of the cluster's cards."),
        ((8, 8), 2, "It fits no set of the cluster's 2 cards"),
    ],
)
def test_refusal_says_what_would_fit(memory, number, advice):
    with pytest.raises(UsageError, match=advice):
        partition.check_cards(describe(), cards(*memory), number, NEED)


def test_context_is_the_models_or_less():
    model = describe(context=2048)
    assert partition.check_context(model, None, 8192) == 2048
    assert partition.check_context(describe(context=131072), None, 8192) == 8192
    assert partition.check_context(model, 1000, 8192) == 1000
    with pytest.raises(UsageError, match="--context 4000: big has sequences of 2048 tokens at most"):
        partition.check_context(model, 4000, 8192)
