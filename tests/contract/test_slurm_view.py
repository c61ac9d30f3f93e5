"""The client of gpu_launch reads the views of a broker with Slurm as the backend, and ignores unknown fields."""

from __future__ import annotations

import json
from datetime import timedelta

from gpu_launch.broker import models
from gpuhub.broker_api.schemas import GpuModelView, GpuState, HolderView, PartitionView, Purpose
from gpuhub.config.settings import ClusterSettings
from tests.support.clusters import build_cluster
from tests.support.hub.fake_broker import NOW, FakeBroker


async def test_plain_slurm_jobs_run_and_wait() -> None:
    """GPUs of plain Slurm jobs are taken and have an owner; waiting ones make idle workers end, as other requests do."""
    cluster: ClusterSettings = build_cluster(engine="slurm")
    carol = HolderView(
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
        gpus=(GpuModelView(model="RTX 5090", free=0, total=1),),
        profiles=("big",),
    )
    extended = view.model_copy(
        update={
            "engine": "slurm",
            "partitions": (partition,),
            "nodes": (view.nodes[0].model_copy(update={"gpus": (gpu,)}), *view.nodes[1:]),
            "waiting_outside": 2,
        }
    )
    read = models.parse_cluster(json.loads(extended.model_dump_json()))
    assert read.waiting == 2
    first, second = read.nodes[0].gpus[0], read.nodes[1].gpus[0]
    assert (first.state, first.holder) == ("outside", "carol")
    assert (second.state, second.holder) == ("free", "")
