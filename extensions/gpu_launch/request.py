"""From options to what is started: everything that can be refused before anything is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_launch import checks, network, plan, render, runs
from gpu_launch.broker import Broker
from gpu_launch.environment import Environment
from gpu_launch.errors import UsageError
from gpu_launch.options import Options
from gpu_launch.spec import Channel, LaunchSpec
from gpu_launch.wire import Cluster


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
    #: None where the broker was not needed.
    cluster: Cluster | None

    @property
    def own_text(self) -> str:
        """The notebook's own node and GPU model; empty where it does not take part."""
        if not self.plan.own:
            return ""
        env = self.request.env
        return f"{env.node} {render.model_of(self.cluster, env.gpu_uuids) or ''}".strip()


def check(request: Request, broker: Broker | None) -> Checked:
    """Raises UsageError, or BrokerError where the broker cannot be asked."""
    options, env = request.options, request.env
    if options.model is not None and (missing := plan.missing_broker(env)):
        raise UsageError(f"--model needs the broker: {missing}.")
    is_alone = options.nnodes == 1 and len(env.gpu_uuids) >= options.nproc_per_node and options.model is None
    cluster = broker.cluster() if broker is not None and not is_alone else None
    wanted = plan.make_plan(
        env,
        nnodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        model=plan.find_model(cluster, options.model) if options.model is not None and cluster is not None else None,
        own_model=render.model_of(cluster, env.gpu_uuids),
    )
    if cluster is not None:
        plan.check_fits(wanted, cluster)
    is_shared = wanted.workers > 0
    if is_shared:
        checks.check_shared(request.cwd, home=env.home, what="This notebook's folder")
    script = ""
    if request.cell is None:
        script = checks.check_command(options, cwd=request.cwd, home=env.home, shared=is_shared)
    return Checked(request=request, plan=wanted, script=script, cluster=cluster)


def build_spec(
    checked: Checked, run: runs.RunFolder, *, own: network.Interface, port: int, channel: Channel
) -> LaunchSpec:
    """The first start. `port` is free on the notebook's own address."""
    request, wanted, options = checked.request, checked.plan, checked.request.options
    script = checked.script if request.cell is None else str(run.cell)
    log_dir = request.cwd / Path(options.log_dir).expanduser() if options.log_dir else run.logs
    return LaunchSpec(
        run_id=run.run_id,
        attempt=0,
        nnodes=wanted.nnodes,
        nproc_per_node=wanted.nproc_per_node,
        own=wanted.own,
        master_addr=own.address if wanted.own else "",
        master_port=port if wanted.own else 0,
        command=(script, *options.arguments),
        module=options.module,
        no_python=options.no_python,
        passed=options.passed,
        cwd=str(request.cwd),
        log_dir=str(log_dir),
        environ=dict(request.environ),
        # A cell imports what lies beside its notebook, as the notebook does.
        python_path=str(request.cwd) if request.cell is not None else "",
        channel=channel,
    )
