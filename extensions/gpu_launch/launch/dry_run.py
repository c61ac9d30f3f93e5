"""`--dry-run`: the request and the commands of a launch, with nothing requested and nothing started."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_launch import environment
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.holdings import LAUNCH
from gpu_launch.broker.models import Cluster
from gpu_launch.common import job_manifest, network, run_folder
from gpu_launch.common.exchange import ExchangeFiles
from gpu_launch.common.launch_spec import Channel, LaunchSpec, Membership, NodeInfo
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.errors import BrokerError
from gpu_launch.launch.notebook_launch import prepare
from gpu_launch.launch.plan import LaunchPlan, free_nodes
from gpu_launch.launch.request import ValidatedRequest, build_prediction_key, build_spec, find_mode
from gpu_launch.launch.workers.worker_pool import WorkerPool, worker_pools
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.output import text as render
from gpu_launch.prediction import report as prediction
from gpu_launch.training import comm_modes
from gpu_launch.training.comm_modes import CommMode
from gpu_launch.worker import nccl_env
from gpu_launch.worker.runners import torchrun

#: Placeholders for the run's id and its port, which are known only when it starts.
RUN, PORT = "RUN", 29500
_NETWORK_S = 2.0  # seconds for this container's network to be there


@dataclass(frozen=True, kw_only=True)
class DryRunReport:
    """The parts of a launch that `--dry-run` shows."""

    plan: LaunchPlan
    spec: LaunchSpec
    #: Addresses by node rank; names such as NODE1 where they are not known.
    addresses: tuple[str, ...]
    #: The body of the job's request; None where the broker is not asked.
    body: Mapping[str, Any] | None
    #: None where it is not known.
    cluster: Cluster | None
    #: Idle workers that would be used; empty for none.
    idle_workers: str
    settings: tuple[nccl_env.RankSetting, ...]
    warnings: tuple[str, ...]
    #: What the last prediction of the script says; empty for none.
    prediction: str = ""
    #: Names and values, where a node's own settings are known and differ from those.
    nodes: tuple[str, ...] = ()
    #: Names of the files in the exchange folder.
    files: tuple[str, ...] = ()
    #: A detached job's, and the folder where it is written.
    manifest: job_manifest.JobManifest | None = None
    folder: str = ""


class RequestRecorder(BrokerClient):
    """A broker that keeps the body of a request instead of sending it."""

    def __init__(self) -> None:
        super().__init__("", "")
        self.body: Mapping[str, Any] = {}

    def _request(self, method: str, path: str, *, body: Any = None, **_: Any) -> Any:
        self.body = body
        job = {"id": "", "run_id": RUN, "state": "", "version": 0}
        return [job] if "count" in body else job


def build_report(
    options: LaunchOptions, *, cell: str | None, before: Mapping[str, str], exchange: ExchangeFiles | None = None
) -> DryRunReport:
    """Return the report of a launch from this notebook. `before` is the environment when the notebook began.

    Raises:
        UsageError, BrokerError: as a launch does.
    """
    env = environment.read()
    run = run_folder.open_run(env.home, RUN)
    validated, broker = prepare(options, cell=cell, before=before)
    pool = worker_pools.find_idle(validated.plan)
    if pool is not None:
        return complete_report(_report_idle_pool(validated, pool, run), run, env.home, exchange)
    recorder = RequestRecorder()
    plan = validated.plan
    if plan.workers:
        # As `BrokerWorkerGroup` does.
        recorder.create_job(
            run_id=RUN,
            nnodes=plan.workers,
            min_nnodes=max(1, plan.least_workers) if plan.is_elastic else None,
            nproc_per_node=plan.nproc_per_node,
            server=validated.request.env.server,
            exclude_nodes=plan.exclude_nodes,
            demand=plan.demand,
            image=validated.request.env.image,
            name=LAUNCH,
        )
    return complete_report(report_new_workers(validated, broker, run, recorder.body or None), run, env.home, exchange)


def complete_report(report: DryRunReport, run: RunFolder, home: Path, exchange: ExchangeFiles | None) -> DryRunReport:
    """Return the report with the run's folder and the files in its exchange folder."""
    files = () if exchange is None else tuple(exchange.files)
    if files:
        report = replace(report, spec=replace(report.spec, exchange=str(run.exchange)))
    return replace(report, files=files, folder=run_folder.shorten_path(run.root, home))


def report_new_workers(
    validated: ValidatedRequest, broker: BrokerClient | None, run: RunFolder, body: Mapping[str, Any] | None
) -> DryRunReport:
    """Return the report of a launch without idle workers: the addresses of the other nodes are not known."""
    plan = validated.plan
    own = network.find_own_interface(validated.request.env.rank_subnet, wait_s=_NETWORK_S)
    membership = Membership(
        includes_notebook=plan.includes_notebook,
        workers=tuple(range(plan.workers)),
        nodes=tuple(f"NODE{index + int(plan.includes_notebook)}" for index in range(plan.workers)),
        nproc_per_node=plan.nproc_per_node,
    )
    addresses = (*((own.address,) if plan.includes_notebook else ()), *membership.nodes)
    return DryRunReport(
        plan=plan,
        spec=_spec(validated, run, membership, addresses[0]),
        addresses=addresses,
        body=body,
        cluster=_cluster(broker) if body is not None else None,
        idle_workers="",
        prediction=_describe_prediction(validated, membership),
        **_find_settings(own.name),
    )


def _report_idle_pool(validated: ValidatedRequest, pool: WorkerPool, run: RunFolder) -> DryRunReport:
    membership = pool.membership(validated.plan)
    assert membership is not None  # noqa: S101 - a pool that is alive has one
    infos = pool.agents.node_infos(membership)
    own = network.find_own_interface(validated.request.env.rank_subnet, wait_s=_NETWORK_S)
    return DryRunReport(
        plan=validated.plan,
        spec=_spec(validated, run, membership, infos[0].address),
        addresses=tuple(info.address for info in infos),
        body=None,
        cluster=None,
        idle_workers=pool.describe(),
        prediction=_describe_prediction(validated, membership),
        nodes=tuple(f"{info.node}: {_pairs(info.rank_environ)}" for info in infos),
        **_find_settings(own.name),
    )


def _find_settings(interface: str) -> dict[str, Any]:
    facts = nccl_env.inspect_container(interface, with_path_mtu=True)
    settings = tuple(item for item in nccl_env.decide_settings(facts) if item.name not in os.environ)
    return {"settings": settings, "warnings": nccl_env.build_warnings(facts)}


def _describe_prediction(validated: ValidatedRequest, membership: Membership) -> str:
    request = validated.request
    return prediction.describe_kept(
        request.env.home,
        build_prediction_key(request.options, cell=request.cell, cwd=request.cwd),
        ranks=membership.ranks,
        comm=find_mode(validated),
    )


def _pairs(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())


def _cluster(broker: BrokerClient | None) -> Cluster | None:
    try:
        return broker.get_cluster() if broker is not None else None
    except BrokerError:
        return None


def _spec(validated: ValidatedRequest, run: RunFolder, membership: Membership, first: str) -> LaunchSpec:
    return build_spec(
        validated,
        run,
        membership=membership,
        first=NodeInfo(worker=None, node=first, address=first, interface="", port=PORT),
        attempt=0,
        channel=Channel(url="", server_public=b"", client_public=b"", client_secret=b""),
    )


def format_report(report: DryRunReport) -> str:
    """Return the report as a person reads it."""
    parts = [
        _request_text(report),
        _free_text(report),
        report.prediction,
        _manifest_text(report),
        _command_text(report),
        _settings_text(report),
    ]
    parts += [f"Note: {warning}" for warning in report.warnings]
    return "\n\n".join(part for part in parts if part) + "\n\nNothing was asked for, and nothing started.\n"


def _request_text(report: DryRunReport) -> str:
    if report.idle_workers:
        return f"It would run at once on idle workers of this notebook: {report.idle_workers}"
    if report.body is None:
        return "The broker would not be asked: this notebook's own GPUs are enough."
    path = "/jobs/arrays" if "count" in report.body else "/jobs"
    return f"Asked of the broker, POST {path}:\n" + json.dumps(report.body, indent=2, ensure_ascii=False)


def _free_text(report: DryRunReport) -> str:
    if report.body is None:
        return ""
    if report.cluster is None:
        return "The broker does not answer, so it is not known whether that is free."
    waiting, free = report.cluster.waiting, free_nodes(report.plan, report.cluster)
    named = ", ".join(free) or "none"
    if len(free) >= report.plan.least_workers and not waiting:
        return f"Free now: {named}. It would start at once."
    needed = f"{render.format_count(max(1, report.plan.least_workers), 'node')} needed, free now: {named}"
    waits = f"{render.format_count(waiting, 'request')} of others wait" + ("s" if waiting == 1 else "")
    return f"{needed}; {waits}, so its place in the queue would be about {waiting + 1}."


def _manifest_text(report: DryRunReport) -> str:
    if report.manifest is None:
        return ""
    return f"Written to {report.folder}/{run_folder.MANIFEST}:\n{job_manifest.dump_json(report.manifest)}"


def _command_text(report: DryRunReport) -> str:
    lines = torchrun.format_commands(report.spec, list(report.addresses)).splitlines()
    parts = [f"By hand, in {shlex.quote(report.spec.cwd)}, one line a node:"]
    parts += [f"  {line}" for line in lines if line and not line.startswith("#")]
    if report.files:
        parts.append(f"with {', '.join(report.files)} in {report.folder}/exchange.")
    if not report.idle_workers:
        parts.append("RUN stands for the run's id, and NODE… for addresses that are known when the nodes are.")
    return "\n".join(parts)


def _settings_text(report: DryRunReport) -> str:
    """Return names and values in one column, reasons in another."""
    environ = report.spec.environ
    rows = [(f"{item.name}={item.value}", item.reason) for item in report.settings if item.name not in environ]
    rows += [(f"{name}={value}", "set in this notebook") for name, value in sorted(environ.items())]
    if report.spec.comm:
        rows.append((f"{comm_modes.VARIABLE}={report.spec.comm}", comm_modes.MATHEMATICS[CommMode(report.spec.comm)]))
    wide = min(44, max((len(pair) for pair, _ in rows), default=0))
    where = "this container; every other node finds its own" if report.plan.workers else "this container"
    lines = [f"Set for the ranks, as found in {where}:", *(f"  {pair:<{wide}}  {why}" for pair, why in rows)]
    return "\n".join([*lines, *(f"  {node}" for node in report.nodes)])
