"""Which of JupyterHub's, DockerSpawner's and batchspawner's traits an administrator may set; others are refused.

gpuhub decides the rest itself, from cluster.toml and from leases. A value that had no effect would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpuhub.common.errors import InvalidRequest

#: DockerSpawner's traits that have their usual effect on notebooks' containers.
DOCKER_TRAITS = frozenset(
    {"volumes", "read_only_volumes", "mounts", "format_volume_name", "escape", "extra_host_config"}
)
#: batchspawner's traits that have their usual effect.
SLURM_TRAITS = frozenset({"start_timeout"})

_MEMORY = "set `memory` of a profile in cluster.toml, and of [jobs] for workers"
_CPUS = "set `cpus` of a profile in cluster.toml, and of [jobs] for workers"
_IMAGE = "set `image` and `images` of a profile in cluster.toml"
_ADDRESS = "notebooks listen where only the hub reaches them; see [network] and [hub] in cluster.toml"
_NAME = "containers have names by which gpuhub finds their leases again"
_DAEMON = "set `docker` and `tls` of each node in cluster.toml"
_CERTIFICATES = "set `internal_tls` below [hub] in cluster.toml"
_SETTINGS = "cluster.toml decides it"
_GPUS = "set `gpu_count` and `gpu_model` of a profile in cluster.toml"
_COMMANDS = "set `api`, `commands` and `conf` below [slurm] in cluster.toml"
_SCRIPT = "gpuhub writes the job itself; what must run first belongs into the image, or into `command` below [slurm]"

#: What to do instead, for each trait without effect.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("mem_limit", "mem_guarantee", "req_memory"), _MEMORY),
    **dict.fromkeys(("cpu_limit", "cpu_guarantee", "req_nprocs"), _CPUS),
    **dict.fromkeys(("image", "container_image", "allowed_images", "image_whitelist"), _IMAGE),
    **dict.fromkeys(("ip", "host_ip", "container_ip", "port", "container_port"), _ADDRESS),
    **dict.fromkeys(("network_name", "links", "use_internal_ip", "use_internal_hostname", "hub_ip_connect"), _ADDRESS),
    **dict.fromkeys(("name_template", "container_name_template", "prefix", "container_prefix"), _NAME),
    **dict.fromkeys(
        ("client_kwargs", "tls", "tls_assert_hostname", "tls_ca", "tls_cert", "tls_config", "tls_key", "tls_verify",
         "use_docker_client_env"),
        _DAEMON,
    ),
    **dict.fromkeys(
        ("certs_volume_name", "move_certs_image", "ssl_alt_names", "ssl_alt_names_include_local"), _CERTIFICATES
    ),
    **dict.fromkeys(("cluster", "head_address", "instance", "make_broker", "make_daemons", "make_slurm"), _SETTINGS),
    **dict.fromkeys(("remove", "remove_containers"), "containers are removed when their lease ends, as proof of it"),
    "pull_policy": "`sudo make up` brings images to the nodes",
    "extra_create_kwargs": "use extra_host_config",
    "post_start_cmd": "put the command into the image, or use pre_spawn_hook",
    **dict.fromkeys(("req_queue", "req_partition"), "set `partition` of a profile, or below [slurm], in cluster.toml"),
    "req_account": "set `account` of a profile, or below [slurm], in cluster.toml",
    "req_qos": "set `qos` of a profile, or below [slurm], in cluster.toml",
    "req_reservation": "set `reservation` of a profile, or below [slurm], in cluster.toml",
    **dict.fromkeys(("req_ngpus", "req_gres"), _GPUS),
    "req_runtime": "set `time_limit` of a profile in cluster.toml",
    "startup_poll_interval": "set `poll` below [slurm] in cluster.toml",
    **dict.fromkeys(
        ("batch_cancel_cmd", "batch_query_cmd", "batch_submit_cmd", "exec_prefix", "req_cluster", "state_exechost_exp",
         "state_exechost_re", "state_pending_re", "state_running_re", "state_unknown_re"),
        _COMMANDS,
    ),
    **dict.fromkeys(
        ("batch_script", "batchspawner_singleuser_cmd", "req_epilogue", "req_host", "req_keepvars_extra", "req_options",
         "req_prologue", "req_srun"),
        _SCRIPT,
    ),
}  # fmt: skip
#: Refused traits that hooks and `group_overrides` often set, which happens only when a notebook starts.
HOOK_TRAITS = (
    "mem_limit", "mem_guarantee", "cpu_limit", "cpu_guarantee", "extra_create_kwargs", "post_start_cmd", "links",
    "batch_script", "req_memory", "req_nprocs", "req_ngpus", "req_gres", "req_runtime", "req_partition", "req_account",
    "req_qos", "req_reservation", "req_options", "req_srun", "req_prologue", "req_epilogue",
)  # fmt: skip
#: Variables of notebooks that gpuhub sets; other values of these would be overwritten.
_OWN_VARIABLES = frozenset({"HOME", "SHELL", "USER"})
_OWN_PREFIX = "GPUHUB_"


def list_mistakes(spawner: type[Any], sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each setting in these sections that has no effect on notebooks.

    Args:
        spawner: The class that starts notebooks.
        sections: The settings of an administrator, by class name and trait.
    """
    classes = {kind.__name__ for kind in spawner.__mro__}
    for section, values in sections.items():
        if section in classes:
            yield from _list_refused(section, values)
        elif section.endswith("Spawner") or section.startswith("BatchSpawner"):
            yield (
                f"c.{section} has no effect: {spawner.__name__} starts notebooks; set c.{spawner.__name__} or c.Spawner"
            )


def _list_refused(section: str, values: Mapping[str, Any]) -> Iterator[str]:
    for name in values:
        if name in REFUSED:
            yield f"c.{section}.{name} has no effect: {REFUSED[name]}"


def list_refused_variables(names: Iterable[str]) -> list[str]:
    """Return the variables of an environment that gpuhub sets itself."""
    return sorted(name for name in names if name in _OWN_VARIABLES or name.startswith(_OWN_PREFIX))


def check_values(spawner: Any) -> None:
    """Refuse a start whose spawner has a value without effect, which a hook or `group_overrides` has set.

    Raises:
        InvalidRequest: The text names the trait and what to do instead.
    """
    for name in HOOK_TRAITS:
        if spawner.has_trait(name) and getattr(spawner, name) != spawner.trait_defaults(name):
            raise InvalidRequest(
                f"The hub's configuration sets {name} of this notebook, which has no effect: {REFUSED[name]}. "
                "Please tell your administrator."
            )
