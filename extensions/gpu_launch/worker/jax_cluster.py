"""Lets `jax.distributed.initialize()` find the ranks of a launch without arguments.

JAX asks its cluster environments (`jax._src.clusters`) for what the call leaves out. It has one for Slurm and one for
Open MPI, and any subclass of its `ClusterEnv` is another. Of environment variables it reads the coordinator's address
only; the other two are for programs that read them themselves.
"""

from __future__ import annotations

import os
from typing import Any

from gpu_launch.common.import_hook import call_after_import
from gpu_launch.common.launch_spec import LaunchSpec

COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def build_variables(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables that all ranks share; PROCESS_ID is that of one rank."""
    host = f"[{spec.master_addr}]" if ":" in spec.master_addr else spec.master_addr
    return {
        COORDINATOR_ADDRESS: f"{host}:{spec.coordinator_port}",
        NUM_PROCESSES: str(spec.membership.ranks),
    }


def install() -> None:
    """Register the launch with JAX when this rank imports it."""
    if COORDINATOR_ADDRESS in os.environ and "RANK" in os.environ:
        call_after_import("jax._src.clusters", register)


def register(clusters: Any) -> None:
    """Make this process's launch the first cluster environment that JAX asks.

    A worker on Slurm also has Slurm's variables, which know of its containers and not of its ranks.
    """

    class LaunchCluster(clusters.ClusterEnv):  # type: ignore[misc]
        name = "gpu_launch"

        @classmethod
        def is_env_present(cls) -> bool:
            return COORDINATOR_ADDRESS in os.environ and "RANK" in os.environ

        @classmethod
        def get_coordinator_address(cls, timeout_secs: int | None, override_coordinator_port: str | None) -> str:
            del timeout_secs
            address = os.environ[COORDINATOR_ADDRESS]
            host = address.rpartition(":")[0]
            return f"{host}:{override_coordinator_port}" if override_coordinator_port else address

        @classmethod
        def get_process_count(cls) -> int:
            return int(os.environ["WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            return int(os.environ["RANK"])

        @classmethod
        def get_local_process_id(cls) -> int:
            return int(os.environ["LOCAL_RANK"])

    # A subclass has put itself at the end of JAX's list.
    known = clusters.ClusterEnv._cluster_types
    known.remove(LaunchCluster)
    known.insert(0, LaunchCluster)
