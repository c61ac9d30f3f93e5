"""A bench of two of the practice closet's nodes, as gpu-launch writes it."""

from __future__ import annotations

from typing import Any


def build_bench(**changes: Any) -> dict[str, Any]:
    """Return the figures of rig1 and rig2 with 2.4 Gbit/s between them; `changes` replace fields."""
    network = {"latency_s": 1.2e-4, "bytes_s": 3.0e8, "bf16_bytes_s": 2.9e8}
    cards = [
        {
            "node": "rig1",
            "device": "NVIDIA GeForce RTX 5090",
            "flops": 6.12e13,
            "memory_mib": 32607,
            "read_bytes_s": 1.1e8,
        },
        {
            "node": "rig2",
            "device": "NVIDIA GeForce RTX 5070",
            "flops": 2.9e13,
            "memory_mib": 12227,
            "read_bytes_s": 1.2e8,
        },
    ]
    return {
        "measured_at": "2026-11-28 10:15",
        "backend": "nccl",
        "cards": cards,
        "links": [{"ranks": [0, 1], "network": network}],
        "gang": network,
    } | changes
