"""Wire models of what `gpuhub bench` measured; the same JSON as `gpu_launch.prediction.figures.Bench`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, StringConstraints, model_validator

from gpuhub.broker_api.schemas.leases import WireModel

#: Maximum number of cards of one bench: one of each node.
MAX_CARDS = 1024

Rate = Annotated[float, Field(gt=0, le=1e18)]


class BenchCard(WireModel):
    """A GPU of a node, or the CPU of a rank without one."""

    node: Annotated[str, StringConstraints(max_length=64)]
    #: The model, such as `NVIDIA GeForce RTX 5090`.
    device: Annotated[str, StringConstraints(max_length=100)]
    #: Floating-point operations per second in float32 matrix products.
    flops: Rate
    memory_mib: Annotated[int, Field(ge=0, le=1 << 24)]
    #: Bytes per second from a home.
    read_bytes_s: Rate


class BenchNetwork(WireModel):
    """All-reduces between some ranks: seconds of latency, and bytes per second of float32 and bfloat16 numbers."""

    latency_s: Annotated[float, Field(ge=0, le=3600)]
    bytes_s: Rate
    bf16_bytes_s: Rate


class BenchLink(WireModel):
    """The all-reduces of two ranks."""

    ranks: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
    network: BenchNetwork


class NodeBenchView(WireModel):
    """What the last `gpuhub bench` found on a node, as shown to all users."""

    #: `YYYY-MM-DD HH:MM`, UTC.
    measured_at: str
    device: str
    flops: float
    read_bytes_s: float
    #: Bytes per second of all-reduces with one other node: the slowest and the fastest; None for a single node.
    link_bytes_s: tuple[float, float] | None = None


class BenchView(WireModel):
    """The figures of one GPU of each node, and of the network between the nodes."""

    #: `YYYY-MM-DD HH:MM`, UTC.
    measured_at: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\d \d\d:\d\d$")]
    backend: Literal["nccl", "gloo"]
    #: Cards by rank.
    cards: Annotated[tuple[BenchCard, ...], Field(min_length=1, max_length=MAX_CARDS), FailFast()]
    links: Annotated[tuple[BenchLink, ...], Field(max_length=MAX_CARDS), FailFast()]
    #: All ranks together; None for one rank.
    gang: BenchNetwork | None = None

    @model_validator(mode="after")
    def _has_ranks(self) -> Self:
        if any(max(link.ranks) >= len(self.cards) for link in self.links):
            raise ValueError(f"a link names a rank that is not one of the {len(self.cards)} cards")
        return self

    def list_nodes(self) -> dict[str, NodeBenchView]:
        """Return the figures of each node, by its name."""
        views = {}
        for rank, card in enumerate(self.cards):
            rates = [link.network.bytes_s for link in self.links if rank in link.ranks]
            views[card.node] = NodeBenchView(
                measured_at=self.measured_at,
                device=card.device,
                flops=card.flops,
                read_bytes_s=card.read_bytes_s,
                link_bytes_s=(min(rates), max(rates)) if rates else None,
            )
        return views
