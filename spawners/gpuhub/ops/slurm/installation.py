"""`gpuhub slurm init`: shows the differences between the machines and a Slurm, asks once, installs, and checks it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import GpuhubError, InvalidRequest, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.head_address import find_head_address
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.console import OperatorConsole
from gpuhub.ops.provision import node_access
from gpuhub.ops.provision.preparation_plan import PreparationPlan
from gpuhub.ops.slurm.cluster import SlurmFeatures, build_cluster, find_models, read_secrets
from gpuhub.ops.slurm.files import JWT_KEY, REST_URL, ClusterSecrets, InstalledCluster, SlurmFile, list_files
from gpuhub.ops.slurm.machine_state import SlurmMachineState, parse_slurm_state, read_state_script
from gpuhub.ops.slurm.machines import ScriptRunner, SlurmMachine, on_all, open_machines
from gpuhub.ops.slurm.plan import MachineRole, build_slurm_plan, format_differences

#: Maximum duration of one step, seconds.
_STEP_S = 1800.0
#: Maximum wait for all nodes to be ready, seconds.
_READY_S = 60.0
#: Interval between two queries of their states, seconds.
_POLL_S = 1.0
#: States of nodes that take work, in sinfo's long form; `*` after them is for a node that does not answer.
_READY_STATES = frozenset({"idle", "mixed", "allocated"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """The options of `gpuhub slurm init`."""

    #: Whether jobs run on the head node; None: if it is a node of cluster.toml.
    head_computes: bool | None = None
    has_accounting: bool = False
    has_rest: bool = False
    #: None: that of `[slurm]` in cluster.toml, else `gpu`.
    partition: str | None = None
    yes: bool = False
    #: Write the files there, and change no machine.
    output: Path | None = None
    #: gpuhub's program with its options, for Slurm's power saving.
    power_command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlan:
    """A machine, its state, its part of Slurm, and what is missing there."""

    machine: SlurmMachine
    state: SlurmMachineState
    role: MachineRole
    files: tuple[SlurmFile, ...]
    plan: PreparationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """The machines, the head first, as they are and as they will be used."""

    machines: Sequence[SlurmMachine]
    #: State by the machine's name.
    states: Mapping[str, SlurmMachineState]
    roles: Mapping[str, MachineRole]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WantedSlurm:
    cluster: InstalledCluster
    secrets: ClusterSecrets


def initialize_slurm(
    request: SlurmRequest, cluster: ClusterSettings, paths: Paths, console: OperatorConsole, head: ScriptRunner
) -> None:
    """Install a Slurm on the machines of cluster.toml, or show that there is nothing to do.

    Args:
        head: The head node, on which slurmctld runs.

    Raises:
        GpuhubError: With the remedy. Nothing was changed, unless the text names a step.
    """
    features = SlurmFeatures(
        name=paths.instance,
        partition=request.partition or cluster.slurm.partition or "gpu",
        has_accounting=request.has_accounting,
        has_rest=request.has_rest,
        power_command=request.power_command,
    )
    models = find_models(cluster, _read_agents(paths))
    with open_machines(cluster, paths, console, head, is_confirmed=request.yes) as machines:
        survey = _Survey(
            machines=machines,
            states=dict(zip((machine.name for machine in machines), on_all(machines, _read_state), strict=True)),
            roles=_assign_roles(request, machines),
        )
        wanted = _build_wanted(features, cluster, survey, models)
        if request.output is not None:
            _write_folder(request.output, wanted, survey, console)
            return
        plans = [_build_plan(machine, survey, wanted) for machine in machines]
        if _show_plans(plans, console):
            if not request.yes:
                console.confirm(f"\nChange {', '.join(_list_pending(plans))} as shown?")
            _install(plans, wanted, console)
        check_ready(machines[0].runner, wanted.cluster, console)
    _show_next_lines(wanted.cluster, cluster, console)


def _read_agents(paths: Paths) -> dict[str, list[str]]:
    """Return the models that the GPU agents read, by node; empty where gpuhub does not run.

    Raises:
        SetupError: A GPU is divided into MIG devices.
    """
    if not paths.used_cluster_file.exists():
        return {}
    used = settings.load(paths.used_cluster_file)
    gpus, _, _ = asyncio.run(node_access.query_other_nodes(used, paths, name=""))
    divided = [node for node, node_gpus in gpus.items() if any(gpu.uuid.startswith("MIG-") for gpu in node_gpus)]
    if divided:
        raise SetupError(f"{', '.join(divided)}: gpuhub under Slurm does not know MIG devices: turn MIG off there")
    return {node: [gpu.model for gpu in node_gpus] for node, node_gpus in gpus.items()}


def _read_state(machine: SlurmMachine) -> SlurmMachineState:
    return parse_slurm_state(machine.runner.run(read_state_script()))


def _assign_roles(request: SlurmRequest, machines: Sequence[SlurmMachine]) -> dict[str, MachineRole]:
    head = machines[0]
    if request.head_computes and head.node is None:
        raise InvalidRequest(
            "--head-computes: the head node is not a node of cluster.toml: add its [[nodes]] table, with "
            'docker = "unix:///run/docker.sock"'
        )
    head_computes = head.node is not None if request.head_computes is None else request.head_computes
    return {
        machine.name: MachineRole(is_head=machine.is_head, computes=head_computes if machine.is_head else True)
        for machine in machines
    }


def _build_wanted(
    features: SlurmFeatures, cluster: ClusterSettings, survey: _Survey, models: Mapping[str, Sequence[str]]
) -> _WantedSlurm:
    head = survey.machines[0]
    state = survey.states[head.name]
    nodes = [
        (machine.node, survey.states[machine.name])
        for machine in survey.machines
        if machine.node is not None and survey.roles[machine.name].computes
    ]
    return _WantedSlurm(
        cluster=build_cluster(features, cluster, (state, find_head_address(cluster)), nodes, models),
        secrets=read_secrets(features, state, head.runner),
    )


def _build_plan(machine: SlurmMachine, survey: _Survey, wanted: _WantedSlurm) -> MachinePlan:
    state, role = survey.states[machine.name], survey.roles[machine.name]
    return MachinePlan(
        machine=machine,
        state=state,
        role=role,
        files=tuple(list_files(wanted.cluster, wanted.secrets, is_head=role.is_head, computes=role.computes)),
        plan=build_slurm_plan(state, role, wanted.cluster, wanted.secrets),
    )


def _write_folder(folder: Path, wanted: _WantedSlurm, survey: _Survey, console: OperatorConsole) -> None:
    """Write the files of all machines into one folder, which only root can enter.

    Raises:
        InvalidRequest: The folder has files, which would be mixed with these.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidRequest(f"{folder} exists and is not an empty folder: name another one")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for file in list_files(wanted.cluster, wanted.secrets, is_head=True, computes=True):
        path = folder / file.path.relative_to("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as output:
            output.write(file.content)
        path.chmod(file.mode)
        console.write(f"  {path}  (mode {file.mode:04o}, owner {file.owner})")
    nodes = ", ".join(machine.name for machine in survey.machines)
    console.write(f"The files are written, and nothing was changed on {nodes}.")


def _show_plans(plans: Sequence[MachinePlan], console: OperatorConsole) -> bool:
    """Write differences and steps of all machines, and return whether there are any.

    Raises:
        SetupError: Nothing can be done on a machine.
    """
    problems = [f"  {plan.machine.name}: {problem}" for plan in plans for problem in plan.plan.problems]
    if problems:
        raise SetupError("\n".join(["nothing was changed:", *problems]))
    names = [plan.machine.name for plan in plans]
    differences = format_differences(
        dict(zip(names, (plan.state for plan in plans), strict=True)),
        dict(zip(names, (plan.files for plan in plans), strict=True)),
    )
    if differences:
        console.write(differences)
    for plan in plans:
        console.write(f"{plan.machine.name}:")
        for step in plan.plan.steps:
            console.write(f"  + {step.title}")
        for note in plan.plan.notes:
            console.write(f"  ! {note}")
        if not plan.plan.steps:
            console.write("  There is nothing to do.")
    return bool(_list_pending(plans))


def _list_pending(plans: Sequence[MachinePlan]) -> list[str]:
    return [plan.machine.name for plan in plans if plan.plan.steps]


def _install(plans: Sequence[MachinePlan], wanted: _WantedSlurm, console: OperatorConsole) -> None:
    """Run the steps: of the head first, since slurmctld must know the nodes, then of all nodes at the same time.

    Raises:
        GpuhubError: A step failed; the command again continues.
    """
    lock = threading.Lock()
    width = max(len(plan.machine.name) for plan in plans)

    def run(plan: MachinePlan) -> str:
        def write(text: str) -> None:
            with lock:
                console.write(f"{plan.machine.name:<{width}} | {text}")

        try:
            _run_steps(plan, wanted, write)
        except SetupError as error:
            write(f"✗ {error}")
            return f"  {plan.machine.name}: {error}"
        write("✓ done" if plan.plan.steps else "✓ nothing to do")
        return ""

    failures = [run(plans[0])]
    if not failures[0]:
        failures += on_all(plans[1:], run)
    failures = [failure for failure in failures if failure]
    if failures:
        raise GpuhubError("\n".join(["Slurm is not complete; the command again continues:", *failures]))


def _run_steps(plan: MachinePlan, wanted: _WantedSlurm, write: Callable[[str], None]) -> None:
    """Run the steps on a machine, and check that it lacks nothing any more.

    Raises:
        SetupError: A step fails, or the machine is as before.
    """
    for step in plan.plan.steps:
        write(f"… {step.title}")
        script, as_root = step.build_script(), plan.state.sudo != "root"
        plan.machine.runner.run(script, as_root=as_root, timeout_s=_STEP_S)
    after = build_slurm_plan(_read_state(plan.machine), plan.role, wanted.cluster, wanted.secrets)
    if after.steps:
        raise SetupError(f"the commands succeeded and changed nothing: {after.steps[0].title}")


def check_ready(head: ScriptRunner, cluster: InstalledCluster, console: OperatorConsole) -> None:
    """Wait until each node takes work.

    Raises:
        GpuhubError: A node does not.
    """
    expected = {node.config.name for node in cluster.nodes}
    end = time.monotonic() + _READY_S
    while True:
        states = _query_states(head)
        ready = {name for name, state in states.items() if state in _READY_STATES}
        if expected <= ready:
            break
        if time.monotonic() >= end:
            missing = ", ".join(f"{name} ({states.get(name, 'unknown')})" for name in sorted(expected - ready))
            raise GpuhubError(
                f"Slurm is installed, and these nodes take no work yet: {missing}. See `sinfo -R` here, and "
                "/var/log/slurm/slurmd.log there"
            )
        time.sleep(_POLL_S)
    console.write("\n`sinfo`: " + ", ".join(f"{name} {states[name]}" for name in sorted(expected)))


def _query_states(head: ScriptRunner) -> dict[str, str]:
    try:
        text = head.run("sinfo -h -N -o '%N %T'\n")
    except SetupError:
        return {}  # slurmctld has just started
    return dict(line.split(" ", 1) for line in text.splitlines() if " " in line)


def _show_next_lines(cluster: InstalledCluster, settings_: ClusterSettings, console: OperatorConsole) -> None:
    if settings_.engine == "slurm":
        console.write("`gpuhub doctor` checks it further; `gpuhub slurm users` creates the users' accounts.")
        return
    console.write("\nNext: `gpuhub slurm users`, then in cluster.toml:\n")
    lines = ['engine = "slurm"', "", "[slurm]", f'partition = "{cluster.partition}"']
    if cluster.rest_plugins is not None:
        lines += ['api = "rest"', f'rest_url = "{REST_URL}"', f'rest_key = "{JWT_KEY}"']
    console.write("\n".join(f"  {line}".rstrip() for line in lines))
