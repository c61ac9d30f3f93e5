"""What guests send to the head node, before anything of it is used."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common.errors import Conflict, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.machines.guests import GuestSettings
from gpuhub.ops.guests.registry import choose_address
from gpuhub.ops.guests.service import BadRequest, GuestService, parse_available, parse_join
from gpuhub.ops.guests.wireguard import HeadInterface, format_removal
from tests.support.docker.simulated_nodes import build_cluster, wait_until
from tests.support.hub.login_hub import free_ports
from tests.support.paths import FolderPaths

KEY = "A" * 43 + "="
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ"
JOIN = {"public_key": KEY, "host_key": HOST_KEY, "mtu": 1412}


def test_a_machine_joins_with_keys_and_mtu() -> None:
    """As gpuhub-node sends them."""
    body = parse_join(JOIN)
    assert (body.public_key, body.host_key.kind, body.mtu) == (KEY, "ssh-ed25519", 1412)


@pytest.mark.parametrize(
    "change",
    [
        {"public_key": "short"},
        {"public_key": KEY + "\n"},
        {"public_key": None},
        {"host_key": HOST_KEY + "\n10.0.0.1 ssh-ed25519 AAAA"},
        {"host_key": "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIJ"},
        {"mtu": 0},
        {"mtu": True},
        {"mtu": "1412"},
        {"mtu": 10**9},
    ],
)
def test_other_joins_are_refused(change: dict[str, Any]) -> None:
    """Lines for known_hosts and arguments of commands among them."""
    with pytest.raises(BadRequest):
        parse_join({**JOIN, **change})


@pytest.mark.parametrize("raw", [None, [], "yes", {}, {"available": 1}, {"available": None}])
def test_other_states_are_refused(raw: object) -> None:
    """A guest is lent or not."""
    with pytest.raises(BadRequest):
        parse_available(raw)


def test_addresses_are_given_once() -> None:
    """The head node has the first one."""
    network = ipaddress.IPv4Network("10.213.77.0/29")
    used: list[str] = []
    for _ in range(5):
        used.append(choose_address(network, used))
    assert used[0] == "10.213.77.2"
    assert len(set(used)) == 5
    with pytest.raises(Conflict, match="no free address"):
        choose_address(network, used)


async def test_a_guest_that_changes_its_mind_all_the_time_is_followed_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is an event and a line of the audit log, which others need."""
    interface: Any = None
    service = GuestService(Paths("ghtoggle"), tmp_path / "cluster.toml", build_cluster(), interface=interface)
    followed: list[bool] = []

    async def change_broker(name: str, *, is_paused: bool) -> None:
        assert name == "mia"
        followed.append(is_paused)

    monkeypatch.setattr(service, "_change_broker", change_broker)
    for number in range(1000):
        await service._sync_pause("mia", is_paused=number % 2 == 0)
    assert followed == [True, False] * 5


@pytest.mark.process
@pytest.mark.parametrize("is_left", [False, True], ids=["no file", "an empty file of an earlier version"])
def test_the_key_is_made_once_wireguard_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_left: bool
) -> None:
    """The service starts again and again until the administrator has installed wg, and left an empty key behind."""
    paths = FolderPaths("ghkey", folder=tmp_path / "state")
    interface = HeadInterface(paths, GuestSettings())
    monkeypatch.setenv("PATH", str(tmp_path))
    if is_left:
        paths.secrets.mkdir(parents=True)
        interface.key_file.touch()
    for _ in range(2):
        with pytest.raises(SetupError, match="wireguard-tools"):
            interface.read_public_key()
    (tmp_path / "wg").write_text(f'#!/bin/sh\n[ "$1" = genkey ] && echo {KEY} || {{ read key; echo "of $key"; }}\n')
    (tmp_path / "wg").chmod(0o755)
    assert interface.read_public_key() == f"of {KEY}"
    assert stat.S_IMODE(interface.key_file.stat().st_mode) == 0o600


#: The service's commands: `nft` records its input, and `ip` fails when that is asked.
COMMANDS = {
    "nft": '/bin/cat >> "$RULES"',
    "ip": 'exit "$IP_STATUS"',
    "wg": f'[ "$1" = show ] || echo {KEY}',
}
SERVE = """
import sys
from pathlib import Path
from gpuhub.ops.guests.service import serve
from tests.support.paths import FolderPaths
serve(Path(sys.argv[1]), FolderPaths("ghend", folder=Path(sys.argv[2])))
"""


SETTINGS = """
[[nodes]]
name = "rig1"
address = "127.0.1.1"
docker = "unix:///nowhere/rig1.sock"

[[profiles]]
name = "any"
title = "Any"

[users]
login = "password"
allowed = ["ada"]
uid_first = 5000

[guests]
endpoint = "home.example.org:51820"
subnet = "127.213.77.0/24"
service_port = {port}
"""


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.213.77.1", port)) == 0


@pytest.mark.process
@pytest.mark.parametrize("ip_status", ["0", "1"], ids=["it is ended", "the interface cannot be created"])
def test_no_packet_filter_remains_when_the_service_ends(tmp_path: Path, ip_status: str) -> None:
    """It would drop packets of others with the same addresses."""
    for name, command in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    rules, file = tmp_path / "rules", tmp_path / "cluster.toml"
    [port] = free_ports(1)
    file.write_text(SETTINGS.format(port=port))
    environment = {**os.environ, "PATH": str(tmp_path), "RULES": str(rules), "IP_STATUS": ip_status}
    with subprocess.Popen([sys.executable, "-c", SERVE, str(file), str(tmp_path)], env=environment) as service:
        if ip_status == "0":
            wait_until(lambda: is_listening(port), "the service answers")
            service.terminate()
    assert service.returncode == int(ip_status)
    assert "chain from_guests" in rules.read_text()
    assert rules.read_text().endswith("}\n" + format_removal("ghend"))
