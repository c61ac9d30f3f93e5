"""This machine's own GPUs in one node of the closet, as `make up REAL_GPU=…` asks for it.

The node's dockerd passes them to containers as the machine's own does: by NVIDIA's hook on the PATH, or by the runtimes
of the machine's daemon.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuhub.common.errors import SetupError
from gpuhub.common.gpu import GpuSpec
from gpuhub.common.paths import Paths
from gpuhub.ops.deploy import cluster_choice
from gpuhub_closet import shell
from gpuhub_closet.paths import real_gpu_file

#: The settings of the machine's Docker.
MACHINE_DAEMON_FILE = Path("/etc/docker/daemon.json")
_RUNTIME_KEYS = ("runtimes", "default-runtime", "cdi-spec-dirs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealGpus:
    """The node that has this machine's own GPUs, and these."""

    node: str
    gpus: tuple[GpuSpec, ...]


def find_real_gpus(node: str) -> RealGpus:
    """Return this machine's GPUs for a node.

    Raises:
        SetupError: The machine has none, or Docker cannot pass them to containers.
    """
    gpus = cluster_choice.find_local_gpus()
    if not gpus:
        raise SetupError(
            f"REAL_GPU={node} gives this machine's own GPUs to {node}, but nvidia-smi finds none here: install "
            "NVIDIA's driver, or name a CLOSET=… without REAL_GPU, for simulated GPUs only"
        )
    cluster_choice.check_toolkit()
    read_daemon_settings()
    return RealGpus(node=node, gpus=tuple(gpus))


def read_daemon_settings() -> dict[str, Any]:
    """Return those settings of the machine's Docker by which containers get GPUs.

    Raises:
        SetupError: Its file of settings cannot be read.
    """
    try:
        settings = json.loads(MACHINE_DAEMON_FILE.read_text(encoding="utf-8") or "{}")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SetupError(
            f"{MACHINE_DAEMON_FILE} is not valid JSON, so Docker cannot read it either: {error}"
        ) from error
    cdi = settings.get("features", {}).get("cdi")
    return {
        **{key: settings[key] for key in _RUNTIME_KEYS if key in settings},
        **({} if cdi is None else {"features": {"cdi": cdi}}),
    }


def read_real_gpus(paths: Paths) -> RealGpus | None:
    """Return the node and the GPUs that were chosen last; None where all are simulated."""
    try:
        kept = json.loads(real_gpu_file(paths).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return RealGpus(node=kept["node"], gpus=tuple(GpuSpec(**gpu) for gpu in kept["gpus"]))


def keep_real_gpus(paths: Paths, chosen: RealGpus | None) -> None:
    """Keep the choice for `read_real_gpus`."""
    if chosen is None:
        real_gpu_file(paths).unlink(missing_ok=True)
        return
    gpus = [{"model": gpu.model, "memory_mib": gpu.memory_mib} for gpu in chosen.gpus]
    shell.replace_file(real_gpu_file(paths), f"{json.dumps({'node': chosen.node, 'gpus': gpus})}\n".encode())
