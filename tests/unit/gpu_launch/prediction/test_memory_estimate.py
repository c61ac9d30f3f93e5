"""What fine-tuning needs of each card, and what fits."""

from __future__ import annotations

import dataclasses

import pytest

from gpu_launch.errors import UsageError
from gpu_launch.prediction.memory_estimate import (
    CardMemory,
    MemoryEstimate,
    Method,
    ModelTrace,
    compute_need,
    parse_cards,
)

GIB = 1 << 30
#: A Llama of 8 billion parameters, 1 × 2048 tokens.
TRACE = ModelTrace(
    name="llama-8b",
    batch=1,
    sequence=2048,
    checkpointing=True,
    parameters=8_030_261_248,
    linear=6_979_321_856,
    block=218_112_000,
    outside=1_050_677_248,
    adapters=41_943_040,
    full_activations=2_049_007_628,
    lora_activations=2_208_243_468,
    logits=1_050_673_152,
)
CLOSET = [
    CardMemory(name="RTX 5060 on rig3", memory_mib=8151),
    CardMemory(name="RTX 5090 on rig1", memory_mib=32607),
    CardMemory(name="RTX 5070 on rig2", memory_mib=12227),
    CardMemory(name="RTX 5090 on rig2", memory_mib=32607),
]


@pytest.fixture
def estimate() -> MemoryEstimate:
    return MemoryEstimate(TRACE, CLOSET)


def test_all_weights_have_16_bytes_each_and_a_copy_for_autocast() -> None:
    """Weights, gradients and two averages in float32; DDP needs buckets for the gradients once more."""
    need = compute_need(TRACE, Method.FULL)
    assert (need.weights, need.training) == (TRACE.parameters * 6, TRACE.parameters * 12)
    several = compute_need(TRACE, Method.FULL, ranks=2)
    assert several.total_mib - need.total_mib == pytest.approx(1.06 * TRACE.parameters * 4 / (1 << 20), rel=0.001)


def test_adapters_need_little_besides_the_frozen_weights() -> None:
    """In bfloat16, and in 4 bits with the embeddings in float32."""
    lora, qlora = compute_need(TRACE, Method.LORA), compute_need(TRACE, Method.QLORA)
    assert lora.weights == TRACE.parameters * 2 + TRACE.adapters * 4
    assert 0.5 * TRACE.linear < qlora.weights - 4 * (TRACE.parameters - TRACE.linear + TRACE.adapters)
    assert qlora.weights - 4 * (TRACE.parameters - TRACE.linear + TRACE.adapters) < 0.53 * TRACE.linear
    assert lora.training == qlora.training == TRACE.adapters * 12
    assert (lora.total_mib // 1024, qlora.total_mib // 1024) == (21, 13)


def test_fsdp_divides_weights_and_training_and_gathers_two_blocks() -> None:
    """Activations are not divided."""
    one, four = compute_need(TRACE, Method.FULL), compute_need(TRACE, Method.FULL, 4)
    assert four.training * 4 == pytest.approx(one.training, rel=1e-6)
    assert four.weights == TRACE.parameters  # 4 bytes for a quarter of them
    assert four.activations < one.activations
    assert four.other > (2 * TRACE.block + TRACE.outside) * 4
    assert compute_need(TRACE, Method.LORA, 4).other < four.other


def test_more_tokens_need_more_memory_for_activations_alone() -> None:
    double = dataclasses.replace(TRACE, lora_activations=2 * TRACE.lora_activations, logits=2 * TRACE.logits)
    before, after = compute_need(TRACE, Method.LORA), compute_need(double, Method.LORA)
    assert (after.weights, after.training) == (before.weights, before.training)
    assert after.activations == 2 * before.activations


def test_table_says_what_fits_and_by_how_much_the_rest_is_short(estimate: MemoryEstimate) -> None:
    lines = {line.partition("  ")[0]: line.split("  ")[-1].strip() for line in str(estimate).splitlines()[3:8]}
    assert lines == {
        "all weights": "no: 116.4 GiB short on RTX 5090 on rig1",
        "all weights, FSDP over 4": "no: 34.7 GiB short on RTX 5060 on rig3",
        "LoRA": "2 of 4 cards",
        "LoRA, FSDP over 2": "2 of 4 cards",
        "QLoRA": "2 of 4 cards",
    }
    assert "8.03 billion parameters, 1 × 2048 tokens" in str(estimate)


def test_what_does_not_fit_is_refused_with_what_would(estimate: MemoryEstimate) -> None:
    """The thing, how much is short, on which card, and the remedy."""
    with pytest.raises(UsageError) as refused:
        estimate.check("full")
    assert str(refused.value) == (
        "llama-8b does not fit: training all weights with 1 × 2048 tokens needs 148.2 GiB of a card, and the largest "
        "card, RTX 5090 on rig1, has 31.8 GiB: 116.4 GiB are short. What fits: LoRA on one card (2 of 4 have the memory); "
        "QLoRA on one card (2 of 4 have the memory)."
    )
    with pytest.raises(UsageError, match=r"number 3 of the cards by memory, RTX 5070 on rig2, has 11\.9 GiB"):
        estimate.check("lora", ranks=3)
    assert estimate.check("lora", ranks=2).total_mib < 32607


def test_fsdp_over_more_cards_is_advised_where_one_is_too_small() -> None:
    """The fewest that are enough."""
    cards = [CardMemory(name=f"card {number}", memory_mib=48 << 10) for number in range(6)]
    estimate = MemoryEstimate(TRACE, cards)
    assert (estimate.find_fewest("full"), estimate.find_fewest("lora")) == (4, 2)
    with pytest.raises(UsageError, match="all weights with FSDP over 4 cards; LoRA on one card"):
        estimate.check("full", cards=3)
    assert estimate.check("full", cards=4).cards == 4
    tiny = MemoryEstimate(TRACE, parse_cards(["4G"]))
    with pytest.raises(UsageError, match="Nothing fits: take a smaller model"):
        tiny.check("qlora")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dora",), "'dora' is not a method: choose one of full, lora, qlora"),
        (("lora", 0), "cards is 0"),
        (("qlora", 2), "FSDP2 does not divide weights of 4 bits"),
        (("lora", 5), "5 cards are asked for, and there are 4"),
    ],
)
def test_wrong_questions_are_refused(estimate: MemoryEstimate, arguments: tuple[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        estimate.check(*arguments)


def test_sizes_of_cards_have_units() -> None:
    assert [card.memory_mib for card in parse_cards(["24G", "512M"])] == [24576, 512]
    with pytest.raises(UsageError, match="cards 24: a size with its unit is needed"):
        parse_cards(["24"])
    with pytest.raises(UsageError, match="cards is a list of sizes"):
        parse_cards("24G")
