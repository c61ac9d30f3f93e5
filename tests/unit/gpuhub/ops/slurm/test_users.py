"""The accounts that machines have, lack, or have otherwise."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuhub.cli.console import AdminConsole
from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.users.users import UserSettings
from gpuhub.ops.slurm import users
from gpuhub.ops.slurm.machines import SlurmMachine
from gpuhub.ops.slurm.users import (
    MachineAccounts,
    NodeAccount,
    build_commands,
    find_conflicts,
    find_uids,
    list_accounts,
    parse_accounts,
)
from tests.support.clusters import build_cluster

EMPTY = MachineAccounts(users={}, groups={})
ADA = NodeAccount(name="ada", uid=1001, gid=1001)
BEN = NodeAccount(name="ben", uid=50001, gid=100)


def test_accounts_are_parsed() -> None:
    """The output of getent on Debian 12, for `ada` and a group."""
    there = parse_accounts("1000\npasswd:ada:x:1001:1001:Ada,,,:/home/ada:/bin/bash\ngroup:users:x:100:ben,ada\n")
    assert there == MachineAccounts(is_root=False, users={"ada": (1001, 1001)}, groups={"users": 100})
    with pytest.raises(SetupError, match="could not be read: 'passwd:ada:x:many'"):
        parse_accounts("0\npasswd:ada:x:many\n")


def test_primary_group_is_that_of_the_head_node() -> None:
    head = MachineAccounts(users={"ben": (50001, 100)}, groups={"users": 100})
    assert list_accounts({"ben": 50001, "ada": 1001}, head) == [ADA, BEN]


def test_missing_accounts_are_created_with_their_group() -> None:
    assert build_commands([ADA, BEN], MachineAccounts(users={}, groups={"users": 100})) == [
        "groupadd --gid 1001 ada",
        "useradd --uid 1001 --gid 1001 --no-create-home --home-dir /home/ada --shell /usr/sbin/nologin ada",
        "useradd --uid 50001 --gid 100 --no-create-home --home-dir /home/ben --shell /usr/sbin/nologin ben",
    ]
    assert build_commands([ADA], MachineAccounts(users={"ada": (1001, 1001)}, groups={})) == []


class Machine:
    """A machine with these lines of getent; it records the script that changes it."""

    def __init__(self, *entries: str) -> None:
        self.entries = entries
        self.script = ""

    def run(self, script: str, arguments: Sequence[str] = (), *, as_root: bool = False, timeout_s: float = 1.0) -> str:
        del as_root, timeout_s
        if not arguments:
            self.script = script
        fields = [(entry, entry.split(":")) for entry in self.entries]
        return "\n".join(["0", *(entry for entry, words in fields if {words[1], words[3]} & set(arguments))])

    def send_file(self, *_: object, **__: object) -> None:
        raise NotImplementedError


def test_a_primary_group_that_a_machine_has_is_not_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """ben's primary group is `users`, which all machines have."""
    head = Machine("passwd:ben:x:50001:100::/home/ben:/bin/bash", "group:users:x:100:")
    node = Machine("group:users:x:100:", "passwd:games:x:5:60::/:/bin/sh")
    machines = [SlurmMachine(name="head", runner=head, is_head=True), SlurmMachine(name="rig1", runner=node)]
    monkeypatch.setattr(users, "open_machines", lambda *_, **__: contextlib.nullcontext(machines))
    monkeypatch.setattr(users, "find_uids", lambda *_: {"ben": 50001})
    users.create_accounts(build_cluster(), Paths(), AdminConsole(io.StringIO()), head, yes=True)
    assert (head.script, "groupadd" in node.script) == ("", False)
    assert "useradd --uid 50001 --gid 100 " in node.script


def test_conflicts_name_both() -> None:
    there = MachineAccounts(users={"ada": (1002, 1002), "eve": (50001, 50001)}, groups={})
    assert list(find_conflicts([ADA, BEN], there)) == [
        "ada must have the UID 1001 and has 1002",
        "the UID 50001 must be ben's and is eve's",
    ]
    group = MachineAccounts(users={}, groups={"ada": 1500})
    assert list(find_conflicts([ADA], group)) == ["the group ada must have the GID 1001 and has 1500"]
    assert list(find_conflicts([ADA, BEN], EMPTY)) == []


def test_users_of_the_settings_get_their_numbers(tmp_path: Path) -> None:
    """Before their first login; names of system accounts are shown and left out."""
    output = io.StringIO()
    settings = UserSettings(login="github", allowed=("ada-of-the-lab", "daemon"), uid_first=1_500_000_000)
    uids = find_uids(settings, tmp_path, AdminConsole(output))
    assert uids == {"ada-of-the-lab": 1_500_000_000}
    assert "! user 'daemon' has the name of a system account" in output.getvalue()
    assert find_uids(settings, tmp_path, AdminConsole(output)) == uids


def test_without_own_numbers_only_accounts_are_known(tmp_path: Path) -> None:
    settings = UserSettings(allowed=("ada-of-the-lab",))
    assert find_uids(settings, tmp_path, AdminConsole(io.StringIO())) == {}
