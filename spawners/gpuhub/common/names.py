"""Names and labels of everything that gpuhub creates on a node, built so that they cannot collide or be abused.

Guarantees of `make_slug`: the result has 1–40 characters of `[a-z0-9-]`, starts and ends with a letter or digit, and
has no two dashes in a row, so that two dashes can separate two slugs. Different inputs give different results: a hash
is appended to every input that is not such a name already.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping

from gpuhub.common.errors import Conflict

#: Image of a job whose profile names none.
DEFAULT_IMAGE = "gpuhub/notebook:latest"

NOTEBOOK_PORT = 8888
#: As `domain.models.new_id` makes them.
_LEASE_ID = re.compile(r"l[0-9a-f]{16}")


_PLAIN = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_HASHED = re.compile(r".*-[0-9a-f]{8}")

#: User names that JupyterHub accepts: POSIX user names, without characters that have a meaning in a path.
USERNAME_PATTERN = r"[a-z][a-z0-9_.-]{0,31}"
#: Name of a named server: letters, digits and dashes.
SERVER_PATTERN = r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
INSTANCE_PATTERN = r"[a-z][a-z0-9]{0,7}"
#: Id of a launch, chosen by the client: the name of its folder in `~/.gpu_launch/jobs`.
RUN_PATTERN = r"[a-z0-9]([a-z0-9-]{4,38}[a-z0-9])"
#: A folder below `/datasets`, as users name it: `datasets/imagenet/train`.
DATASET_PATTERN = r"datasets(/[A-Za-z0-9_][A-Za-z0-9._-]{0,62}){1,4}"

LABEL_INSTANCE = "gpuhub.instance"
LABEL_KIND = "gpuhub.kind"  # notebook, worker, agent, courier, guard, stager, suspender or service
LABEL_LEASE = "gpuhub.lease"
LABEL_EPOCH = "gpuhub.epoch"
LABEL_OWNER = "gpuhub.owner"
LABEL_JOB = "gpuhub.job"
LABEL_WORKER = "gpuhub.worker"
LABEL_SLURM_JOB = "gpuhub.slurm-job"  # the Slurm job that holds the container's GPUs; the Epilog searches for it
LABEL_DEBIAN = "gpuhub.debian"  # of an image: the date of its Debian packages
LABEL_DATASET = "gpuhub.dataset"  # of the volume with a node's copy: the dataset
LABEL_BYTES = "gpuhub.bytes"  # of the same volume: the size of the dataset
LABEL_SERVICE = "gpuhub.service"  # of a service's containers: its name
LABEL_SHARE = "gpuhub.gpu_share"  # number of shares of the GPU, of which the container has one

KIND_NOTEBOOK = "notebook"
KIND_WORKER = "worker"
KIND_AGENT = "agent"
KIND_COURIER = "courier"
KIND_FIREWALL = "guard"
KIND_STAGER = "stager"
KIND_SERVICE = "service"
KIND_SUSPENDER = "suspender"
#: Kinds of volumes, in the same label.
VOLUME_HOME = "home"
VOLUME_DATASETS = "datasets"
VOLUME_MODELS = "models"
VOLUME_SCRATCH = "scratch"
VOLUME_STAGED = "staged"
#: Kinds of containers without a lease, which have no GPU.
KINDS_WITHOUT_LEASE = frozenset({KIND_AGENT, KIND_COURIER, KIND_FIREWALL, KIND_STAGER, KIND_SERVICE, KIND_SUSPENDER})
#: Owner of the network on which nodes pass datasets on; no user's name has a colon.
STAGING_OWNER = "gpuhub:staging"


def make_slug(text: str) -> str:
    """Return a text as a part of container, network and volume names, with the guarantees above."""
    if _PLAIN.fullmatch(text) and not _HASHED.fullmatch(text) and "--" not in text:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:31].rstrip("-")
    return f"{readable}-{digest}" if readable else f"x-{digest}"


def check_owner(name: str, labels: Mapping[str, str] | None, owner: str) -> None:
    """Check that an object which a node found by its name is the user's, since the hash in a name is short.

    Raises:
        Conflict: It is another user's.
    """
    other = (labels or {}).get(LABEL_OWNER, owner)
    if other != owner:
        raise Conflict(
            f"{name} of {owner} has the same name as that of {other}: the administrator must rename one user"
        )


def slurm_job_name(instance: str, lease: str) -> str:
    """Return the name of the Slurm job that holds a lease's GPUs, by which gpuhub recognises it."""
    return f"{instance}-lease-{lease}"


def find_slurm_lease(instance: str, job_name: str) -> str | None:
    """Return the lease's id in a job's name; None for other names, also those that only begin like one."""
    prefix = slurm_job_name(instance, "")
    lease = job_name.removeprefix(prefix)
    return lease if lease != job_name and _LEASE_ID.fullmatch(lease) else None


def slurm_container_id(job: int) -> str:
    """Return the container id of a lease whose Slurm job runs without a container."""
    return f"{job:012x}"


def notebook_container_name(instance: str, owner: str, server: str) -> str:
    """Return the name of a user's notebook container; `server` is empty for the default server."""
    name = f"{instance}-nb-{make_slug(owner)}"
    return f"{name}--{make_slug(server)}" if server else name


def worker_container_name(instance: str, job_id: str, index: int) -> str:
    return f"{instance}-job-{make_slug(job_id)}-{index}"


def user_network_name(instance: str, owner: str) -> str:
    return f"{instance}-net-{make_slug(owner)}"


def access_network_name(instance: str) -> str:
    """Return the name of the node's bridge network by which containers reach the hub and publish their ports.

    Its interface has the same name, of at most 15 characters.
    """
    return f"{instance}-access"


def data_network_name(instance: str) -> str:
    """Return the name of the network by which ranks' containers use a node's own network card."""
    return f"{instance}-data"


def user_bridge_name(instance: str, owner: str) -> str:
    """Return the interface of a user's private bridge network, at most 15 characters; see `user_bridge_pattern`."""
    digest = base64.b32encode(hashlib.sha256(owner.encode()).digest()).decode().lower()
    return f"{instance}-u{digest[:5]}"


def user_bridge_pattern(instance: str) -> str:
    """Return the pattern of all users' interfaces, which matches no other instance's."""
    return f"{instance}-u*"


def agent_container_name(instance: str) -> str:
    return f"{instance}-agent"


def courier_container_name(instance: str, owner: str) -> str:
    """Return the name of the container that reads and writes files in a user's home."""
    return f"{instance}-courier-{make_slug(owner)}"


def firewall_container_name(instance: str) -> str:
    """Return the name of the container that maintains a node's firewall."""
    return f"{instance}-guard"


def firewall_table_name(instance: str) -> str:
    """Return the name of the nftables table with a node's firewall rules."""
    return f"gpuhub_{instance}"


def scratch_volume_name(instance: str, owner: str) -> str:
    return f"{instance}-scratch-{make_slug(owner)}"


def service_container_name(instance: str, service: str) -> str:
    return f"{instance}-service-{make_slug(service)}"


def service_relay_name(instance: str, service: str) -> str:
    """Return the name of the container that has a service's network; connections to the service begin there."""
    return f"{service_container_name(instance, service)}--relay"


def service_data_name(instance: str, service: str) -> str:
    """Return the name of the container that makes the folder for a service's data."""
    return f"{service_container_name(instance, service)}--data"


def stager_container_name(instance: str, transfer: str, index: int) -> str:
    """Return the name of the container that copies a dataset; other stagers find it by this name."""
    return f"{instance}-stage-{transfer}-{index}"


def staged_volume_name(instance: str, dataset: str, digest: str) -> str:
    """Return the name of the volume with a copy of this state of a dataset."""
    return f"{instance}-staged-{make_slug(dataset.partition('/')[2])}-{digest[:16]}"
