"""The texts of a head node's exports, and the settings from which they follow."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gpuhub.common.errors import SettingsError
from gpuhub.config import settings
from gpuhub.config.settings import StorageSettings
from gpuhub.storage.exports import (
    MARKER,
    Export,
    ExportList,
    find_exports,
    format_exports_file,
    format_firewall,
    format_ganesha_config,
)

CLUSTER = """
[[nodes]]
name = "rig1"
address = "192.168.1.21"
docker = "tcp://192.168.1.21:2376"
tls = { ca = "/ca", cert = "/cert", key = "/key" }
[[nodes]]
name = "rig2"
address = "192.168.1.9"
docker = "tcp://192.168.1.9:2376"
tls = { ca = "/ca", cert = "/cert", key = "/key" }
[[profiles]]
name = "one"
title = "One GPU"
[users]
allowed = ["ada"]
[hub]
address = "192.168.1.20"
[storage]
"""
SERVED = ExportList(
    exports=(Export(folder="/export/home", is_writable=True), Export(folder="/export/data", is_writable=False)),
    clients=("192.168.1.9", "192.168.1.21"),
    port=2049,
)


def load(tmp_path: Path, storage: str) -> settings.ClusterSettings:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER + storage)
    return settings.load(file)


def test_one_line_makes_the_head_node_the_file_server(tmp_path: Path) -> None:
    """Nodes mount its folders over NFS, and it creates homes on its own disk; each node is a client."""
    cluster = load(tmp_path, 'serve = true\nhome = "/export/home/{username}"\ndatasets = "/export/data"\n')
    assert cluster.storage.home == "nfs://192.168.1.20/export/home/{username}"
    assert cluster.storage.home_create == "/export/home/{username}"
    assert cluster.storage.datasets == "nfs://192.168.1.20/export/data"
    assert find_exports(cluster) == SERVED
    alone = load(tmp_path, "serve = true\n")
    assert (alone.storage.home, alone.storage.datasets) == ("nfs://192.168.1.20/home/{username}", None)
    assert [export.folder for export in find_exports(alone).exports] == ["/home"]
    assert find_exports(load(tmp_path, 'datasets = "nfs://192.168.1.20/export/data"\n')).exports == ()
    models = load(tmp_path, 'serve = true\nmodels = "/export/models"\n')
    assert models.storage.models == "nfs://192.168.1.20/export/models"
    assert [(export.folder, export.is_writable) for export in find_exports(models).exports] == [
        ("/home", True),
        ("/export/models", False),
    ]


@pytest.mark.parametrize(
    ("storage", "mistake"),
    [
        (
            {"home": "nfs://nas/home/{username}"},
            r"home = 'nfs://nas/home/\{username\}': with serve = true this is a folder",
        ),
        ({"datasets": "nfs://nas/data"}, "datasets = 'nfs://nas/data': with serve = true this is a folder"),
        ({"datasets": "/export/my data"}, 'such as "/export/datasets"'),
        ({"models": "nfs://nas/models"}, 'such as "/export/models"'),
        ({"home": "/export/{username}/home"}, 'such as "/export/home/{username}"'),
        ({"home_create": "/export/{username}"}, "home_create: with serve = true the head node creates homes"),
        ({"nfs_options": "nfsvers=3"}, "with serve = true, nfsvers=4.2 is needed"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(storage: dict[str, str], mistake: str) -> None:
    """With what would be right."""
    with pytest.raises(ValidationError, match=mistake):
        StorageSettings.model_validate({"serve": True, **storage})


def test_head_node_without_an_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes could mount nothing."""
    monkeypatch.setattr("gpuhub.config.settings.find_own_address", lambda _targets: None)
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER.replace('address = "192.168.1.20"', "") + "serve = true\n")
    with pytest.raises(SettingsError, match=r"storage\.serve: this machine has no address for nodes: set hub.address"):
        settings.load(file)


def test_exports_file_names_each_node() -> None:
    """As exports(5) has it; root is nobody there."""
    lines = format_exports_file(SERVED).splitlines()
    options = "sync,no_subtree_check,root_squash,sec=sys"
    assert lines == [
        MARKER,
        f'"/export/home" 192.168.1.9(rw,{options}) 192.168.1.21(rw,{options})',
        f'"/export/data" 192.168.1.9(ro,{options}) 192.168.1.21(ro,{options})',
    ]


def test_ganesha_gives_nobody_but_nodes_access() -> None:
    """tests/integration/gpuhub/storage runs the server with such a text."""
    text = format_ganesha_config(SERVED, state=Path("/state"), bind="192.168.1.20")
    assert text.count("Access_Type = NONE;") == 2
    assert text.count("Clients = 192.168.1.9, 192.168.1.21;") == 2
    assert (text.count("Access_Type = RW;"), text.count("Access_Type = RO;")) == (1, 1)
    assert text.count("Squash = Root_Squash;") == 4
    assert "Bind_addr = 192.168.1.20;" in text


def test_firewall_lets_nodes_and_the_head_node_through() -> None:
    """Both IP versions; without exports the table goes."""
    both = ExportList(exports=SERVED.exports, clients=("192.168.1.9", "fd00::9"), port=2050)
    assert format_firewall(both, "gpuhub").splitlines()[2:] == [
        "table inet gpuhub_gpuhub_storage {",
        "\tchain input {",
        "\t\ttype filter hook input priority filter - 5; policy accept;",
        '\t\ttcp dport 2050 iif "lo" accept',
        "\t\ttcp dport 2050 ip saddr { 192.168.1.9 } accept",
        "\t\ttcp dport 2050 ip6 saddr { fd00::9 } accept",
        "\t\ttcp dport 2050 counter drop",
        "\t}",
        "}",
    ]
    nothing = ExportList(exports=(), clients=("192.168.1.9",), port=2049)
    assert format_firewall(nothing, "gpuhub").splitlines() == [
        "table inet gpuhub_gpuhub_storage",
        "delete table inet gpuhub_gpuhub_storage",
    ]
