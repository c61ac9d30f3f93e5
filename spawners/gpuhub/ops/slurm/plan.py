"""The plan that gives a machine its part of Slurm: from its state to the steps that are still missing."""

from __future__ import annotations

import base64
import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuhub.ops.provision.preparation_plan import (
    INSTALL_COMMAND,
    UPDATE_COMMAND,
    PreparationPlan,
    PreparationStep,
)
from gpuhub.ops.slurm.files import (
    CGROUP_CONF,
    DATABASE,
    DATABASE_USER,
    EPILOG,
    GRES_CONF,
    JWT_KEY,
    MUNGE_KEY,
    REST_DROP_IN,
    REST_USER,
    SLURM_CONF,
    SLURMDBD_CONF,
    ClusterSecrets,
    InstalledCluster,
    SlurmFile,
    list_files,
)
from gpuhub.ops.slurm.machine_state import SlurmMachineState, UnitState

#: slurmrestd's plugins since Slurm 23.11.
UNVERSIONED_PLUGINS = ("openapi/slurmctld", "openapi/slurmdbd")
#: slurmrestd's plugins for jobs and for accounts, by the distributions whose Slurm gpuhub works with: `ID` and
#: `VERSION_ID`.
REST_PLUGINS = {
    ("debian", "12"): ("openapi/v0.0.38", "openapi/dbv0.0.38"),
    ("debian", "13"): UNVERSIONED_PLUGINS,
    ("ubuntu", "24.04"): UNVERSIONED_PLUGINS,
}
#: The files that a service reads when it starts.
_READ_BY = {
    "munge": (MUNGE_KEY,),
    "mariadb": (),
    "slurmdbd": (SLURMDBD_CONF, JWT_KEY),
    "slurmctld": (SLURM_CONF, GRES_CONF, CGROUP_CONF, JWT_KEY),
    "slurmrestd": (SLURM_CONF, REST_DROP_IN),
    "slurmd": (SLURM_CONF, GRES_CONF, CGROUP_CONF, EPILOG),
}
#: Services that other programs use, too: they are not restarted.
_ONLY_STARTED = frozenset({"mariadb"})
_WAIT_FOR_SLURMDBD = """\
for attempt in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
    if sacctmgr -n list cluster >/dev/null 2>&1; then break; fi
    [ "$attempt" -lt 15 ] || { echo "slurmdbd does not answer: see /var/log/slurm/slurmdbd.log" >&2; exit 1; }
    sleep 1
done"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRole:
    """A machine's part of Slurm."""

    is_head: bool
    computes: bool


def build_slurm_plan(
    state: SlurmMachineState, role: MachineRole, cluster: InstalledCluster, secrets: ClusterSecrets
) -> PreparationPlan:
    """Return the plan for a machine in this state."""
    problems = tuple(_find_problems(state))
    if problems:
        return PreparationPlan(problems=problems)
    files = tuple(list_files(cluster, secrets, is_head=role.is_head, computes=role.computes))
    steps = [*_add_packages(state, role, cluster), *_add_database(state, role, cluster, secrets)]
    steps += [_write_file(file) for file in files if not _is_current(state, file)]
    steps += _start_services(state, role, cluster, files)
    key = state.files.get(str(MUNGE_KEY))
    is_replaced = key is not None and any(file.path == MUNGE_KEY and key.sha256 != file.sha256 for file in files)
    return PreparationPlan(
        steps=tuple(steps),
        notes=(f"{MUNGE_KEY} there differs from the head node's and will be replaced",) if is_replaced else (),
    )


def format_differences(states: Mapping[str, SlurmMachineState], wanted: Mapping[str, Sequence[SlurmFile]]) -> str:
    """Return the differences between the files on the machines and the new ones, each with its machines.

    Args:
        states: The machines' states by name.
        wanted: Their new files by name.
    """
    machines: dict[tuple[Path, str | None, str], list[str]] = {}
    for name, files in wanted.items():
        for file in files:
            if file.is_secret or _is_current(states[name], file):
                continue
            before = states[name].files.get(str(file.path))
            key = (file.path, None if before is None else before.text, file.content.decode())
            machines.setdefault(key, []).append(name)
    return "\n".join(
        _format_difference(path, before, after, names) for (path, before, after), names in machines.items()
    )


def _format_difference(path: Path, before: str | None, after: str, names: Sequence[str]) -> str:
    old = "/dev/null" if before is None else str(path)
    lines = difflib.unified_diff((before or "").splitlines(), after.splitlines(), old, str(path), lineterm="")
    text = "\n".join(lines) or "(other owner or mode)"
    return f"{path} on {', '.join(names)}:\n{text}\n"


def _find_problems(state: SlurmMachineState) -> Iterator[str]:
    if (state.distribution, state.release) not in REST_PLUGINS:
        known = ", ".join(f"{name.capitalize()} {release}" for name, release in REST_PLUGINS)
        yield f"{state.os or 'this system'} has no Slurm that gpuhub installs: {known} have one"
    if state.sudo == "no":
        yield "the login needs a password for sudo, or has none: log in as root, or allow sudo without a password"
    if (path := state.foreign_slurm_conf) is not None:
        yield (
            f"{path} was not written by gpuhub, and gpuhub changes no Slurm of the site: follow docs/slurm.md, or "
            "write the files elsewhere with --output FOLDER"
        )


def _add_packages(state: SlurmMachineState, role: MachineRole, cluster: InstalledCluster) -> Iterator[PreparationStep]:
    names = [name for name in _list_packages(role, cluster) if name not in state.packages]
    if names:
        yield PreparationStep(
            key="lists", title="read the package lists again", commands=UPDATE_COMMAND, is_visible=False
        )
        yield PreparationStep(
            key="packages",
            title=f"install {' '.join(names)} (from {state.distribution.capitalize()})",
            commands=f"{INSTALL_COMMAND} {' '.join(names)}",
        )
    if role.is_head and cluster.rest_plugins is not None and not state.has_rest_user:
        yield PreparationStep(
            key="rest user",
            title=f"create the system user {REST_USER}, as whom slurmrestd runs",
            commands=f"useradd --system --user-group --no-create-home --shell /usr/sbin/nologin {REST_USER}",
        )


def _list_packages(role: MachineRole, cluster: InstalledCluster) -> list[str]:
    packages = ["munge", "slurm-client"]
    if role.is_head:
        packages.append("slurmctld")
    if role.computes:
        packages.append("slurmd")
    if role.is_head and cluster.has_accounting:
        packages += ["slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server"]
    if role.is_head and cluster.power is not None:
        packages.append("sudo")
    if cluster.rest_plugins is not None:
        packages.append("slurm-wlm-jwt-plugin")
        if role.is_head:
            packages.append("slurmrestd")
    return packages


def _add_database(
    state: SlurmMachineState, role: MachineRole, cluster: InstalledCluster, secrets: ClusterSecrets
) -> Iterator[PreparationStep]:
    # slurmdbd.conf is written after this step: where it exists, the database does.
    if role.is_head and cluster.has_accounting and str(SLURMDBD_CONF) not in state.files:
        account = f"'{DATABASE_USER}'@'localhost'"
        statements = (
            f"CREATE DATABASE IF NOT EXISTS {DATABASE};",
            f"CREATE USER IF NOT EXISTS {account};",
            f"ALTER USER {account} IDENTIFIED BY '{secrets.database_password}';",
            f"GRANT ALL ON {DATABASE}.* TO {account};",
        )
        yield PreparationStep(
            key="database",
            title=f"create the database {DATABASE} and its user {DATABASE_USER} (password not shown)",
            commands="\n".join(("systemctl start mariadb", "mariadb <<'gpuhub-end'", *statements, "gpuhub-end")),
            is_visible=False,
        )


def _is_current(state: SlurmMachineState, file: SlurmFile) -> bool:
    there = state.files.get(str(file.path))
    return there is not None and (there.sha256, there.owner, there.mode) == (file.sha256, file.owner, file.mode)


def _write_file(file: SlurmFile) -> PreparationStep:
    # The content is in the script, which comes on standard input, and `printf` is the shell's own: no other process
    # can read it.
    path, new = shlex.quote(str(file.path)), shlex.quote(f"{file.path}.new")
    commands = (
        "umask 077",
        f"mkdir -p -m 755 {shlex.quote(str(file.path.parent))}",
        f"printf %s {base64.b64encode(file.content).decode()} | base64 -d >{new}",
        f"chown {file.owner}: {new}",
        f"chmod {file.mode:o} {new}",
        f"mv {new} {path}",
    )
    note = ", content not shown" if file.is_secret else ""
    return PreparationStep(
        key=f"file {file.path}",
        title=f"write {file.path} (mode {file.mode:04o}, owner {file.owner}{note})",
        commands="\n".join(commands),
    )


def _start_services(
    state: SlurmMachineState, role: MachineRole, cluster: InstalledCluster, files: Sequence[SlurmFile]
) -> Iterator[PreparationStep]:
    for unit in _list_units(role, cluster):
        current = state.units.get(unit, UnitState())
        needs_restart = unit not in _ONLY_STARTED and any(
            _is_newer(state, file, current) for file in files if file.path in _READ_BY[unit]
        )
        if current.is_enabled and current.is_active and not needs_restart:
            continue
        verb = "start" if unit in _ONLY_STARTED else "restart"
        commands = ["systemctl daemon-reload", f"systemctl enable {unit}", f"systemctl {verb} {unit}"]
        if unit == "slurmdbd":
            commands.append(_WAIT_FOR_SLURMDBD)
            commands.append(
                f"sacctmgr -i add cluster {cluster.name} || sacctmgr -n list cluster | grep -qw {cluster.name}"
            )
        yield PreparationStep(key=f"unit {unit}", title=f"enable and {verb} {unit}", commands="\n".join(commands))


def _list_units(role: MachineRole, cluster: InstalledCluster) -> list[str]:
    units = ["munge"]
    if role.is_head and cluster.has_accounting:
        units += ["mariadb", "slurmdbd"]
    if role.is_head:
        units.append("slurmctld")
    if role.is_head and cluster.rest_plugins is not None:
        units.append("slurmrestd")
    if role.computes:
        units.append("slurmd")
    return units


def _is_newer(state: SlurmMachineState, file: SlurmFile, unit: UnitState) -> bool:
    there = state.files.get(str(file.path))
    return there is None or not _is_current(state, file) or there.changed_at > unit.started_at
