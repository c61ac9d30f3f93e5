"""gpu_launch reads what a broker says where Slurm decides: what is new there does not disturb it."""

from __future__ import annotations

import json
from datetime import timedelta

from gpu_launch import wire
from gpuhub.broker.schemas import GpuState, Holder, KindView, PartitionView, Purpose
from gpuhub.settings import Cluster
from tests.support.fake_broker import NOW, FakeBroker
from tests.unit.containers.conftest import build_cluster


async def test_plain_slurm_jobs_hold_and_wait() -> None:
    """Their GPUs are not free and say whose they are; that they wait has standing workers go, as anybody's waiting."""
    cluster: Cluster = build_cluster(engine="slurm")
    carol = Holder(
        owner="carol",
        purpose=Purpose.JOB,
        since=NOW,
        until=NOW + timedelta(hours=1),
        slurm_job=17,
        is_outside=True,
    )
    view = await FakeBroker(cluster).cluster()
    gpu = (
        view.nodes[0]
        .gpus[0]
        .model_copy(
            update={"state": GpuState.OUTSIDE, "holder": carol, "holders": (carol,), "message": "Slurm job 17 of carol"}
        )
    )
    partition = PartitionView(
        name="gpu",
        is_default=True,
        is_up=True,
        longest_s=3600,
        usual_s=None,
        most_nodes=None,
        nodes=3,
        gpus=(KindView(model="RTX 5090", free=0, total=1),),
        profiles=("big",),
    )
    told = view.model_copy(
        update={
            "engine": "slurm",
            "partitions": (partition,),
            "nodes": (view.nodes[0].model_copy(update={"gpus": (gpu,)}), *view.nodes[1:]),
            "waiting_outside": 2,
        }
    )
    read = wire.parse_cluster(json.loads(told.model_dump_json()))
    assert read.waiting == 2
    first, second = read.nodes[0].gpus[0], read.nodes[1].gpus[0]
    assert (first.state, first.holder) == ("outside", "carol")
    assert (second.state, second.holder) == ("free", "")
