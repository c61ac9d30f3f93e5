"""The environment variables this package reads, all of them, as one frozen value."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Never handed to ranks: the notebook's own credentials, and ipyparallel's.
SECRET_PREFIXES = ("JUPYTERHUB_", "JPY_", "IPP_")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the container was told about itself. None or empty: not told."""

    #: GPUHUB_BROKER_URL: such as `http://10.77.0.1:8010/services/broker`.
    broker_url: str | None
    #: JUPYTERHUB_API_TOKEN: in notebooks only.
    token: str | None
    #: GPUHUB_NETWORK_SUBNET: the subnet on which this user's containers reach each other.
    subnet: str | None
    #: GPUHUB_NODE: the node's name in the cluster; this host's name where it is not told.
    node: str
    #: GPUHUB_GPU_UUIDS: this container's GPUs.
    gpu_uuids: tuple[str, ...]
    #: GPUHUB_GPU_MEMORY_CAP_MIB: what this container may use of a GPU that it shares; None for whole GPUs.
    memory_cap_mib: int | None
    #: JUPYTERHUB_SERVER_NAME: empty for the default server.
    server: str
    #: GPU_LAUNCH_RUN and GPU_LAUNCH_WORKER: in workers only.
    run_id: str | None
    worker: int | None
    home: Path
    #: GPUHUB_KEEP_WORKERS_S: how long workers stay with a notebook after a launch, seconds; 0 for not at all.
    keep_workers_s: float = 0.0
    #: GPU_LAUNCH_ROSTER: in the workers of a detached job only: all of them, as the broker tells of workers (JSON).
    roster: str = ""
    #: GPU_LAUNCH_PREEMPTIONS: there too: how often the job had been preempted when these workers were started.
    preemptions: int = 0
    #: JUPYTERHUB_USER, else USER: whose container it is.
    user: str = ""
    #: GPUHUB_HEAD_ADDRESS: where the hub and the broker run.
    head_address: str = ""
    #: GPUHUB_BROKER_CA: a file with whom to trust as the broker; empty for a broker without TLS.
    broker_ca: str = ""
    #: JUPYTERHUB_SSL_CERTFILE, JUPYTERHUB_SSL_KEYFILE: files with what this notebook shows the broker.
    certificate: str = ""
    key: str = ""


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """The environment of this process, or of `environ`."""
    env = os.environ if environ is None else environ
    worker, cap = env.get("GPU_LAUNCH_WORKER", ""), env.get("GPUHUB_GPU_MEMORY_CAP_MIB", "")
    keep, preemptions = env.get("GPUHUB_KEEP_WORKERS_S", ""), env.get("GPU_LAUNCH_PREEMPTIONS", "")
    return Environment(
        broker_url=env.get("GPUHUB_BROKER_URL", "").rstrip("/") or None,
        token=env.get("JUPYTERHUB_API_TOKEN") or None,
        subnet=env.get("GPUHUB_NETWORK_SUBNET") or None,
        node=env.get("GPUHUB_NODE") or socket.gethostname(),
        gpu_uuids=tuple(part.strip() for part in env.get("GPUHUB_GPU_UUIDS", "").split(",") if part.strip()),
        memory_cap_mib=int(cap) if cap.isdecimal() and int(cap) else None,
        server=env.get("JUPYTERHUB_SERVER_NAME", ""),
        run_id=env.get("GPU_LAUNCH_RUN") or None,
        worker=int(worker) if worker.isdecimal() else None,
        home=Path(env.get("HOME") or Path.home()),
        keep_workers_s=float(keep) if keep.isdecimal() else 0.0,
        roster=env.get("GPU_LAUNCH_ROSTER", ""),
        user=env.get("JUPYTERHUB_USER") or env.get("USER", ""),
        head_address=env.get("GPUHUB_HEAD_ADDRESS", ""),
        broker_ca=env.get("GPUHUB_BROKER_CA", ""),
        certificate=env.get("JUPYTERHUB_SSL_CERTFILE", ""),
        key=env.get("JUPYTERHUB_SSL_KEYFILE", ""),
        preemptions=int(preemptions) if preemptions.isdecimal() else 0,
    )


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` as ranks may have it."""
    return {name: value for name, value in environ.items() if not name.startswith(SECRET_PREFIXES)}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """What was set in `now` since `before`, without secrets: a user's `os.environ[...] = ...` in the notebook."""
    return {name: value for name, value in without_secrets(now).items() if before.get(name) != value}
