"""What is measured before a prediction: the cards and links of a bench, and the profile of a script. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_launch.common.run_folder import write_private
from gpu_launch.errors import UsageError
from gpu_launch.training.comm_modes import CommMode

#: Folder of the figures, below the home.
_FOLDER = Path(".gpu_launch/predictions")
_BENCH = "bench.json"
#: File with the figures of `gpuhub bench`, from when a prediction last needed them.
_CLUSTER_BENCH = "cluster-bench.json"


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU, or the CPU of a rank without one."""

    node: str
    #: The model, such as `NVIDIA GeForce RTX 5090`.
    device: str
    #: Floating-point operations per second in float32 matrix products.
    flops: float
    memory_mib: int
    #: Bytes per second from the home, after the node's own cache was dropped.
    read_bytes_s: float


@dataclass(frozen=True, kw_only=True)
class Network:
    """All-reduces between some ranks: n of them take 2 (n - 1) · latency + 2 (n - 1) / n · bytes / bandwidth."""

    latency_s: float
    #: Bytes per second of float32 and of bfloat16 numbers, which backends may add up at different speed.
    bytes_s: float
    bf16_bytes_s: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """The all-reduces of two ranks."""

    ranks: tuple[int, int]
    network: Network


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The figures of some cards and of the network between them."""

    #: `YYYY-MM-DD HH:MM`, UTC.
    measured_at: str
    #: `nccl` or `gloo`.
    backend: str
    #: Cards by rank.
    cards: tuple[Card, ...]
    links: tuple[Link, ...]
    #: All ranks together; None for one rank.
    gang: Network | None


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that DDP sends together."""

    #: When the last of them was computed, seconds from the begin of the forward pass.
    ready_s: float
    #: Bytes that an all-reduce of this bucket has, by mode; `local` and `diloco` send none.
    sizes: Mapping[CommMode, int]


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One step of a script on one card, in the median of several."""

    script: str
    card: Card
    steps: int
    #: Time between the update of the previous step and the forward pass, seconds: mostly the wait for samples.
    input_s: float
    #: Time from the forward pass to the last gradient, seconds.
    compute_s: float
    #: Time from the last gradient to the end of the optimizer's step, seconds.
    update_s: float
    buckets: tuple[Bucket, ...]
    #: The time that compressing all buckets takes, seconds, by mode.
    compress_s: Mapping[CommMode, float]
    parameter_bytes: int
    peak_memory_mib: int


def get_bench_path(home: Path) -> Path:
    """Return the file in which the last bench is kept."""
    return home / _FOLDER / _BENCH


def get_prediction_path(home: Path, key: str) -> Path:
    """Return the file in which the last prediction of a script is kept."""
    return home / _FOLDER / f"{key}.json"


def build_key(text: str) -> str:
    """Return the name under which the prediction of a script (its whole path) or a cell (its text) is kept."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_json(path: Path, value: Any) -> None:
    """Write a value of this module as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, json.dumps(asdict(value), indent=1).encode())


def has_own_bench(home: Path) -> bool:
    """Return whether the user has measured."""
    return get_bench_path(home).exists()


def keep_cluster_bench(home: Path, data: Mapping[str, Any]) -> None:
    """Keep the bench of an administrator, a value of JSON, for those who have not measured themselves.

    Raises:
        UsageError: Another version wrote it.
    """
    try:
        bench = parse_bench(data)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"what the cluster's administrator measured is not a bench of this version ({error!r}). "
            "Measure with %gpu_bench --nnodes N."
        ) from None
    write_json(home / _FOLDER / _CLUSTER_BENCH, bench)


def read_bench(home: Path) -> Bench:
    """Return the user's last bench, or else the one of the cluster's administrator.

    Raises:
        UsageError: there is none, or another version wrote it.
    """
    path = get_bench_path(home) if has_own_bench(home) else home / _FOLDER / _CLUSTER_BENCH
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return parse_bench(data)
    except FileNotFoundError:
        raise UsageError(
            "a prediction needs the figures of your cards and of the network between them, and there are none yet. "
            "Measure them with %gpu_bench --nnodes N, or gpu-launch bench --nnodes N."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not a bench of this version. Measure again with %gpu_bench --nnodes N.") from None


def parse_bench(data: Mapping[str, Any]) -> Bench:
    """Return the bench in a value of JSON.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    links = tuple(
        Link(ranks=(int(link["ranks"][0]), int(link["ranks"][1])), network=Network(**link["network"]))
        for link in data["links"]
    )
    cards: Sequence[Mapping[str, Any]] = data["cards"]
    if not cards:
        raise ValueError("no cards")
    return Bench(
        measured_at=str(data["measured_at"]),
        backend=str(data["backend"]),
        cards=tuple(Card(**card) for card in cards),
        links=links,
        gang=None if data["gang"] is None else Network(**data["gang"]),
    )
