"""Launches over simulated GPUs of the practice closet and real ones, which only gloo can join."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_launch.common.launch_spec import NodeInfo

#: Lets every rank find the same devices: most scripts choose NCCL where they find a GPU, and gloo elsewhere, and ranks
#: with different choices would wait for each other until their timeout.
NO_CUDA = {"CUDA_VISIBLE_DEVICES": ""}


def describe_mixed_gpus(infos: Sequence[NodeInfo]) -> str:
    """Return a note for the user if only some of the nodes have simulated GPUs, else an empty string."""
    simulated, real = ([info.node for info in infos if info.is_simulated is kind] for kind in (True, False))
    if not simulated or not real:
        return ""
    return (
        "all ranks compute on the CPU, so that they can communicate: the GPUs of "
        f"{', '.join(simulated)} are simulated, and those of {', '.join(real)} are real. "
        "To use real ones alone, name their model with --model"
    )
