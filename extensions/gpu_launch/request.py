"""From options to what is started: everything that can be refused before anything is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_launch import checks, plan, render, runs
from gpu_launch.broker import Broker
from gpu_launch.demand import Demand
from gpu_launch.environment import Environment
from gpu_launch.errors import UsageError
from gpu_launch.options import Options
from gpu_launch.roster import Roster
from gpu_launch.spec import Channel, LaunchSpec, NodeInfo, Way
from gpu_launch.wire import Cluster

#: Flags that ask for what torchrun itself does around a rank's process.
_LITERAL = ("--numa-binding", "--virtual-local-rank", "--signals-to-handle")
#: Ranks that were told to write a checkpoint are killed by the broker when their time is over, not by torchrun.
_CHECKPOINT_MOST_S = 3600


@dataclass(frozen=True, kw_only=True)
class Request:
    """A launch as the user asked for it."""

    options: Options
    #: The cell's body; None for a script.
    cell: str | None
    cwd: Path
    env: Environment
    #: What the user set in the notebook, for the ranks.
    environ: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A request that can be met, now or later."""

    request: Request
    plan: plan.Plan
    #: Script, module or program as torchrun gets it; empty for a cell.
    script: str
    #: Each node runs one program, see `Way.TASK`.
    is_task: bool = False
    #: What there is, as far as it had to be known.
    cluster: Cluster | None = None

    @property
    def own_text(self) -> str:
        """The notebook's own node and GPU model; empty where it does not take part."""
        if not self.plan.own:
            return ""
        return f"{self.request.env.node} {render.cards_text(self.plan.own_cards)}".strip()

    @property
    def may_lose_gpus(self) -> bool:
        """Whether it is told to write checkpoints when others need its GPUs."""
        if self.request.options.detach:
            return True
        return self.plan.workers > 0 and (self.plan.demand.scavenge or self.plan.is_elastic)


def check(request: Request, broker: Broker | None, *, cluster: Cluster | None = None) -> Checked:
    """Raises UsageError, or BrokerError where the broker cannot be asked. `cluster`: it is known already."""
    options, env = request.options, request.env
    cluster = cluster or _cluster(options, env, broker)
    wanted = _plan(options, env, cluster)
    is_shared = wanted.workers > 0
    if is_shared:
        checks.check_shared(request.cwd, home=env.home, what="This notebook's folder")
    script = ""
    if request.cell is None:
        script = checks.check_command(options, cwd=request.cwd, home=env.home, shared=is_shared)
    return Checked(request=request, plan=wanted, script=script, cluster=cluster)


def choose_way(checked: Checked) -> tuple[Way, str]:
    """How ranks are to be started, and why not by forking where that was not asked for."""
    options = checked.request.options
    if checked.is_task:
        return Way.TASK, ""
    if options.cold or options.no_python:
        return Way.TORCHRUN, ""
    literal = [flag.partition("=")[0] for flag in options.passed if flag.startswith(_LITERAL)]
    return (Way.TORCHRUN, f"{literal[0]} is its own") if literal else (Way.FORK, "")


def _cluster(options: Options, env: Environment, broker: Broker | None) -> Cluster | None:
    """What there is; None where it need not be known, or nobody can be asked."""
    demand = options.demand
    flags = {
        "--model": demand.models,
        "--memory": demand.least_memory_mib,
        "--same-model": demand.same_model,
        "--exclusive": demand.exclusive,
    }
    used = [flag for flag, value in flags.items() if value]
    if used and (missing := plan.missing_broker(env)):
        raise UsageError(f"{used[0]} needs the broker: {missing}.")
    is_alone = options.nnodes == 1 and len(env.gpu_uuids) >= options.nproc_per_node and not used
    return broker.cluster() if broker is not None and not is_alone else None


def _plan(options: Options, env: Environment, cluster: Cluster | None) -> plan.Plan:
    demand = options.demand
    cards = cluster.cards(env.gpu_uuids) if cluster else ()
    if cluster is not None:
        demand = replace(demand, models=tuple(plan.find_model(cluster, model) for model in demand.models))

    def build(env: Environment, demand: Demand) -> plan.Plan:
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


def build_spec(
    checked: Checked,
    run: runs.RunFolder,
    *,
    roster: Roster,
    first: NodeInfo,
    attempt: int,
    channel: Channel,
    way: Way = Way.TORCHRUN,
    restarts: int = 0,
    exchange: str = "",
) -> LaunchSpec:
    """One start on the nodes of `roster`. `first` is node 0; on its port is the ranks' store, or it is free."""
    request, options = checked.request, checked.request.options
    script = checked.script if request.cell is None else str(run.cell)
    log_dir = request.cwd / Path(options.log_dir).expanduser() if options.log_dir else run.logs
    return LaunchSpec(
        run_id=run.run_id,
        attempt=attempt,
        roster=roster,
        master_addr=first.address,
        master_port=first.port,
        command=(script, *options.arguments),
        module=options.module,
        no_python=options.no_python,
        passed=options.passed,
        shutdown_s=_CHECKPOINT_MOST_S if checked.may_lose_gpus else None,
        cwd=str(request.cwd),
        log_dir=str(log_dir),
        environ=dict(request.environ),
        # A cell imports what lies beside its notebook, as the notebook does.
        python_path=str(request.cwd) if request.cell is not None else "",
        channel=channel,
        way=way,
        restart_count=restarts,
        max_restarts=options.max_restarts,
        exchange=exchange,
        whole=options.detach,
    )
