"""The environment variables that this package reads, all of them, as one frozen value."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: Prefixes of variables that are never passed to ranks: the container's own credentials, and ipyparallel's.
SECRET_PREFIXES = ("JUPYTERHUB_", "JPY_", "IPP_", "GPUHUB_JOB_KEY")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The variables of this container. None or empty: not set."""

    #: GPUHUB_BROKER_URL: such as `http://10.77.0.1:8010/services/broker`.
    broker_url: str | None
    #: JUPYTERHUB_API_TOKEN: in notebooks only.
    token: str | None
    #: GPUHUB_NETWORK_SUBNET: the subnet on which this user's containers reach each other.
    subnet: str | None
    #: GPUHUB_DATA_SUBNET: the subnet on which ranks reach each other, where that is another one.
    data_subnet: str | None = None
    #: GPUHUB_NODE: the node's name in the cluster; this host's name where it is not set.
    node: str
    #: GPUHUB_GPU_UUIDS: this container's GPUs.
    gpu_uuids: tuple[str, ...]
    #: GPUHUB_GPU_MEMORY_CAP_MIB: the memory that this container may use of a shared GPU; None for whole GPUs.
    memory_cap_mib: int | None
    #: JUPYTERHUB_SERVER_NAME: empty for the default server.
    server: str
    #: GPU_LAUNCH_RUN and GPU_LAUNCH_WORKER: in workers only.
    run_id: str | None
    worker: int | None
    home: Path
    #: GPUHUB_KEEP_WORKERS_S: how long workers stay with a notebook after a launch, seconds; 0 for not at all.
    keep_workers_s: float = 0.0
    #: GPU_LAUNCH_ROSTER: all workers, in those of a detached job only, as the broker's API has them (JSON).
    worker_list: str = ""
    #: GPU_LAUNCH_PREEMPTIONS, there too: the number of the job's preemptions before these workers started.
    preemptions: int = 0
    #: GPU_LAUNCH_RETRIES, there too, such as `1/3`: how often the job has started again after a failure, and may.
    retries: int = 0
    max_retries: int = 0
    #: GPU_LAUNCH_SLEEPS, there too: how often the job has slept; None for one that does not.
    sleeps: int | None = None
    #: JUPYTERHUB_USER, else USER: the owner of the container.
    user: str = ""
    #: GPUHUB_HEAD_ADDRESS: where the hub and the broker run.
    head_address: str = ""
    #: GPUHUB_BROKER_CA: a file with the broker's certificate authority; empty for a broker without TLS.
    broker_ca: str = ""
    #: JUPYTERHUB_SSL_CERTFILE, JUPYTERHUB_SSL_KEYFILE: files with this notebook's certificate and key.
    certificate: str = ""
    key: str = ""
    #: JUPYTERHUB_PUBLIC_HUB_URL: an address of the hub for browsers; empty where it is not known, and in workers.
    hub_url: str = ""
    #: GPUHUB_IMAGE: the image that the user chose for this notebook; empty where there is no choice.
    image: str = ""
    #: GPUHUB_STAGED: the datasets of which this container has its node's copy.
    staged: tuple[str, ...] = ()
    #: GPUHUB_SERVICES: names of the services that programs here reach through the gateway, which listens at
    #: GPUHUB_SERVICES_ADDRESS, such as `127.0.0.1:18034`.
    services: tuple[str, ...] = ()
    services_address: str = ""
    #: GPUHUB_JOB_KEY: in workers only, the key with which they reach services.
    job_key: str = field(default="", repr=False)

    @property
    def rank_subnet(self) -> str | None:
        """Return the subnet on which ranks reach each other."""
        return self.data_subnet or self.subnet

    @property
    def earlier_starts(self) -> int:
        """Return the number of times that other workers of the job started before these."""
        return self.preemptions + self.retries + (self.sleeps or 0)


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """Return the environment of this process, or of `environ`."""
    env = os.environ if environ is None else environ
    worker, cap = env.get("GPU_LAUNCH_WORKER", ""), env.get("GPUHUB_GPU_MEMORY_CAP_MIB", "")
    keep, preemptions = env.get("GPUHUB_KEEP_WORKERS_S", ""), env.get("GPU_LAUNCH_PREEMPTIONS", "")
    sleeps = env.get("GPU_LAUNCH_SLEEPS", "")
    retries, _, max_retries = env.get("GPU_LAUNCH_RETRIES", "").partition("/")
    return Environment(
        broker_url=env.get("GPUHUB_BROKER_URL", "").rstrip("/") or None,
        token=env.get("JUPYTERHUB_API_TOKEN") or None,
        subnet=env.get("GPUHUB_NETWORK_SUBNET") or None,
        data_subnet=env.get("GPUHUB_DATA_SUBNET") or None,
        node=env.get("GPUHUB_NODE") or socket.gethostname(),
        gpu_uuids=tuple(part.strip() for part in env.get("GPUHUB_GPU_UUIDS", "").split(",") if part.strip()),
        memory_cap_mib=int(cap) if cap.isdecimal() and int(cap) else None,
        server=env.get("JUPYTERHUB_SERVER_NAME", ""),
        run_id=env.get("GPU_LAUNCH_RUN") or None,
        worker=int(worker) if worker.isdecimal() else None,
        home=Path(env.get("HOME") or Path.home()),
        keep_workers_s=float(keep) if keep.isdecimal() else 0.0,
        worker_list=env.get("GPU_LAUNCH_ROSTER", ""),
        user=env.get("JUPYTERHUB_USER") or env.get("USER", ""),
        head_address=env.get("GPUHUB_HEAD_ADDRESS", ""),
        broker_ca=env.get("GPUHUB_BROKER_CA", ""),
        certificate=env.get("JUPYTERHUB_SSL_CERTFILE", ""),
        key=env.get("JUPYTERHUB_SSL_KEYFILE", ""),
        hub_url=env.get("JUPYTERHUB_PUBLIC_HUB_URL", ""),
        image=env.get("GPUHUB_IMAGE", ""),
        staged=tuple(filter(None, env.get("GPUHUB_STAGED", "").split(","))),
        services=tuple(filter(None, env.get("GPUHUB_SERVICES", "").split(","))),
        services_address=env.get("GPUHUB_SERVICES_ADDRESS", ""),
        job_key=env.get("GPUHUB_JOB_KEY", ""),
        preemptions=int(preemptions) if preemptions.isdecimal() else 0,
        retries=int(retries) if retries.isdecimal() else 0,
        max_retries=int(max_retries) if max_retries.isdecimal() else 0,
        sleeps=int(sleeps) if sleeps.isdecimal() else None,
    )


def find_own_interpreter(home: Path) -> str:
    """Return this process's interpreter if it is in the home, where all workers have it; empty for the image's."""
    return sys.executable if Path(sys.executable).is_relative_to(home) else ""


def remove_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what ranks must not have."""
    return {name: value for name, value in environ.items() if not name.startswith(SECRET_PREFIXES)}


def find_changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return what was set in `now` since `before`, without secrets: the user's `os.environ[...] = ...`."""
    return {name: value for name, value in remove_secrets(now).items() if before.get(name) != value}
