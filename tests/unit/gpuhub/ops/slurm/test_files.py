"""The texts of the files of an installed Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpuhub.common.errors import SettingsError
from gpuhub.ops.doctor.slurm.slurm_checks import parse_config
from gpuhub.ops.slurm.files import (
    CGROUP_CONF,
    EPILOG,
    GRES_CONF,
    HEALTH_CHECK,
    JWT_KEY,
    MARKER,
    MUNGE_KEY,
    REST_DROP_IN,
    SLURM_CONF,
    SLURMDBD_CONF,
    ClusterSecrets,
    format_cgroup_conf,
    format_gres_conf,
    format_rest_drop_in,
    format_slurm_conf,
    format_slurmdbd_conf,
    list_files,
    parse_database_password,
)
from tests.support.golden import check_golden
from tests.support.slurm.installed import CLUSTER, VARIANTS

GOLDEN = Path(__file__).with_name("golden")
PASSWORD = "0f1e2d3c"
SECRETS = ClusterSecrets(munge_key=b"m" * 1024, jwt_key=b"j" * 32, database_password=PASSWORD)


@pytest.mark.parametrize("name", VARIANTS)
def test_slurm_conf(name: str) -> None:
    check_golden(format_slurm_conf(VARIANTS[name]), GOLDEN / f"{name}.slurm.conf")


def test_other_files() -> None:
    """One gres.conf line for each GPU with the device file that the driver gives it."""
    check_golden(format_gres_conf(VARIANTS["head-computes"]), GOLDEN / "gres.conf")
    check_golden(format_cgroup_conf(), GOLDEN / "cgroup.conf")
    full = replace(CLUSTER, has_accounting=True, rest_plugins="openapi/v0.0.38,openapi/dbv0.0.38")
    check_golden(format_slurmdbd_conf(full, PASSWORD), GOLDEN / "slurmdbd.conf")
    check_golden(format_rest_drop_in("openapi/v0.0.38,openapi/dbv0.0.38"), GOLDEN / "slurmrestd.service.conf")


def test_doctor_finds_what_it_requires() -> None:
    config = parse_config(format_slurm_conf(CLUSTER))
    assert config["epilog"] == str(EPILOG)
    assert "cgroup" in config["taskplugin"]
    assert config["enforcepartlimits"] == "ALL"


def test_files_of_each_machine() -> None:
    """Secrets are for their daemons alone, and only the head has those of slurmdbd and slurmrestd."""
    full = replace(CLUSTER, has_accounting=True, rest_plugins="openapi/v0.0.38")
    everywhere = [MUNGE_KEY, SLURM_CONF, GRES_CONF, CGROUP_CONF]
    head = {file.path: file for file in list_files(full, SECRETS, is_head=True, computes=False)}
    assert list(head) == [*everywhere, SLURMDBD_CONF, JWT_KEY, REST_DROP_IN]
    node = {file.path: file for file in list_files(full, SECRETS, is_head=False, computes=True)}
    assert list(node) == [*everywhere, EPILOG]
    assert node[EPILOG].mode == 0o755
    assert [(file.path, file.owner, file.mode) for file in head.values() if file.is_secret] == [
        (MUNGE_KEY, "munge", 0o400),
        (SLURMDBD_CONF, "slurm", 0o600),
        (JWT_KEY, "slurm", 0o600),
    ]
    assert all(PASSWORD.encode() not in file.content for file in head.values() if not file.is_secret)
    public = [path for path, file in head.items() if not file.is_secret]
    assert all(head[path].content.decode().startswith(f"{MARKER}\n") for path in public)


def test_health_check_is_on_the_nodes_that_compute() -> None:
    cluster = VARIANTS["health-check"]
    node = {file.path: file for file in list_files(cluster, SECRETS, is_head=False, computes=True)}
    assert (node[HEALTH_CHECK].owner, node[HEALTH_CHECK].mode) == ("root", 0o755)
    assert node[HEALTH_CHECK].content.startswith(b"#!/bin/sh\n")
    assert HEALTH_CHECK not in {file.path for file in list_files(cluster, SECRETS, is_head=True, computes=False)}


def test_power_saving_is_the_head_nodes_alone() -> None:
    """slurmctld's user may start one program as root, which only root can change; the rule is as sudo wants it."""
    cluster = VARIANTS["power"]
    head = {file.path: file for file in list_files(cluster, SECRETS, is_head=True, computes=False)}
    node = {file.path for file in list_files(cluster, SECRETS, is_head=False, computes=True)}
    new = [path for path in head if path not in node]
    assert [(str(path), head[path].owner, head[path].mode) for path in new] == [
        ("/etc/slurm/gpuhub-suspend.sh", "root", 0o755),
        ("/etc/slurm/gpuhub-resume.sh", "root", 0o755),
        ("/etc/slurm/gpuhub-power.sh", "root", 0o755),
        ("/etc/sudoers.d/gpuhub-slurm-power", "root", 0o440),
    ]
    check_golden("\n".join(head[path].content.decode() for path in new), GOLDEN / "power.programs.txt")


def test_secrets_are_not_in_the_values_texts() -> None:
    texts = f"{SECRETS} {list(list_files(CLUSTER, SECRETS, is_head=True, computes=True))}"
    assert PASSWORD not in texts
    assert "mmmm" not in texts


def test_password_is_read_back() -> None:
    assert parse_database_password(format_slurmdbd_conf(CLUSTER, PASSWORD)) == PASSWORD
    assert not parse_database_password("StorageUser=slurm\n")


def test_texts_that_slurm_cannot_read_are_refused() -> None:
    with pytest.raises(SettingsError, match="'gpu Nodes=ALL' cannot be written to Slurm's files"):
        replace(CLUSTER, partition="gpu Nodes=ALL")
