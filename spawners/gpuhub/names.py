"""Names and labels of everything gpuhub makes on a node, built so that they cannot collide or escape.

Guarantees of `slug`: the result is 1–40 characters of `[a-z0-9-]`, starts and ends with a letter or digit, has no two
dashes in a row, which may therefore stand between two of them, and two different inputs give two different results (a
hash is appended whenever the input is not already such a name).
"""

from __future__ import annotations

import base64
import hashlib
import re

_PLAIN = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_HASHED = re.compile(r".*-[0-9a-f]{8}")

#: What JupyterHub is told to accept as a user name: a POSIX user name, nothing that means something in a path.
USERNAME_PATTERN = r"[a-z][a-z0-9_.-]{0,31}"
#: A named server: letters, digits and dashes.
SERVER_PATTERN = r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
INSTANCE_PATTERN = r"[a-z][a-z0-9]{0,7}"
#: A launch's own name, chosen by the client: a folder name under `~/.gpu_launch/jobs`.
RUN_PATTERN = r"[a-z0-9]([a-z0-9-]{4,38}[a-z0-9])"

LABEL_INSTANCE = "gpuhub.instance"
LABEL_KIND = "gpuhub.kind"  # notebook, worker, agent, courier or guard
LABEL_LEASE = "gpuhub.lease"
LABEL_EPOCH = "gpuhub.epoch"
LABEL_OWNER = "gpuhub.owner"
LABEL_JOB = "gpuhub.job"
LABEL_WORKER = "gpuhub.worker"
LABEL_SLURM_JOB = "gpuhub.slurm-job"  # the Slurm job that holds the container's GPUs; the Epilog looks for it
LABEL_SHARE = "gpuhub.gpu_share"  # the container has one of so many parts of its GPU

KIND_NOTEBOOK = "notebook"
KIND_WORKER = "worker"
KIND_AGENT = "agent"
KIND_COURIER = "courier"
KIND_GUARD = "guard"
#: What a volume is for, in the same label.
VOLUME_HOME = "home"
VOLUME_DATASETS = "datasets"
VOLUME_SCRATCH = "scratch"
#: Kinds of containers that belong to no lease: they hold no GPU.
LEASELESS = frozenset({KIND_AGENT, KIND_COURIER, KIND_GUARD})


def slug(text: str) -> str:
    """A name for use in container, network and volume names; injective, see the module's guarantees."""
    if _PLAIN.fullmatch(text) and not _HASHED.fullmatch(text) and "--" not in text:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:31].rstrip("-")
    return f"{readable}-{digest}" if readable else f"x-{digest}"


def slurm_job(instance: str, lease: str) -> str:
    """The name of the Slurm job that holds a lease's GPUs: by it the two are told to belong together."""
    return f"{instance}-lease-{lease}"


def slurm_stand_in(job: int) -> str:
    """What stands for a container's id where a Slurm job is what runs."""
    return f"{job:012x}"


def notebook_container(instance: str, owner: str, server: str) -> str:
    """The name of a user's notebook container; `server` is empty for the default server."""
    name = f"{instance}-nb-{slug(owner)}"
    return f"{name}--{slug(server)}" if server else name


def worker_container(instance: str, job_id: str, index: int) -> str:
    """The name of a job's worker container."""
    return f"{instance}-job-{slug(job_id)}-{index}"


def user_network(instance: str, owner: str) -> str:
    """The name of a user's private network."""
    return f"{instance}-net-{slug(owner)}"


def access_network(instance: str) -> str:
    """The node-local bridge every container has for its published port and the way to the hub: the network's name and
    the interface's, which hold 15 characters.
    """
    return f"{instance}-access"


def user_bridge(instance: str, owner: str) -> str:
    """The interface of a user's private network where that is a bridge, at most 15 characters; see `user_bridges`."""
    digest = base64.b32encode(hashlib.sha256(owner.encode()).digest()).decode().lower()
    return f"{instance}-u{digest[:5]}"


def user_bridges(instance: str) -> str:
    """The pattern of all users' interfaces, and of no other instance's."""
    return f"{instance}-u*"


def agent_container(instance: str) -> str:
    """The name of the GPU agent's container on each node."""
    return f"{instance}-agent"


def courier_container(instance: str, owner: str) -> str:
    """The name of the container that reads and writes files in a user's home."""
    return f"{instance}-courier-{slug(owner)}"


def guard_container(instance: str) -> str:
    """The name of the container that keeps a node's packet filter."""
    return f"{instance}-guard"


def filter_table(instance: str) -> str:
    """The name of the nftables table that the guard keeps on a node."""
    return f"gpuhub_{instance}"


def scratch_volume(instance: str, owner: str) -> str:
    """The name of a user's scratch volume on each node."""
    return f"{instance}-scratch-{slug(owner)}"
