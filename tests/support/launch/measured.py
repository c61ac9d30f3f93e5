"""Figures of a bench and a profile, as measured ones have them; the numbers are round ones for arithmetic."""

from __future__ import annotations

from dataclasses import replace

from gpu_launch.prediction.figures import Bench, Bucket, Card, Link, Network, StepProfile
from gpu_launch.training.comm_modes import CommMode

CARD = Card(node="rig1", device="RTX 5090", flops=1e13, memory_mib=32_000, read_bytes_s=1e9)
#: 2.5 Gbit/s.
NETWORK = Network(latency_s=0.001, bytes_s=312.5e6, bf16_bytes_s=312.5e6)
SIZES = {CommMode.EXACT: 25_000_000, CommMode.BF16: 12_500_000, CommMode.POWERSGD: 250_000, CommMode.LOCAL: 0}
PROFILE = StepProfile(
    script="train.py",
    card=CARD,
    steps=20,
    input_s=0.01,
    compute_s=0.3,
    update_s=0.02,
    buckets=(Bucket(ready_s=0.2, sizes=SIZES), Bucket(ready_s=0.3, sizes=SIZES)),
    compress_s={CommMode.BF16: 0.002, CommMode.POWERSGD: 0.006},
    parameter_bytes=50_000_000,
    peak_memory_mib=10_000,
)


def build_bench(*flops: float, network: Network = NETWORK, gang: Network | None = None) -> Bench:
    """Return a bench of cards with these speeds, and equal links."""
    cards = tuple(replace(CARD, node=f"rig{rank + 1}", flops=value) for rank, value in enumerate(flops))
    pairs = [(first, second) for first in range(len(cards)) for second in range(first + 1, len(cards))]
    links = tuple(Link(ranks=pair, network=network) for pair in pairs)
    return Bench(measured_at="2026-11-23 18:00", backend="nccl", cards=cards, links=links, gang=gang)
