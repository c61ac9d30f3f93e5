"""`gpuhub node prepare`: installs what bare machines lack to become nodes, on several machines at the same time."""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import GpuhubError, InvalidRequest, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.ssh import ssh_files
from gpuhub.ops.console import OperatorConsole
from gpuhub.ops.doctor.findings import Finding, Severity, failed, format_findings, ok, warning
from gpuhub.ops.provision import node_access
from gpuhub.ops.provision.driver_packages import WantedDriver
from gpuhub.ops.provision.machine_state import MachineState, parse_branch, parse_machine_state, read_state_script
from gpuhub.ops.provision.node_join import verify_host_keys
from gpuhub.ops.provision.preparation_plan import PreparationPlan, PreparationStep, build_plan, describe_state
from gpuhub.ops.provision.ssh_session import SshSession, SshTarget, parse_target, resolve_direct_target

#: Maximum duration of one step, seconds: a driver's kernel modules are compiled after a download of some 500 MB.
_STEP_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationRequest:
    """The arguments and options of `gpuhub node prepare`."""

    targets: tuple[SshTarget, ...]
    #: The driver's branch; None for that of the cluster's nodes or of these machines, or the distribution's own.
    driver: str | None = None
    yes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMachine:
    """A machine, the connection to it, and what is missing there."""

    target: SshTarget
    session: SshSession
    state: MachineState
    plan: PreparationPlan


def prepare_nodes(request: PreparationRequest, paths: Paths, console: OperatorConsole) -> None:
    """Show what the machines lack, ask once, install it, and show the outcome of each machine.

    Raises:
        GpuhubError: A machine could not be prepared; the others are.
    """
    cluster = settings.load(paths.used_cluster_file) if paths.used_cluster_file.exists() else None
    wanted = choose_driver(request, cluster, paths)
    output = _MachineOutput(console, request.targets)
    with ExitStack() as stack:
        sessions, outcomes = _open_sessions(stack, request, cluster, paths, console)
        states = _read_states(sessions, outcomes)
        wanted = wanted or find_common_driver(states.values())
        machines = [_build_machine(target, sessions[target], state, wanted) for target, state in states.items()]
        for machine in machines:
            console.write(f"\n{machine.target.host}:")
            console.write(format_plan(machine.state, machine.plan))
        pending = [machine for machine in machines if machine.plan.steps]
        if pending and not request.yes:
            console.confirm(f"\nChange {', '.join(machine.target.host for machine in pending)} as shown?")
        with ThreadPoolExecutor(max_workers=max(len(machines), 1), thread_name_prefix="prepare") as pool:
            results = list(pool.map(lambda machine: _prepare(machine, wanted, output), machines))
    outcomes |= {machine.target: result for machine, result in zip(machines, results, strict=True)}
    findings = [outcomes[target] for target in request.targets]
    console.write(f"\n{format_findings(findings, console.width)}")
    _show_next_commands(request.targets, findings, console)
    not_prepared = [finding.check for finding in findings if finding.severity is Severity.FAILED]
    if not_prepared:
        raise GpuhubError(f"not prepared: {', '.join(not_prepared)}")


def parse_hosts(text: str, origin: str) -> list[SshTarget]:
    """Parse a file with one `ssh://USER@MACHINE` on each line; `#` begins a comment.

    Raises:
        InvalidRequest: A line has another form.
    """
    targets = []
    for number, line in enumerate(text.splitlines(), 1):
        url = line.partition("#")[0].strip()
        if url:
            try:
                targets.append(parse_target(url))
            except InvalidRequest as error:
                raise InvalidRequest(f"{origin}, line {number}: {error}") from None
    return targets


def collect_targets(urls: Iterable[str], hosts_file: Path | None) -> tuple[SshTarget, ...]:
    """Return the machines of the command line and of the file, each once.

    Raises:
        InvalidRequest: There is none, one has another form, or the file cannot be read.
    """
    targets = [parse_target(url) for url in urls]
    if hosts_file is not None:
        try:
            targets += parse_hosts(hosts_file.read_text(encoding="utf-8"), str(hosts_file))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{hosts_file} cannot be read: {error}") from None
    if not targets:
        raise InvalidRequest("no machine is named: write such as ssh://me@rig2, or --from HOSTS_FILE")
    return tuple(dict.fromkeys(targets))


def find_newest_branch(drivers: Iterable[str]) -> str | None:
    """Return the newest branch of these driver versions; None without any."""
    branches = [branch for driver in drivers if (branch := parse_branch(driver)).isdigit()]
    return max(branches, key=int, default=None)


def find_common_driver(states: Iterable[MachineState]) -> WantedDriver | None:
    """Return the newest driver that one of the machines has; None where none has any."""
    branch = find_newest_branch(state.driver for state in states)
    return None if branch is None else WantedDriver(branch=branch, source="the newest of these machines")


def format_plan(state: MachineState, plan: PreparationPlan) -> str:
    """Return what the machine has, what will be done there, and what the administrator should know."""
    lines = [f"  {line}" for line in describe_state(state)]
    lines += [f"  + {step.title}" for step in plan.steps]
    if not plan.steps and not plan.problems:
        lines.append("  There is nothing to do.")
    lines += [f"  ✗ {problem}" for problem in plan.problems]
    lines += [f"  ! {note}" for note in plan.notes]
    if plan.needs_reboot:
        when = "afterwards, for the driver" if plan.steps else "for the installed driver"
        lines.append(f"  ! it must be started again {when}; gpuhub does not do that")
    return "\n".join(lines)


class _MachineOutput:
    """Lines of machines that are prepared at the same time, each with its machine's name in front."""

    def __init__(self, console: OperatorConsole, targets: Sequence[SshTarget]) -> None:
        self._console = console
        self._width = max(len(target.host) for target in targets)
        self._lock = threading.Lock()

    def write(self, target: SshTarget, text: str) -> None:
        with self._lock:
            self._console.write(f"{target.host:<{self._width}} | {text}")


def choose_driver(request: PreparationRequest, cluster: ClusterSettings | None, paths: Paths) -> WantedDriver | None:
    """Return the driver of the option, else the newest of the running cluster; None where neither says one.

    Args:
        cluster: The settings that gpuhub runs with; None where it does not run.

    Raises:
        InvalidRequest: The option is not a branch.
    """
    if request.driver is not None:
        if not request.driver.isdigit():
            raise InvalidRequest(f"--driver {request.driver} is not a branch of NVIDIA's driver: write such as 570")
        return WantedDriver(branch=request.driver, source="--driver")
    if cluster is None:
        return None
    gpus, _, _ = asyncio.run(node_access.query_other_nodes(cluster, paths, name=""))
    branch = find_newest_branch(gpu.driver for node_gpus in gpus.values() for gpu in node_gpus)
    return None if branch is None else WantedDriver(branch=branch, source="the newest of the cluster's nodes")


def _open_sessions(
    stack: ExitStack,
    request: PreparationRequest,
    cluster: ClusterSettings | None,
    paths: Paths,
    console: OperatorConsole,
) -> tuple[dict[SshTarget, SshSession], dict[SshTarget, Finding]]:
    """Log in, one machine after another, since ssh may ask for passwords; return failures as findings."""
    sessions: dict[SshTarget, SshSession] = {}
    failures: dict[SshTarget, Finding] = {}
    for target in request.targets:
        try:
            resolved = resolve_direct_target(target)
            address = node_access.find_address(resolved.host)
            nodes = () if cluster is None else cluster.nodes
            # gpuhub knows the host keys of a machine that is a node already.
            name = next((node.name for node in nodes if node.address == address), resolved.host)
            keys = verify_host_keys(resolved, ssh_files(paths.instance), name, console, is_confirmed=request.yes)
            sessions[target] = stack.enter_context(SshSession(target, keys))
        except GpuhubError as error:
            failures[target] = failed(target.host, f"no login: {error}", f"`ssh {target.host}` must work first")
    return sessions, failures


def _read_states(
    sessions: dict[SshTarget, SshSession], failures: dict[SshTarget, Finding]
) -> dict[SshTarget, MachineState]:
    """Read all machines at the same time; add those that cannot be read to `failures`."""

    def read(target: SshTarget) -> MachineState | SetupError:
        try:
            return _read_state(sessions[target])
        except SetupError as error:
            return error

    with ThreadPoolExecutor(max_workers=max(len(sessions), 1), thread_name_prefix="read") as pool:
        answers = dict(zip(sessions, pool.map(read, sessions), strict=True))
    states = {}
    for target, answer in answers.items():
        if isinstance(answer, MachineState):
            states[target] = answer
        else:
            failures[target] = failed(target.host, str(answer), "nothing was changed there")
    return states


def _read_state(session: SshSession) -> MachineState:
    return parse_machine_state(session.run(read_state_script()))


def _build_machine(
    target: SshTarget, session: SshSession, state: MachineState, wanted: WantedDriver | None
) -> PreparedMachine:
    plan = build_plan(state, wanted, platform.machine())
    return PreparedMachine(target=target, session=session, state=state, plan=plan)


def _prepare(machine: PreparedMachine, wanted: WantedDriver | None, output: _MachineOutput) -> Finding:
    """Run the steps of a machine's plan, and return the outcome."""
    host = machine.target.host
    if machine.plan.problems:
        return failed(host, "not changed", "; ".join(machine.plan.problems))

    def write(text: str) -> None:
        output.write(machine.target, text)

    try:
        for step in machine.plan.steps:
            _run_step(machine, step, wanted, write)
        state = _read_state(machine.session)
    except SetupError as error:
        write(f"✗ {error}")
        return failed(host, str(error), "/var/log/apt/term.log there has more; the command again continues")
    value = "prepared" if machine.plan.steps else "nothing to do"
    if state.needs_reboot:
        return warning(host, f"{value}; the driver {state.driver} is not loaded yet", "start the machine again")
    return ok(host, value)


def _run_step(
    machine: PreparedMachine, step: PreparationStep, wanted: WantedDriver | None, write: Callable[[str], None]
) -> None:
    """Run one step, and check that the machine does not lack it any more.

    Raises:
        SetupError: It fails, or the machine is as before.
    """
    write(f"… {step.title}")
    machine.session.run(step.build_script(), as_root=machine.state.sudo != "root", timeout_s=_STEP_S)
    if step.is_visible:
        plan = build_plan(_read_state(machine.session), wanted, platform.machine())
        if any(step.key == missing.key for missing in plan.steps):
            raise SetupError(f"on {machine.target.host}: the command succeeded and changed nothing: {step.title}")
    write(f"✓ {step.title}")


def _show_next_commands(targets: Sequence[SshTarget], findings: Sequence[Finding], console: OperatorConsole) -> None:
    ready = [
        target for target, finding in zip(targets, findings, strict=True) if finding.severity is not Severity.FAILED
    ]
    if ready:
        console.write("\nNext, once the driver is loaded:")
        for target in ready:
            console.write(f"  sudo .venv/bin/gpuhub node add {format_target(target)}")


def format_target(target: SshTarget) -> str:
    """Return the target as it is written on the command line."""
    user = "" if target.user is None else f"{target.user}@"
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"ssh://{user}{host}{'' if target.port is None else f':{target.port}'}"
