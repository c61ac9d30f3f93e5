"""`gpuhub bench`: which nodes take part, and what is refused before anything starts."""

from __future__ import annotations

import click
import pytest

from gpuhub.broker_api.schemas import ClusterView, GpuState, NodeState
from gpuhub.broker_api.schemas.bench import BenchView
from gpuhub.cli import main, tables
from gpuhub.cli.options import BrokerRunner
from gpuhub.common.errors import Conflict, NotFound
from gpuhub.ops.validation.bench import choose_nodes
from tests.support.broker.bench import build_bench
from tests.support.broker.calls import read
from tests.support.broker.in_process import Setting, asgi_broker

TABLE = """\
NODE  GPU                      FLOAT32       READS A HOME
rig1  NVIDIA GeForce RTX 5090  61.2 TFLOP/s  110 MB/s
rig2  NVIDIA GeForce RTX 5070  29 TFLOP/s    120 MB/s

NODE  AND   LATENCY  ALL-REDUCE  IN BFLOAT16
rig1  rig2  120 µs   2.4 Gbit/s  2.32 Gbit/s

Measured 2026-11-28 10:15 UTC with nccl."""


@pytest.fixture
async def view(setting: Setting) -> ClusterView:
    """rig1 has a free GPU, rig2's is held, and rig3 is down."""
    async with asgi_broker(setting) as running:
        view = ClusterView.model_validate(await read(running, "ada", "/cluster"))
    rig1, rig2, rig3 = view.nodes
    held = rig2.gpus[0].model_copy(update={"state": GpuState.HELD})
    nodes = (rig1, rig2.model_copy(update={"gpus": (held,)}), rig3.model_copy(update={"state": NodeState.DOWN}))
    return view.model_copy(update={"nodes": nodes})


async def test_nodes_with_a_free_gpu_take_part(view: ClusterView) -> None:
    """All of them, or those that are named."""
    assert list(choose_nodes(view, ())) == ["rig1"]
    assert list(choose_nodes(view, ("rig1",))) == ["rig1"]


@pytest.mark.parametrize("name", ["rig2", "rig3"])
async def test_a_named_node_without_a_free_gpu_is_refused(view: ClusterView, name: str) -> None:
    with pytest.raises(Conflict, match=f"{name} has no free GPU: `gpuhub node list`"):
        choose_nodes(view, ("rig1", name))


async def test_unknown_nodes_and_a_cluster_without_free_gpus_are_refused(view: ClusterView) -> None:
    with pytest.raises(NotFound, match="there is no node 'rig9'; there are: rig1, rig2, rig3"):
        choose_nodes(view, ("rig9",))
    with pytest.raises(Conflict, match="no node that is up has a free GPU"):
        choose_nodes(view.model_copy(update={"nodes": view.nodes[1:]}), ())


def test_the_last_bench_is_shown_without_measuring() -> None:
    with pytest.raises(click.UsageError, match="--last measures nothing"):
        main.cli.main(["bench", "--last", "--node", "rig1"], obj=BrokerRunner(), standalone_mode=False)


def test_figures_are_shown_in_tables() -> None:
    """One line for each card and each pair of nodes, without those of a single card."""
    assert tables.format_bench(BenchView.model_validate(build_bench()), None) == TABLE
    single = build_bench(cards=build_bench()["cards"][:1], links=[], gang=None)
    assert "LATENCY" not in tables.format_bench(BenchView.model_validate(single), None)
