"""Container specifications for user ada on node rig1."""

from __future__ import annotations

from gpuhub.config.identity import UserIdentity
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.container_spec import (
    ContainerContext,
    ContainerSpec,
    build_worker_spec,
)

ADA = UserIdentity(name="ada", uid=1001, gid=1001, groups=(2000,), group_names=("ada", "lab"))


def place(cluster: ClusterSettings, *uuids: str) -> ContainerContext:
    return ContainerContext(
        instance="gpuhub",
        cluster=cluster,
        node=cluster.node("rig1"),
        gpu_uuids=uuids,
        subnet="10.201.3.0/24",
        head_address="192.168.1.20",
    )


def worker(cluster: ClusterSettings, *uuids: str) -> ContainerSpec:
    return build_worker_spec(
        context=place(cluster, *uuids),
        identity=ADA,
        image="gpuhub/notebook:latest",
        lease_id="lease-9",
        epoch=3,
        job_id="job-7",
        run_id="run-123456",
        index=2,
        run_index=5,
    )
