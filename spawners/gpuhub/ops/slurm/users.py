"""`gpuhub slurm users`: gpuhub's users have the same name and number on the head node and on every node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import GpuhubError, NotAllowed, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.identity import find_identity, find_known_uids
from gpuhub.config.users.users import UserSettings
from gpuhub.ops.console import OperatorConsole
from gpuhub.ops.slurm.machines import ScriptRunner, SlurmMachine, on_all, open_machines

#: $@: names and numbers. getent ends with 2 where it does not find one of them.
_READ_ACCOUNTS = """\
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
id -u
for database in passwd group; do
    for key; do
        getent "$database" "$key" </dev/null | sed "s/^/$database:/"
    done
done
exit 0
"""
_CREATE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccount:
    """An account that a user needs on all machines."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineAccounts:
    """The accounts and groups of a machine that have a user's name or number."""

    is_root: bool = True
    #: Name → UID and primary GID.
    users: Mapping[str, tuple[int, int]]
    #: Name → GID.
    groups: Mapping[str, int]


def create_accounts(
    cluster: ClusterSettings, paths: Paths, console: OperatorConsole, head: ScriptRunner, *, yes: bool
) -> None:
    """Show which accounts the machines lack, ask once, and create them.

    Raises:
        GpuhubError: A name has another number on a machine, or a number another name; nothing was changed.
    """
    uids = find_uids(cluster.users, paths.state, console)
    if not uids:
        console.write(
            "No user is known yet: gpuhub knows those in users.allowed and users.admins of cluster.toml, and those who "
            "have logged in."
        )
        return
    with open_machines(cluster, paths, console, head, is_confirmed=yes) as machines:
        keys = [*uids, *(str(uid) for uid in uids.values())]
        users = list_accounts(uids, _read_accounts(machines[0], keys))
        # Users may share a primary group, which other machines may have, too.
        keys += dict.fromkeys(str(user.gid) for user in users)
        accounts = on_all(machines, lambda machine: _read_accounts(machine, keys))
        conflicts = [
            f"  {machine.name}: {conflict}"
            for machine, there in zip(machines, accounts, strict=True)
            for conflict in find_conflicts(users, there)
        ]
        if conflicts:
            raise GpuhubError(
                "\n".join(
                    [
                        "nothing was changed: Slurm would run jobs as another user, so names and numbers must be the "
                        "same on all machines:",
                        *conflicts,
                    ]
                )
            )
        _create(machines, accounts, users, console, yes=yes)


def find_uids(users: UserSettings, state: Path, console: OperatorConsole) -> dict[str, int]:
    """Return name and UID of all users that are known without a login; those in cluster.toml get their UIDs now."""
    if users.uid_first is not None:
        for name in sorted({*users.allowed, *users.admins}):
            try:
                find_identity(users, state, name)
            except NotAllowed as error:
                console.write(f"  ! {error}")
    return find_known_uids(users, state)


def _read_accounts(machine: SlurmMachine, keys: Sequence[str]) -> MachineAccounts:
    return parse_accounts(machine.runner.run(_READ_ACCOUNTS, tuple(keys)))


def parse_accounts(text: str) -> MachineAccounts:
    """Parse the output of the script: the UID of the login, then entries of passwd and group.

    Raises:
        SetupError: It has another form.
    """
    uid, *lines = text.splitlines() or [""]
    users: dict[str, tuple[int, int]] = {}
    groups: dict[str, int] = {}
    try:
        for line in lines:
            database, name, _, *numbers = line.split(":")
            if database == "passwd":
                users[name] = int(numbers[0]), int(numbers[1])
            else:
                groups[name] = int(numbers[0])
    except (ValueError, IndexError):
        raise SetupError(f"the accounts could not be read: {line[:200]!r}") from None
    return MachineAccounts(is_root=uid == "0", users=users, groups=groups)


def list_accounts(uids: Mapping[str, int], head: MachineAccounts) -> list[NodeAccount]:
    """Return the accounts of the users, with the primary group that they have on the head node, else their own."""
    return [
        NodeAccount(name=name, uid=uid, gid=head.users[name][1] if name in head.users else uid)
        for name, uid in sorted(uids.items())
    ]


def find_conflicts(users: Sequence[NodeAccount], there: MachineAccounts) -> Iterator[str]:
    """Return a line for each name with another number, and for each number with another name."""
    names = {uid: name for name, (uid, _) in there.users.items()}
    for user in users:
        uid = there.users.get(user.name, (user.uid, 0))[0]
        if uid != user.uid:
            yield f"{user.name} must have the UID {user.uid} and has {uid}"
        if (name := names.get(user.uid, user.name)) != user.name:
            yield f"the UID {user.uid} must be {user.name}'s and is {name}'s"
        has_group = user.gid in there.groups.values()
        if user.name not in there.users and not has_group and user.name in there.groups:
            yield f"the group {user.name} must have the GID {user.gid} and has {there.groups[user.name]}"


def build_commands(users: Sequence[NodeAccount], there: MachineAccounts) -> list[str]:
    """Return the commands that create what is missing on a machine.

    The accounts are locked and have no shell and no home: Slurm needs them, and nobody logs in with them.
    """
    gids = set(there.groups.values())
    commands = []
    for user in users:
        if user.name in there.users:
            continue
        if user.gid not in gids:
            commands.append(f"groupadd --gid {user.gid} {user.name}")
            gids.add(user.gid)
        commands.append(
            f"useradd --uid {user.uid} --gid {user.gid} --no-create-home --home-dir /home/{user.name} "
            f"--shell /usr/sbin/nologin {user.name}"
        )
    return commands


def _create(
    machines: Sequence[SlurmMachine],
    accounts: Sequence[MachineAccounts],
    users: Sequence[NodeAccount],
    console: OperatorConsole,
    *,
    yes: bool,
) -> None:
    pending = []
    for machine, there in zip(machines, accounts, strict=True):
        commands = build_commands(users, there)
        console.write(f"{machine.name}:")
        console.write("\n".join(f"  + {command}" for command in commands) or "  There is nothing to do.")
        if commands:
            pending.append((machine, there, commands))
    if not pending:
        return
    if not yes:
        console.confirm(f"\nCreate these accounts on {', '.join(machine.name for machine, _, _ in pending)}?")

    def create(item: tuple[SlurmMachine, MachineAccounts, list[str]]) -> None:
        machine, there, commands = item
        script = "\n".join(["set -eu", "PATH=$PATH:/usr/sbin:/sbin", *commands, ""])
        machine.runner.run(script, as_root=not there.is_root, timeout_s=_CREATE_S)

    on_all(pending, create)
    console.write("The accounts are created: " + ", ".join(user.name for user in users))
