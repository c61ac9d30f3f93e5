"""The state of a machine, and the steps that it still needs."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.ops.slurm.files import (
    MUNGE_KEY,
    SLURM_CONF,
    SLURMDBD_CONF,
    ClusterSecrets,
    InstalledCluster,
    SlurmFile,
    format_slurm_conf,
    list_files,
)
from gpuhub.ops.slurm.machine_state import InstalledFile, SlurmMachineState, UnitState, parse_slurm_state
from gpuhub.ops.slurm.plan import MachineRole, build_slurm_plan, format_differences
from tests.support.golden import check_golden
from tests.support.slurm.installed import CLUSTER

GOLDEN = Path(__file__).with_name("golden")
PASSWORD = "0f1e2d3c"
SECRETS = ClusterSecrets(munge_key=b"m" * 1024, jwt_key=b"j" * 32, database_password=PASSWORD)
FULL = replace(CLUSTER, has_accounting=True, rest_plugins="openapi/v0.0.38,openapi/dbv0.0.38")
HEAD = MachineRole(is_head=True, computes=False)
NODE = MachineRole(is_head=False, computes=True)
BARE = SlurmMachineState(
    sudo="root",
    distribution="debian",
    release="12",
    os="Debian GNU/Linux 12 (bookworm)",
    hostname="rig2",
    cpus=32,
    memory_kib=131_000_000,
)
ALL_PACKAGES = (
    "munge slurm-client slurmctld slurmd slurmdbd slurm-wlm-mysql-plugin mariadb-server slurm-wlm-jwt-plugin slurmrestd"
)


def installed(file: SlurmFile, changed_at: int = 100) -> InstalledFile:
    text = None if file.is_secret else file.content.decode()
    return InstalledFile(mode=file.mode, owner=file.owner, changed_at=changed_at, sha256=file.sha256, text=text)


def complete(role: MachineRole, cluster: InstalledCluster = CLUSTER) -> SlurmMachineState:
    """Return the state after all steps."""
    files = list_files(cluster, SECRETS, is_head=role.is_head, computes=role.computes)
    running = UnitState(is_enabled=True, is_active=True, started_at=200)
    return replace(
        BARE,
        packages=frozenset(ALL_PACKAGES.split()),
        has_rest_user=True,
        files={str(file.path): installed(file) for file in files},
        units=dict.fromkeys(("munge", "mariadb", "slurmdbd", "slurmctld", "slurmrestd", "slurmd"), running),
    )


def titles(state: SlurmMachineState, role: MachineRole, cluster: InstalledCluster = CLUSTER) -> list[str]:
    return [step.title for step in build_slurm_plan(state, role, cluster, SECRETS).steps]


def test_state_is_parsed() -> None:
    """The output of the script on a Debian 12 with munge running."""
    conf = base64.b64encode(b"ClusterName=site\n").decode()
    state = parse_slurm_state(
        "sudo=root\ndistribution=debian\nrelease=12\nos=Debian GNU/Linux 12 (bookworm)\nhostname=rig2\ncpus=32\n"
        "memory_kib=131000000\nminor=1\nminor=0\npackage=munge\nrest_user=yes\n"
        f"file=644 root 1700000000 ab12 {conf} /etc/slurm/slurm.conf\n"
        "file=400 munge 1700000001 cd34 - /etc/munge/munge.key\n"
        "unit=munge enabled active 1700000002\nunit=slurmd unknown inactive 0\nend=\n"
    )
    assert state == replace(
        BARE,
        minors=(1, 0),
        packages=frozenset({"munge"}),
        has_rest_user=True,
        files={
            "/etc/slurm/slurm.conf": InstalledFile(
                mode=0o644, owner="root", changed_at=1700000000, sha256="ab12", text="ClusterName=site\n"
            ),
            "/etc/munge/munge.key": InstalledFile(mode=0o400, owner="munge", changed_at=1700000001, sha256="cd34"),
        },
        units={"munge": UnitState(is_enabled=True, is_active=True, started_at=1700000002), "slurmd": UnitState()},
    )
    assert state.foreign_slurm_conf == "/etc/slurm/slurm.conf"


@pytest.mark.parametrize(
    ("text", "message"),
    [("sudo=root\n", "could not be read to its end"), ("cpus=\nend=\n", "has an unknown form")],
)
def test_incomplete_state_is_refused(text: str, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        parse_slurm_state(text)


@pytest.mark.parametrize(
    ("name", "role", "cluster"), [("head-full", HEAD, FULL), ("head", HEAD, CLUSTER), ("node", NODE, CLUSTER)]
)
def test_steps_of_a_bare_machine(name: str, role: MachineRole, cluster: InstalledCluster) -> None:
    check_golden("\n".join(titles(BARE, role, cluster)) + "\n", GOLDEN / f"{name}.plan.txt")


@pytest.mark.parametrize(("role", "cluster"), [(HEAD, FULL), (HEAD, CLUSTER), (NODE, CLUSTER)])
def test_complete_machine_needs_nothing(role: MachineRole, cluster: InstalledCluster) -> None:
    assert titles(complete(role, cluster), role, cluster) == []


def test_changed_file_is_written_and_its_services_restart() -> None:
    state = complete(NODE)
    old = replace(
        state.files[str(SLURM_CONF)], sha256="0", text=format_slurm_conf(CLUSTER).replace("CPUs=16", "CPUs=8")
    )
    changed = replace(state, files={**state.files, str(SLURM_CONF): old})
    assert titles(changed, NODE) == [
        "write /etc/slurm/slurm.conf (mode 0644, owner root)",
        "enable and restart slurmd",
    ]
    files = list(list_files(CLUSTER, SECRETS, is_head=False, computes=True))
    text = format_differences(
        {"rig2": changed, "rig3": changed, "rig4": state}, dict.fromkeys(("rig2", "rig3", "rig4"), files)
    )
    check_golden(text, GOLDEN / "difference.txt")


def test_interrupted_run_continues_with_the_restart() -> None:
    """The file is there, and newer than the daemon that runs."""
    state = complete(NODE)
    newer = replace(state.files[str(SLURM_CONF)], changed_at=201)
    assert titles(replace(state, files={**state.files, str(SLURM_CONF): newer}), NODE) == ["enable and restart slurmd"]


def test_mariadb_of_others_is_not_restarted() -> None:
    state = complete(HEAD, FULL)
    stopped = replace(state, units={**state.units, "mariadb": UnitState()})
    assert titles(stopped, HEAD, FULL) == ["enable and start mariadb"]


def test_other_munge_key_is_announced() -> None:
    state = complete(NODE)
    other = replace(state.files[str(MUNGE_KEY)], sha256="0")
    plan = build_slurm_plan(replace(state, files={**state.files, str(MUNGE_KEY): other}), NODE, CLUSTER, SECRETS)
    assert plan.notes == ("/etc/munge/munge.key there differs from the head node's and will be replaced",)
    assert [step.key for step in plan.steps] == ["file /etc/munge/munge.key", "unit munge"]


def test_secrets_are_in_scripts_and_nowhere_else() -> None:
    """Titles and differences are shown, scripts go to a shell's standard input."""
    plan = build_slurm_plan(BARE, HEAD, FULL, SECRETS)
    shown = "\n".join(step.title for step in plan.steps)
    files = tuple(list_files(FULL, SECRETS, is_head=True, computes=False))
    shown += format_differences({"head": BARE}, {"head": files})
    key = base64.b64encode(SECRETS.munge_key).decode()
    for secret in (PASSWORD, "mmmm", key, base64.b64encode(SECRETS.jwt_key).decode()):
        assert secret not in shown
    scripts = {step.key: step.build_script() for step in plan.steps}
    assert f"printf %s {key} | base64 -d" in scripts[f"file {MUNGE_KEY}"]
    assert f"IDENTIFIED BY '{PASSWORD}'" in scripts["database"]
    assert "mariadb <<'gpuhub-end'" in scripts["database"]
    assert f"chown slurm: {SLURMDBD_CONF}.new" in scripts[f"file {SLURMDBD_CONF}"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"release": "11", "os": "Debian GNU/Linux 11"}, "Debian GNU/Linux 11 has no Slurm that gpuhub installs"),
        ({"sudo": "no"}, "needs a password for sudo"),
        (
            {
                "files": {
                    "/etc/slurm/slurm.conf": InstalledFile(
                        mode=0o644, owner="root", changed_at=1, sha256="0", text="#\n"
                    )
                }
            },
            "/etc/slurm/slurm.conf was not written by gpuhub",
        ),
    ],
)
def test_machines_that_are_not_changed(changes: dict[str, object], message: str) -> None:
    plan = build_slurm_plan(replace(BARE, **changes), NODE, CLUSTER, SECRETS)  # type: ignore[arg-type]
    assert plan.steps == ()
    assert len(plan.problems) == 1
    assert message in plan.problems[0]
