"""`[power]` of cluster.toml and `power` of a node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common.errors import SettingsError
from gpuhub.config import settings
from gpuhub.config.settings import ClusterSettings

HEAD = """
[users]
allowed = ["ada"]
[[profiles]]
name = "any"
title = "Any"
"""
RIG1 = '[[nodes]]\nname = "rig1"\naddress = "10.0.0.11"\ndocker = "unix:///run/docker.sock"\n'
RIG2 = '[[nodes]]\nname = "rig2"\naddress = "10.0.0.12"\ndocker = "ssh://root@10.0.0.12"\n'
RIG3 = RIG2.replace("rig2", "rig3").replace(".12", ".13")
WAKE = 'power = { mac = "3C-EC-EF-12-34-56", idle = "30m" }\n'


def load(folder: Path, *texts: str, before: Sequence[str] = ()) -> ClusterSettings:
    file = folder / "cluster.toml"
    file.write_text("".join((*before, HEAD, *texts)), encoding="utf-8")
    return settings.load(file)


def test_nodes_stay_on_unless_they_have_power(tmp_path: Path) -> None:
    """A table [power] alone changes nothing."""
    cluster = load(tmp_path, RIG1, RIG2, '[power]\nidle = "30m"\n')
    assert cluster.power_nodes == ()
    assert cluster.find_power("rig2") is None


def test_node_has_the_defaults_of_the_table(tmp_path: Path) -> None:
    """Except for those that it changes."""
    cluster = load(tmp_path, RIG1, RIG2, WAKE, '[power]\noff = "poweroff"\nidle = "2h"\nwake_timeout = "90s"\n')
    power = cluster.find_power("rig2")
    assert power is not None
    assert (power.on, power.off, power.idle, power.wake_timeout) == ("wake-on-lan", "poweroff", 1800, 90)
    assert cluster.node("rig2").power.mac == "3c:ec:ef:12:34:56"


def test_commands_are_lists_of_words(tmp_path: Path) -> None:
    """They are kept as they are written."""
    cluster = load(tmp_path, RIG1, RIG2, 'power = { on = ["/opt/plug", "on", "a b"], off = ["/opt/plug", "off"] }\n')
    power = cluster.find_power("rig2")
    assert power is not None
    assert (power.on, power.off) == (("/opt/plug", "on", "a b"), ("/opt/plug", "off"))


@pytest.mark.parametrize(
    ("texts", "mistake"),
    [
        ([RIG1, RIG2, "power = {}\n"], "nodes: 'rig2': power.mac: is missing"),
        (
            [RIG1, RIG2, 'power = { mac = "01:00:5e:00:00:01" }\n'],
            "power.mac: '01:00:5e:00:00:01' is not the address of a",
        ),
        ([RIG1, RIG2, 'power = { mac = "rig2" }\n'], "power.mac: 'rig2'"),
        ([RIG1, RIG2, 'power = { on = "wol" }\n'], '\'wol\' is neither one of "wake-on-lan", "ipmi" nor a command'),
        ([RIG1, RIG2, "power = { on = [] }\n"], "[] is neither one of"),
        ([RIG1, RIG2, 'power = { on = ["plug", "on"] }\n'], "'plug' is not the full path of a program"),
        ([RIG1, RIG2, 'power = { on = ["/opt/plug", 1] }\n'], "is neither one of"),
        ([RIG1, RIG2, 'power = { off = "hibernate" }\n'], '"suspend", "poweroff", "ipmi"'),
        ([RIG1, RIG2, 'power = { on = "ipmi" }\n'], "power.ipmi_address: is missing"),
        ([RIG1, RIG2, 'power = { on = "ipmi" }\n'], "power.ipmi_password_file: is missing"),
        ([RIG1, RIG2, WAKE.replace("30m", "30s")], "power.idle: 30 s is too short"),
        ([RIG1, RIG2, WAKE, '[power]\nwake_timeout = "2h"\n'], "power.wake_timeout: 2 h is too long"),
        ([RIG1, RIG2, WAKE, '[power]\nbroadcast = "224.0.0.1"\n'], "power.broadcast: '224.0.0.1' is not a broadcast"),
        ([RIG1, RIG2, WAKE, '[power]\nmac = "3c:ec:ef:12:34:56"\n'], "power.mac: there is no such key"),
        ([RIG1, RIG2, WAKE, '[slurm]\npartition = "gpu"\n'], "takes a node for resumed only after it has booted"),
        ([RIG1, WAKE], "power: docker = 'unix:///run/docker.sock' is the head node itself"),
        ([RIG2, WAKE, RIG3, WAKE], "'rig2': power: one node at least has to stay on"),
        ([RIG1, RIG2, "desktop = true\n", WAKE], "power.idle: a user works at the machine's screen"),
        ([RIG1, RIG2, WAKE, '[storage]\nhome = "nfs://10.0.0.12/h/{username}"\n'], "power: '10.0.0.12' serves files"),
        ([RIG1, RIG2, WAKE, '[storage]\ndatasets = "nfs://rig2/data"\n'], "power: 'rig2' serves files"),
        ([RIG1, RIG2.replace("10.0.0.12", "127.0.0.1"), WAKE], "power: 127.0.0.1 is this machine"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, texts: list[str], mistake: str) -> None:
    """The message names the key, the value and the remedy; machines that must stay on never sleep."""
    head = ['engine = "slurm"\n'] if any("[slurm]" in text for text in texts) else []
    with pytest.raises(SettingsError, match=re.escape(mistake)):
        load(tmp_path, *texts, before=head)


def test_nodes_that_stay_on_keep_users_networks(tmp_path: Path) -> None:
    """The head node if it is one of them, otherwise three, and of fewer one: of two managers both would be needed."""

    def choose(*nodes: str) -> list[str]:
        return [node.name for node in load(tmp_path, *nodes).swarm_managers]

    rig4, rig5 = (RIG3.replace("rig3", f"rig{number}").replace(".13", f".1{number}") for number in (4, 5))
    assert choose(RIG1) == ["rig1"]
    assert choose(RIG2, WAKE, RIG3, rig4) == ["rig3"]
    assert choose(RIG2, WAKE, RIG3, rig4, rig5) == ["rig3", "rig4", "rig5"]
    assert choose(RIG3, rig4, RIG1, rig5) == ["rig1"]
    assert choose(RIG3, RIG1) == ["rig3"]


def test_desktop_may_be_woken(tmp_path: Path) -> None:
    """Only the sleep after idle time is refused there."""
    found: Any = load(tmp_path, RIG1, RIG2, "desktop = true\n", 'power = { mac = "3c:ec:ef:12:34:56" }\n')
    assert found.find_power("rig2").idle == 0
