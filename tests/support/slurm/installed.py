"""Clusters as `gpuhub slurm init` installs them: a head node and two nodes with different GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpuhub.ops.slurm.config_lines import SlurmNodeConfig, SlurmPartitionConfig
from gpuhub.ops.slurm.files import InstalledCluster, InstalledNode
from gpuhub.ops.slurm.power import SlurmPower

HEAD = InstalledNode(
    config=SlurmNodeConfig(
        name="rig1", hostname="rig1", address="10.0.0.1", gpus=("rtx5060",), cpus=8, memory_mib=31000
    ),
    devices=(Path("/dev/nvidia0"),),
)
NODES = (
    InstalledNode(
        config=SlurmNodeConfig(
            name="rig2", hostname="beast", address="10.0.0.2", gpus=("rtx5090", "rtx5090"), cpus=32, memory_mib=126000
        ),
        devices=(Path("/dev/nvidia1"), Path("/dev/nvidia0")),
    ),
    InstalledNode(
        config=SlurmNodeConfig(
            name="rig3",
            hostname="rig3",
            address="10.0.0.3",
            gpus=("rtx5070", "rtx5060"),
            cpus=16,
            memory_mib=63000,
        ),
        devices=(Path("/dev/nvidia0"), Path("/dev/nvidia1")),
    ),
)
CLUSTER = InstalledCluster(name="lab", head_name="rig1", head_address="10.0.0.1", nodes=NODES, partition="gpu")
VARIANTS = {
    "plain": CLUSTER,
    "head-computes": replace(CLUSTER, nodes=(HEAD, *NODES)),
    "accounting": replace(CLUSTER, has_accounting=True),
    "rest": replace(CLUSTER, rest_plugins="openapi/v0.0.38"),
    "partitions": replace(
        CLUSTER,
        partitions=(
            SlurmPartitionConfig(name="vision", nodes=("rig3",), is_default=False, groups=("vision", "staff")),
        ),
    ),
    "health-check": replace(CLUSTER, has_health_check=True),
    "power": replace(
        CLUSTER,
        power=SlurmPower(
            suspend_s=1800,
            resume_timeout_s=300,
            excluded=("rig3",),
            command=("/opt/gpuhub/bin/gpuhub", "slurm", "power", "--cluster-file", "/srv/my lab/cluster.toml"),
        ),
    ),
}
