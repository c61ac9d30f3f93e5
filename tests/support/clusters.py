"""A small cluster for the hub's tests, and container specifications for user ada on its node rig1."""

from __future__ import annotations

from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker.containers.container_spec import (
    ContainerContext,
    ContainerSpec,
    build_worker_spec,
)
from gpuhub.docker.containers.security import WorkerSize

#: The text of a cluster.toml with what every one has.
CLUSTER_FILE = """
[[nodes]]
name = "rig1"
address = "192.168.1.21"
docker = "unix:///run/rig1.sock"
[[profiles]]
name = "any"
title = "Any"
[users]
allowed = ["ada"]
"""


CARDS = {"rig1": ("RTX 5090", "32607M"), "rig2": ("RTX 5070", "12227M"), "rig3": ("RTX 5060", "8151M")}
ADA = UserIdentity(name="ada", uid=1001, gid=1001, groups=(2000,), group_names=("ada", "lab"))


def build_cluster(**changes: object) -> ClusterSettings:
    """Build settings with three nodes of one GPU each, and a profile for each GPU."""
    tables: dict[str, object] = {
        "nodes": [
            {
                "name": name,
                "address": f"192.168.1.{20 + number}",
                "docker": f"unix:///run/{name}.sock",
                "gpus": [{"model": model, "memory": memory}],
            }
            for number, (name, (model, memory)) in enumerate(CARDS.items(), 1)
        ],
        "profiles": [
            {"name": "big", "title": "RTX 5090", "gpu_model": "RTX 5090", "time_limit": "8h"},
            {"name": "small", "title": "RTX 5070", "gpu_model": "RTX 5070", "cpus": 1, "memory": "4G", "shm": "1G"},
            {"name": "cpu", "title": "No GPU", "gpu_count": 0},
        ],
        "users": {"allowed": ["ada", "ben"]},
        "storage": {"home": "/srv/home/{username}", "datasets": "/srv/datasets"},
        "hub": {"address": "192.168.1.20"},
        **changes,
    }
    return ClusterSettings.model_validate(tables)


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
        size=WorkerSize(cpus=4, memory=16 * 1024**3),
        lease_id="lease-9",
        epoch=3,
        job_id="job-7",
        run_id="run-123456",
        index=2,
        run_index=5,
    )
