"""Keys of task files that are refused or have no effect, with the reasons."""

from __future__ import annotations

from typing import Any

from gpu_launch.cli.taskfile.document import YamlItem
from gpu_launch.errors import UsageError

_CLOUDS = "is for clouds and has no effect here"
_CONFIG = "is a setting of a cloud and has no effect here"
_FILES = "what jobs write is in your home"
#: The longest value that a note repeats.
_MOST_VALUE = 60
#: Reasons for refused keys, with the alternative.
_REFUSED = {
    "recipe": "is the head of a recipe: run the file as recipe:FILE, with --set NAME=VALUE for its parameters",
    "storage_mounts": "is not supported: copy data once with `gpu-launch cp`, and name it below your home",
    "volumes": "is not supported: your home is on every node, and so is /datasets",
    "volume_mounts": "is not supported: your home is on every node, and so is /datasets",
    "managed_secrets": "is not supported: name them in `secrets`, and give their values with --secret",
    "event_callback": "is not supported: put the command at the end of `run`",
    "api_server_access": "is not supported: there is no API server of SkyPilot",
    "config.docker": "is not supported: options of containers are the administrator's",
    "config.kubernetes.enable_docker": "is not supported: a job cannot start containers",
}
#: Values that only state the default.
_DEFAULT_VALUES: dict[str, tuple[Any, ...]] = {
    "resources.use_spot": (False,),
    "resources.autostop": (False,),
    "resources.job_recovery": ("none",),
    "resources.disk_tier": ("best",),
    "resources.network_tier": ("standard", "best"),
}
#: Keys that choose a machine of a cloud, or how it is paid.
_NO_EFFECT = {
    "service": "is for SkyServe and has no effect here: the commands run as one job, which ends when they end",
    "pool": "has no effect here: the broker chooses the nodes itself",
    "inputs": _CLOUDS,
    "outputs": _CLOUDS,
    "resources.infra": _CLOUDS,
    "resources.cloud": _CLOUDS,
    "resources.region": _CLOUDS,
    "resources.zone": _CLOUDS,
    "resources.instance_type": _CLOUDS,
    "resources.max_hourly_cost": _CLOUDS,
    "resources.accelerator_args": f"{_CLOUDS}: it is for TPUs",
    "resources.use_spot": f"{_CLOUDS}; --scavenge asks for GPUs that others may take when they need them",
    "resources.spot_recovery": f"{_CLOUDS}: a preempted job starts again, and a failed one does not",
    "resources.job_recovery": f"{_CLOUDS}: a preempted job starts again, and `max_restarts_on_errors` tries again",
    "resources.image_id": f"{_CLOUDS}; --profile NAME chooses one of the cluster's images",
    "resources.autostop": f"{_CLOUDS}: a job's GPUs are free when it ends; --time-limit ends it sooner",
    "resources.priority": "has no effect here: the cluster's own rules order the queue",
    "resources.priority_class": "has no effect here: the cluster's own rules order the queue",
} | {
    f"config.{name}": _CONFIG
    for name in ("kubernetes", "aws", "gcp", "azure", "oci", "nebius", "vast", "slurm", "ssh", "nvidia_gpus")
}
#: Keys that a job fulfils in another way; a note lists them.
_IGNORED = {
    "resources.disk_size": _FILES,
    "resources.disk_tier": _FILES,
    "resources.local_disk": _FILES,
    "resources.ephemeral_storage": _FILES,
    "resources.network_tier": "the network between the nodes cannot be chosen",
    "resources.labels": "jobs have no labels, only a name",
}


def note_unused(item: YamlItem) -> tuple[str, ...]:
    """Return the notes about a key that gpuhub does not use, none where its value only states the default.

    Raises:
        UsageError: The key is not known, or it would change what runs and is not supported.
    """
    if item.value is None or _is_default(item):
        return ()
    if item.key in _REFUSED:
        raise build_refusal(item)
    if item.key == "config" and isinstance(item.value, dict):
        return tuple(note for sub_item in item.items for note in note_unused(sub_item))
    for sub_item in item.items:
        if sub_item.key in _REFUSED:
            raise build_refusal(sub_item)
    if item.key in _NO_EFFECT:
        return (f"line {item.line}: {_format(item)} {_NO_EFFECT[item.key]}",)
    if item.key in _IGNORED:
        return (note_ignored(item, _IGNORED[item.key]),)
    raise build_refusal(item)


def note_ignored(item: YamlItem, reason: str) -> str:
    """Return the note about a key that a job fulfils in another way."""
    return f"line {item.line}: {item.key} is ignored: {reason}"


def build_refusal(item: YamlItem) -> UsageError:
    """Return the error for a key that is not supported."""
    return item.build_error(_REFUSED.get(item.key, "is not known, or not supported here") + ".")


def _is_default(item: YamlItem) -> bool:
    return any(item.value is value or item.value == value for value in _DEFAULT_VALUES.get(item.key, ()))


def _format(item: YamlItem) -> str:
    """Return `key: value` for a short value, else the key."""
    value = str(item.value).lower() if isinstance(item.value, bool) else str(item.value)
    if isinstance(item.value, dict | list | set) or len(value) > _MOST_VALUE or not value.isprintable():
        return item.key
    return f"`{item.key}: {value}`"
