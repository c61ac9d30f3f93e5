"""From the request of a user to the spec of a start: every check that comes before anything is requested."""

from __future__ import annotations

import difflib
import importlib.machinery
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_launch.broker.client import BrokerClient, build_broker
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.models import Cluster
from gpu_launch.common import run_folder
from gpu_launch.common.launch_spec import Channel, LaunchSpec, Membership, NodeInfo, StartMethod
from gpu_launch.common.run_folder import shorten_path
from gpu_launch.environment import Environment
from gpu_launch.errors import UsageError
from gpu_launch.launch import plan
from gpu_launch.launch.plan import LaunchPlan
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.output import text
from gpu_launch.output.screens import is_in_notebook
from gpu_launch.prediction import figures, report
from gpu_launch.training import diloco
from gpu_launch.training.comm_modes import AUTO, CommMode

#: Mounted on every node, like the home.
DATASETS = Path("/datasets")


def check_command(options: LaunchOptions, *, cwd: Path, home: Path, shared: bool) -> str:
    """Return the script as torchrun gets it. With `shared` it must be where every node has it.

    Raises:
        UsageError: for a script, module or program that does not exist, and for a script that is not Python.
    """
    if options.module:
        return _module(options.script, cwd)
    if options.no_python:
        return _program(options.script, cwd)
    script = Path(options.script).expanduser()
    path = cwd / script
    if path.is_dir():
        raise UsageError(f"{options.script} is a folder; name the script in it.")
    if not path.is_file():
        raise UsageError(f"There is no script {options.script} in {shorten_path(cwd, home)}.{_similar(path)}")
    if shared:
        check_shared(path, home=home, what="The script")
    if path.suffix == ".py":
        check_syntax(path.read_bytes(), str(path), shown=options.script)
    return str(script)


def check_syntax(source: str | bytes, filename: str, *, shown: str) -> None:
    """Refuse source that is not Python. `shown` names it for a person.

    Raises:
        UsageError: with the line.
    """
    with warnings.catch_warnings():
        # The ranks show them.
        warnings.simplefilter("ignore")
        try:
            compile(source, filename, "exec", dont_inherit=True)
        except SyntaxError as error:
            line = (error.text or "").strip()
            raise UsageError(f"{shown}, line {error.lineno}: {error.msg}\n    {line}".rstrip()) from None
        except ValueError as error:
            raise UsageError(f"{shown}: {error}.") from None


def check_shared(path: Path, *, home: Path, what: str) -> None:
    """Refuse a path that other nodes do not have.

    Raises:
        UsageError: naming it.
    """
    real = path.resolve()
    if not (real.is_relative_to(home.resolve()) or real.is_relative_to(DATASETS)):
        folder = real if real.is_dir() else real.parent
        raise UsageError(f"{what} is in {folder}, which other nodes do not have. Use a folder in {home}.")


def _module(name: str, cwd: Path) -> str:
    top = name.partition(".")[0]
    is_name = all(part.isidentifier() for part in name.split("."))
    if not is_name or not _has_module(top, cwd):
        raise UsageError(f"There is no module {name}.")
    return name


def _has_module(top: str, cwd: Path) -> bool:
    """Return whether Python finds a package or module, also one of an editable installation, without importing it."""
    if importlib.machinery.PathFinder.find_spec(top, [str(cwd)]) is not None:
        return True
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)


def _program(name: str, cwd: Path) -> str:
    path = cwd / Path(name).expanduser()
    if shutil.which(name) is None and not path.is_file():
        raise UsageError(f"There is no program {name}.")
    return str(path) if path.is_file() and "/" in name else name


def _similar(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=2)
    return f" Did you mean {' or '.join(close)}?" if close else ""


#: Flags that ask for what torchrun itself does around a rank's process.
_LITERAL = ("--numa-binding", "--virtual-local-rank", "--signals-to-handle")
#: The broker, not torchrun, kills ranks whose time for a checkpoint is over.
_CHECKPOINT_MOST_S = 3600


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The request of a launch, as the user wrote it."""

    options: LaunchOptions
    #: The cell's body; None for a script.
    cell: str | None
    cwd: Path
    env: Environment
    #: Variables that the user set in the notebook, for the ranks.
    environ: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ValidatedRequest:
    """A request that the cluster can grant, now or later."""

    request: LaunchRequest
    plan: LaunchPlan
    #: Script, module or program as torchrun gets it; empty for a cell.
    script: str
    #: Each node runs one program, see `StartMethod.TASK`.
    is_task: bool = False
    #: The cluster, if the checks needed it.
    cluster: Cluster | None = None

    @property
    def notebook_text(self) -> str:
        """The notebook's own node and GPU model; empty where it does not take part."""
        if not self.plan.includes_notebook:
            return ""
        return f"{self.request.env.node} {text.format_gpus(self.plan.notebook_gpus)}".strip()

    @property
    def may_lose_gpus(self) -> bool:
        """Return whether its ranks get SIGTERM, to write checkpoints, when others need its GPUs."""
        if self.request.options.detach:
            return True
        return self.plan.workers > 0 and (self.plan.demand.scavenge or self.plan.is_elastic)


def validate(
    request: LaunchRequest, broker: BrokerClient | None, *, cluster: Cluster | None = None
) -> ValidatedRequest:
    """Return the checked request. The broker is queried for the cluster only where that is needed and not given.

    Raises:
        UsageError: for a request that can never be granted.
        BrokerError: when the broker cannot be reached.
    """
    options, env = request.options, request.env
    cluster = cluster or _cluster(options, env, broker)
    wanted = _plan(options, env, cluster)
    is_shared = wanted.workers > 0
    if is_shared:
        check_shared(request.cwd, home=env.home, what="This notebook's folder")
    script = ""
    if request.cell is None:
        script = check_command(options, cwd=request.cwd, home=env.home, shared=is_shared)
    _check_communication(request, broker, wanted.nnodes * wanted.nproc_per_node)
    if options.debug is not None and options.debug >= (ranks := wanted.nnodes * wanted.nproc_per_node):
        raise UsageError(f"--debug {options.debug}: the launch has {text.format_count(ranks, 'rank')}, from 0.")
    return ValidatedRequest(request=request, plan=wanted, script=script, cluster=cluster)


def choose_start_method(validated: ValidatedRequest) -> tuple[StartMethod, str]:
    """Return how ranks start, and why they are not forked, where the user did not ask for that."""
    options = validated.request.options
    if validated.is_task:
        return StartMethod.TASK, ""
    if options.cold or options.no_python:
        return StartMethod.TORCHRUN, ""
    literal = [flag.partition("=")[0] for flag in options.torchrun_flags if flag.startswith(_LITERAL)]
    return (StartMethod.TORCHRUN, f"{literal[0]} is its own") if literal else (StartMethod.FORK, "")


def _cluster(options: LaunchOptions, env: Environment, broker: BrokerClient | None) -> Cluster | None:
    """Return the cluster; None where it is not needed, or there is no broker."""
    demand = options.demand
    flags = {
        "--model": demand.models,
        "--memory": demand.least_memory_mib,
        "--cpus": demand.cpus,
        "--ram": demand.ram_mib,
        "--shm": demand.shm_mib,
        "--same-model": demand.same_model,
        "--exclusive": demand.exclusive,
        "--stage": demand.stage,
    }
    used = [flag for flag, value in flags.items() if value]
    if used and (missing := plan.missing_broker(env)):
        raise UsageError(f"{used[0]} needs the broker: {missing}.")
    is_alone = options.nnodes == 1 and len(env.gpu_uuids) >= options.nproc_per_node and not used
    return broker.get_cluster() if broker is not None and not is_alone else None


def _plan(options: LaunchOptions, env: Environment, cluster: Cluster | None) -> LaunchPlan:
    demand = options.demand
    cards = cluster.find_gpus(env.gpu_uuids) if cluster else ()
    if cluster is not None:
        demand = plan.name_models(demand, cluster)

    def build(env: Environment, demand: GpuRequest) -> LaunchPlan:
        made = plan.make_plan(
            env,
            nnodes=options.nnodes,
            least_nnodes=options.least_nnodes,
            nproc_per_node=options.nproc_per_node,
            demand=demand,
            cards=cards,
        )
        return made if cluster is None else plan.fit(made, cluster)

    try:
        return build(env, demand)
    except UsageError:
        if not (demand.same_model and cards):
            raise
    # The cluster may have enough of another model than the notebook's own.
    return build(replace(env, gpu_uuids=()), demand)


def build_prediction_key(options: LaunchOptions, *, cell: str | None, cwd: Path) -> str:
    """Return the name under which predictions of this script, or cell, are kept."""
    return figures.build_key(str((cwd / Path(options.script).expanduser()).resolve()) if cell is None else cell)


def _check_communication(request: LaunchRequest, broker: BrokerClient | None, ranks: int) -> None:
    """Refuse a mode of `--comm`, or a prediction, that lacks what it needs, before GPUs are requested.

    Raises:
        UsageError: there is no bench, no prediction, or no torchft.
    """
    if request.options.predict:
        _fetch_bench(request.env, broker)
        figures.read_bench(request.env.home)
    if request.options.comm == AUTO:
        report.resolve_auto(request.env.home, _build_key(request), ranks)
    if request.options.comm == CommMode.DILOCO and not diloco.is_installed():
        raise UsageError(f"--comm {CommMode.DILOCO} cannot be used: {diloco.NOT_INSTALLED}. Use another mode.")


def _fetch_bench(env: Environment, broker: BrokerClient | None) -> None:
    """Keep what the cluster's administrator measured, where the user has not measured."""
    if figures.has_own_bench(env.home):
        return
    broker = broker or build_broker(env)
    if broker is not None and (data := broker.get_bench()) is not None:
        figures.keep_cluster_bench(env.home, data)


def _build_key(request: LaunchRequest) -> str:
    return build_prediction_key(request.options, cell=request.cell, cwd=request.cwd)


def find_mode(validated: ValidatedRequest) -> str:
    """Return the mode of `--comm`; an elastic launch keeps the one for its largest number of nodes."""
    request, plan = validated.request, validated.plan
    if request.options.comm != AUTO:
        return request.options.comm
    return report.resolve_auto(request.env.home, _build_key(request), plan.nnodes * plan.nproc_per_node)


def build_spec(
    validated: ValidatedRequest,
    run: run_folder.RunFolder,
    *,
    membership: Membership,
    first: NodeInfo,
    attempt: int,
    channel: Channel,
    coordinator_port: int = 0,
    method: StartMethod = StartMethod.TORCHRUN,
    restarts: int = 0,
    exchange: str = "",
    environ: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """Return the spec of one start. `first` is node 0; its port is free, or has the ranks' store.

    `coordinator_port` is free there as well. `environ` are variables of the ranks that the user has not set.
    """
    request, options = validated.request, validated.request.options
    script = validated.script if request.cell is None else str(run.cell)
    log_dir = request.cwd / Path(options.log_dir).expanduser() if options.log_dir else run.logs
    return LaunchSpec(
        run_id=run.run_id,
        attempt=attempt,
        membership=membership,
        master_addr=first.address,
        master_port=first.port,
        coordinator_port=coordinator_port,
        command=(script, *options.arguments),
        module=options.module,
        no_python=options.no_python,
        torchrun_flags=options.torchrun_flags,
        shutdown_s=_CHECKPOINT_MOST_S if validated.may_lose_gpus else None,
        cwd=str(request.cwd),
        log_dir=str(log_dir),
        environ={**(environ or {}), **request.environ},
        # A cell imports modules from the folder of its notebook, as the notebook does.
        python_path=str(request.cwd) if request.cell is not None else "",
        channel=channel,
        start_method=method,
        restart_count=restarts,
        max_restarts=options.max_restarts,
        exchange=exchange,
        unlimited_output=options.detach,
        comm=find_mode(validated),
        predict=_build_key(request) if options.predict else "",
        displays=is_in_notebook() and not options.detach,
        debug=options.debug,
    )
