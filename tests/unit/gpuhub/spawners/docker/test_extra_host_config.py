"""An administrator's additions to notebooks' containers."""

from __future__ import annotations

import pytest
from docker.types import Mount

from gpuhub.common.errors import SettingsError
from gpuhub.docker.containers.container_spec import ContainerSpec
from gpuhub.spawners.docker.extra_host_config import check_host_config, extend_spec

HOME = Mount(target="/home/ada", source="/home/ada", type="bind")
SPEC = ContainerSpec(
    name="n", image="i", hostname="h", labels={}, environment={}, user="1:1", working_dir="/", command=("c",), ports=(1,),
    host_config={"mounts": [HOME], "mem_limit": 1, "security_opt": ["no-new-privileges:true"]},
)  # fmt: skip


def test_additions_come_in_addition() -> None:
    """The home and the limits stay as they are."""
    more = Mount(target="/more", source="more", type="volume")
    binds = {"/data": {"bind": "/data", "mode": "ro"}}
    spec = extend_spec(SPEC, binds=binds, mounts=[more], extra={"dns": ["10.0.0.1"]})
    assert spec.host_config == {**SPEC.host_config, "mounts": [HOME, more], "binds": binds, "dns": ["10.0.0.1"]}
    assert SPEC.host_config["mounts"] == [HOME]


def test_without_additions_the_container_is_the_same() -> None:
    """Most clusters have none."""
    assert extend_spec(SPEC, binds={}, mounts=[], extra={}) == SPEC


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("privileged", "containers get no rights beyond those of their user"),
        ("device_requests", "GPUs come from leases alone"),
        ("mem_limit", "set `memory` of a profile in cluster.toml"),
        ("nano_cpus", "set `cpus` of a profile in cluster.toml"),
        ("binds", "use DockerSpawner.volumes, read_only_volumes or mounts"),
        ("network_mode", r"see \[network\] in cluster.toml"),
        ("no_such_key", "it takes blkio_weight, dns, "),
    ],
)
def test_other_keys_are_refused(key: str, remedy: str) -> None:
    """They would override what gpuhub decides; the sentence says what to do instead."""
    with pytest.raises(SettingsError, match=f"'{key}' is not passed to Docker: {remedy}"):
        check_host_config({"dns": [], key: 1})
    with pytest.raises(SettingsError, match=key):
        extend_spec(SPEC, binds={}, mounts=[], extra={key: 1})
