"""The texts of a small Slurm cluster's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpuhub.common.errors import SettingsError
from gpuhub_closet.slurm.slurm_config import (
    SlurmAccount,
    SlurmAccountingConfig,
    SlurmConfig,
    SlurmNodeConfig,
    SlurmPartitionConfig,
    format_accounts,
    format_gres_conf,
    format_slurm_conf,
    format_slurmdbd_conf,
)
from tests.support.golden import check_golden

GOLDEN = Path(__file__).with_name("golden")

FILES = SlurmConfig(
    cluster="lab",
    nodes=(
        SlurmNodeConfig(
            name="rig1", address="10.0.0.11", gpus=("rtx5090", "rtx5090", "rtx5070"), cpus=8, memory_mib=64000
        ),
        SlurmNodeConfig(name="rig2", address="10.0.0.12", port=7001, gpus=("",), hostname="localhost"),
        SlurmNodeConfig(name="cpu1", address="10.0.0.13"),
    ),
    folder=Path("/srv/slurm"),
    munge_socket=Path("/srv/slurm/munge.socket"),
    head_address="10.0.0.1",
)


def test_slurm_conf():
    """The whole file of a cluster without accounting."""
    check_golden(format_slurm_conf(FILES), GOLDEN / "slurm.conf")


def test_optional_settings():
    """Accounts, tokens, an Epilog, partitions and additional lines."""
    extended = replace(
        FILES,
        accounting=SlurmAccountingConfig(port=7100),
        jwt_key=Path("/srv/slurm/jwt.key"),
        epilog=Path("/srv/slurm/epilog.sh"),
        partitions=(
            SlurmPartitionConfig(name="long", is_default=False),
            SlurmPartitionConfig(name="short", nodes=("rig1", "rig2"), max_minutes=60, default_minutes=10, max_nodes=2),
        ),
        extra_lines=("EnforcePartLimits=ALL",),
    )
    assert sorted(set(format_slurm_conf(extended).splitlines()) - set(format_slurm_conf(FILES).splitlines())) == [
        "AccountingStorageEnforce=associations,limits,qos",
        "AccountingStorageHost=127.0.0.1",
        "AccountingStoragePass=/srv/slurm/munge.socket",
        "AccountingStoragePort=7100",
        "AccountingStorageTRES=gres/gpu,gres/gpu:rtx5090,gres/gpu:rtx5070",
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AuthAltParameters=jwt_key=/srv/slurm/jwt.key",
        "AuthAltTypes=auth/jwt",
        "EnforcePartLimits=ALL",
        "Epilog=/srv/slurm/epilog.sh",
        "PartitionName=long Nodes=ALL State=UP Default=NO",
        "PartitionName=short Nodes=rig1,rig2 State=UP Default=YES MaxTime=60 DefaultTime=10 MaxNodes=2",
        "PriorityType=priority/multifactor",
        "PriorityWeightFairshare=100000",
    ]
    check_golden(format_slurmdbd_conf(extended), GOLDEN / "slurmdbd.conf")
    with pytest.raises(SettingsError, match="for a cluster with accounting"):
        format_slurmdbd_conf(FILES)


def test_gres_conf_has_a_line_for_each_gpu():
    """Each GPU has its own file, and a type if it is known."""
    check_golden(format_gres_conf(FILES), GOLDEN / "gres.conf")
    assert [str(path.relative_to("/srv/slurm/dev")) for path in FILES.devices] == [
        "rig1/nvidia0",
        "rig1/nvidia1",
        "rig1/nvidia2",
        "rig2/nvidia0",
    ]


def test_additional_users():
    """New users are added to the machine's; they replace lines with their name or number."""
    passwd = "root:x:0:0:root:/root:/bin/bash\nada:x:1000:1000::/home/ada:/bin/sh\nold:x:20001:7::/:/bin/sh\n"
    group = "root:x:0:\nada:x:1000:\ndocker:x:998:\nvideo:x:44:eve\n"
    users = [
        SlurmAccount(name="ada", uid=20000, home=Path("/srv/homes/ada"), groups=(("video", 44), ("lab", 3000))),
        SlurmAccount(name="ben", uid=20001, home=Path("/srv/homes/ben"), groups=(("lab", 3000),)),
    ]
    assert format_accounts(passwd, group, users) == (
        "root:x:0:0:root:/root:/bin/bash\n"
        "ada:x:20000:20000::/srv/homes/ada:/bin/bash\n"
        "ben:x:20001:20001::/srv/homes/ben:/bin/bash\n",
        "root:x:0:\ndocker:x:998:\nada:x:20000:\nben:x:20001:\nvideo:x:44:ada\nlab:x:3000:ada,ben\n",
    )


@pytest.mark.parametrize("bad", ["", "a b", "a\nSlurmUser=eve", "a,b", "a#b", "ä", "a=b"])
def test_special_characters_are_refused(bad):
    """Blanks, line ends, commas and comments never get into a file."""
    node = FILES.nodes[0]
    with pytest.raises(SettingsError, match="cannot be written to Slurm's files"):
        replace(FILES, cluster=bad)
    for change in ({"name": bad}, {"address": bad}, {"gpus": (f"{bad} ",)}, {"hostname": f"{bad} "}):
        with pytest.raises(SettingsError, match="cannot be written to Slurm's files"):
            replace(FILES, nodes=(replace(node, **change),))
    with pytest.raises(SettingsError, match="cannot be written to Slurm's files"):
        replace(FILES, partitions=(SlurmPartitionConfig(name=bad),))
    with pytest.raises(SettingsError, match="cannot be written to Slurm's files"):
        format_accounts("", "", [SlurmAccount(name=bad, uid=1, home=Path("/home"))])
