"""The guest's own program: hours in which its owner lends it, and the way to a head node whose address changes."""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuhub.ops.guests import node_program
from gpuhub.ops.guests.node_program import Failure, is_lent, parse_hours


@pytest.mark.parametrize(
    ("wishes", "hour", "lent"),
    [
        ({}, 12, True),
        ({"paused": True}, 12, False),
        ({"hours": "22:00-08:00"}, 23, True),
        ({"hours": "22:00-08:00"}, 7, True),
        ({"hours": "22:00-08:00"}, 8, False),
        ({"hours": "22:00-08:00"}, 21, False),
        ({"hours": "9:00-17:00"}, 9, True),
        ({"hours": "9:00-17:00"}, 17, False),
        ({"hours": "22:00-08:00", "paused": True}, 23, False),
    ],
)
def test_hours_and_pauses(wishes: dict[str, object], hour: int, lent: bool) -> None:
    """Hours may pass midnight; a pause counts at all hours."""
    assert is_lent(wishes, hour * 60) is lent


@pytest.mark.parametrize("text", ["22-8", "25:00-08:00", "22:00-08:60", "08:00-08:00", "", "22:00-08:00; reboot"])
def test_what_are_no_hours_is_refused(text: str) -> None:
    """With what is right."""
    with pytest.raises(Failure, match="always"):
        parse_hours(text)


# -- the service ----------------------------------------------------------------------------------------------------------

CONFIG = {"head": "10.213.77.1", "port": 8010, "head_key": "KEY", "endpoint": "home.example.org:51820"}


class Machine:
    """What the service starts, asks and waits for; each wait is a period of the clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.commands: list[tuple[str, ...]] = []
        #: Times at which the head node answers, seconds since the start.
        self.answers: set[float] = set()
        self.ends_at = 1100.0

    def run(self, *command: str, **_options: object) -> str:
        self.commands.append(command)
        return ""

    def ask(self, *_arguments: object) -> dict[str, Any]:
        if self.now - 1000 in self.answers:
            return {"grace_s": 60, "is_paused": False}
        raise Failure("the head node does not answer: timed out")

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.ends_at:
            raise SystemExit


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    for name in ("CONFIG", "WISHES", "STATUS", "FOLDER", "RUN"):
        monkeypatch.setattr(node_program, name, tmp_path / name.lower())
    (tmp_path / "config").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(node_program, "Path", lambda _sshd: tmp_path / "sshd")
    clock = SimpleNamespace(monotonic=lambda: machine.now, localtime=time.localtime, sleep=machine.sleep)
    monkeypatch.setattr(node_program, "time", clock)
    sshd = SimpleNamespace(poll=lambda: None, terminate=lambda: None)
    monkeypatch.setattr(node_program, "subprocess", SimpleNamespace(Popen=lambda *_, **__: sshd, DEVNULL=-3))
    monkeypatch.setattr(node_program, "require_root", lambda: None)
    monkeypatch.setattr(node_program, "ensure_tunnel", lambda _config: None)
    monkeypatch.setattr(node_program, "list_containers", lambda *_: [])
    monkeypatch.setattr(node_program, "run", machine.run)
    monkeypatch.setattr(node_program, "ask", machine.ask)
    return machine


@pytest.mark.parametrize(
    ("address", "endpoint"), [("198.51.100.7", "198.51.100.7:51820"), ("2001:db8::7", "[2001:db8::7]:51820")]
)
def test_the_head_nodes_new_address_is_found(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, address: str, endpoint: str
) -> None:
    """WireGuard resolves the name of an endpoint once, and the address of a home may change every day."""
    names: list[object] = []

    def resolve(name: str, port: int, **_options: object) -> list[Any]:
        names.append((name, port))
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, port))]

    monkeypatch.setattr(node_program, "socket", SimpleNamespace(getaddrinfo=resolve, SOCK_DGRAM=socket.SOCK_DGRAM))
    machine.answers = {0.0, 3.0, 12.0}
    with pytest.raises(SystemExit):
        node_program.serve(argparse.Namespace())
    # Not before 30 s of silence, and then once in that time.
    assert machine.commands == [("wg", "set", "gpuhub", "peer", "KEY", "endpoint", endpoint)] * 2
    assert names == [("home.example.org", 51820)] * 2


def test_the_service_runs_on_where_names_are_not_resolved(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the guest itself may be down."""

    def fail(*_arguments: object, **_options: object) -> list[Any]:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(node_program, "socket", SimpleNamespace(getaddrinfo=fail, SOCK_DGRAM=socket.SOCK_DGRAM))
    with pytest.raises(SystemExit):
        node_program.serve(argparse.Namespace())
    assert machine.now == 1102.0
    assert "does not answer" in json.loads(node_program.STATUS.read_text())["message"]


# -- leaving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", ["docker is missing", "docker did not end within 120 s"])
def test_the_owner_can_leave_without_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: str
) -> None:
    """Whoever has removed or stopped Docker wants to be rid of account and tunnel all the same."""
    machine, folder = Machine(), tmp_path / "gpuhub-node"
    folder.mkdir()
    (folder / "config").write_text(json.dumps({**CONFIG, "name": "mia", "instance": "gpuhub"}))
    files = {"FOLDER": folder, "CONFIG": folder / "config", "WISHES": folder / "wishes", "STATUS": folder / "status"}
    for name, path in (files | {name: tmp_path / name for name in ("RUN", "PROGRAM", "UNIT")}).items():
        monkeypatch.setattr(node_program, name, path)

    def run(*command: str, **_options: object) -> str:
        if command[0] == "docker":
            raise Failure(problem)
        return machine.run(*command)

    monkeypatch.setattr(node_program, "run", run)
    monkeypatch.setattr(node_program, "ask", lambda *_: {})
    monkeypatch.setattr(node_program, "require_root", lambda: None)
    monkeypatch.setattr(node_program, "has_systemd", lambda: False)
    node_program.leave(argparse.Namespace())
    assert machine.commands[-2:] == [("ip", "link", "delete", "gpuhub"), ("userdel", "gpuhub-guest")]
    assert not folder.exists()
    output = capsys.readouterr().out
    assert f"{problem}\n    Containers, networks, volumes and images of gpuhub may remain here." in output
    assert "containers removed" not in output
    assert output.endswith("This machine is no guest any more. Driver, Docker and toolkit stay.\n")
