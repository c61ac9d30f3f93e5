"""Mount options of NFS volumes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gpuhub.config.machines.storage import check_nfs_options, is_read_only, nfs_port, nfs_version, parse_nfs_options
from gpuhub.config.settings import StorageSettings

GOOD = [
    "",
    "nfsvers=4.2,hard,noatime",
    "vers=3,proto=tcp,nolock,soft,timeo=50,retrans=2",
    "nfsvers=4.1,nconnect=16,max_connect=16,fsc,rsize=1048576,wsize=65536",
    "nfsvers=4,sec=krb5p,actimeo=0,lookupcache=pos,local_lock=none,port=2050",
    "nfsvers=4.2,xprtsec=mtls,softerr,nosharecache,acregmin=3,acdirmax=60",
]


@pytest.mark.parametrize("text", GOOD)
def test_valid_nfs_options_are_accepted(text: str) -> None:
    """As it stands in nfs(5)."""
    check_nfs_options(text)
    assert StorageSettings(home="nfs://nas/home/{username}", nfs_options=text).nfs_options == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nfsver=4.2", r"there is no option 'nfsver' in nfs\(5\); did you mean 'nfsvers'\?"),
        ("nconect=4", "did you mean 'nconnect'"),
        ("zzzz", r"there is no option 'zzzz' in nfs\(5\)"),
        ("nfsvers=2", "nfsvers=2: one of 3, 4, 4.0, 4.1, 4.2 is needed"),
        ("nconnect=17", "a whole number from 1 to 16"),
        ("nconnect=0", "a whole number from 1 to 16"),
        ("nconnect", "nconnect needs a value"),
        ("nconnect=", "nconnect=: a whole number"),
        ("hard=1", "hard takes no value"),
        ("rsize=1000", "a multiple of 1024"),
        ("wsize=2097152", "up to 1048576"),
        ("timeo=0", "tenths of a second"),
        ("sec=none", "one of sys, krb5, krb5i, krb5p"),
        ("lookupcache=some", "one of all, none, pos, positive"),
        ("addr=10.0.0.1", "addr: the server's address is taken from nfs://"),
        ("bg", "bg: Docker mounts when a container starts"),
        ("proto=udp", "no longer supports NFS over UDP"),
        ("udp", "no longer supports NFS over UDP"),
        ("_netdev", "/etc/fstab"),
        ("hard,soft", "hard and soft exclude each other"),
        ("vers=3,nfsvers=4", "nfsvers and vers exclude each other"),
        ("hard,hard", "hard is set twice"),
        ("nconnect=99,bad=1", "nconnect=99: .*; there is no option 'bad'"),
    ],
)
def test_invalid_nfs_options_are_refused_with_a_remedy(text: str, says: str) -> None:
    """Before anything is mounted, and in the settings."""
    with pytest.raises(ValueError, match=says):
        check_nfs_options(text)
    with pytest.raises(ValidationError, match=says):
        StorageSettings(home="nfs://nas/home/{username}", nfs_options=text)


def test_nfs_port_and_version_match_the_mount() -> None:
    """Without mount.nfs the kernel takes version 3 when nothing is said; RDMA's port is not TCP's."""
    assert (nfs_port(""), nfs_version("")) == (2049, 3)
    assert (nfs_port("port=2050,vers=4.1"), nfs_version("port=2050,vers=4.1")) == (2050, 4)
    assert nfs_port("proto=rdma,port=20049,nfsvers=4.2") == 2049
    assert parse_nfs_options("hard,nconnect=4") == {"hard": "", "nconnect": "4"}
    assert (is_read_only("hard,ro"), is_read_only("hard")) == (True, False)


def test_homes_on_a_read_only_mount_are_refused() -> None:
    """Datasets may well be on one."""
    with pytest.raises(ValidationError, match="homes could not be written"):
        StorageSettings(home="nfs://nas/home/{username}", nfs_options="hard,ro")
    StorageSettings(home="/srv/{username}", datasets="nfs://nas/data", nfs_options="hard,ro")


@pytest.mark.parametrize(
    "place",
    ["nfs://nas:2050/home/{username}", "nfs://me@nas/home/{username}", "nfs://a,soft/home/{username}", "nfs://nas"],
)
def test_nfs_address_must_be_server_and_path(place: str) -> None:
    """A port in it would be passed over silently, a comma would be another option."""
    with pytest.raises(ValidationError):
        StorageSettings(home=place)


def test_ipv6_servers_have_brackets() -> None:
    """As everywhere in addresses."""
    assert StorageSettings(home="nfs://[fd00::1]/home/{username}").home.startswith("nfs://[fd00::1]")


def test_storage_timeout_must_be_shorter_than_start_timeout() -> None:
    """Else the start's own deadline would come first, with a worse text."""
    with pytest.raises(ValidationError, match="less than or equal to 60"):
        StorageSettings(home="/srv/{username}", patience="5m")


def test_models_are_a_path_or_an_address() -> None:
    """As datasets are; both are read by all users."""
    settings = StorageSettings(datasets="/data", models="nfs://nas/models")
    assert settings.list_read_only() == ("/data", "nfs://nas/models")
    assert StorageSettings().list_read_only() == ()
    with pytest.raises(ValidationError, match="'models' is neither an absolute path nor nfs://server/path"):
        StorageSettings(models="models")


def test_staged_datasets_are_below_the_datasets_folder() -> None:
    """With the folder that has them, and names that lead nowhere else."""
    settings = StorageSettings(datasets="/data", stage=["datasets/imagenet", "datasets/c4/en"], stage_spare="1T")
    assert settings.stage == ("datasets/imagenet", "datasets/c4/en")
    assert (settings.stage_keep, settings.stage_spare) == (14 * 86400, 1024**4)
    with pytest.raises(ValidationError, match="stage: copies are made of what `datasets` has, and it is not set"):
        StorageSettings(stage=["datasets/imagenet"])
    for name in ("imagenet", "/datasets/a", "datasets/", "datasets/../a", "datasets/a/..", "datasets/a b"):
        with pytest.raises(ValidationError, match="String should match pattern"):
            StorageSettings(datasets="/data", stage=[name])
