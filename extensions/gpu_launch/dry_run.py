"""`--dry-run`: what a launch would ask for and run, with nothing asked for and nothing started."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpu_launch import command, environment, network, order, render, runs, settings
from gpu_launch.broker import Broker
from gpu_launch.crew import Crew, crews
from gpu_launch.errors import BrokerError
from gpu_launch.exchange import Exchange
from gpu_launch.options import Options
from gpu_launch.plan import Plan, free_nodes
from gpu_launch.request import Checked, build_spec
from gpu_launch.roster import Roster
from gpu_launch.runs import RunFolder
from gpu_launch.spec import Channel, LaunchSpec, NodeInfo
from gpu_launch.wire import Cluster

#: Stand for what is known only when it starts.
RUN, PORT = "RUN", 29500
_PATIENCE_S = 3.0  # seconds for a broker that does not answer


@dataclass(frozen=True, kw_only=True)
class Paper:
    """All that is shown."""

    plan: Plan
    spec: LaunchSpec
    #: By node rank; names such as NODE1 where they are not known.
    addresses: tuple[str, ...]
    #: The body of the job's request; None where nobody is asked.
    body: Mapping[str, Any] | None
    #: None where it is not known.
    cluster: Cluster | None
    #: Workers that stand already and would be used; empty for none.
    standing: str
    found: tuple[settings.Setting, ...]
    warnings: tuple[str, ...]
    #: Names and values, where a node's own settings are known and differ from those.
    nodes: tuple[str, ...] = ()
    #: What goes into the exchange folder.
    files: tuple[str, ...] = ()
    #: A detached job's, and where it is written.
    order: order.Order | None = None
    folder: str = ""


class _Recorder(Broker):
    """Keeps what would be asked for."""

    def __init__(self) -> None:
        super().__init__("", "")
        self.body: Mapping[str, Any] = {}

    def _request(self, method: str, path: str, *, body: Any = None, **_: Any) -> Any:
        self.body = body
        return {"id": "", "run_id": RUN, "state": "", "version": 0}


def build(options: Options, *, cell: str | None, before: Mapping[str, str], exchange: Exchange | None = None) -> Paper:
    """Look at everything that a launch looks at. Raises UsageError and BrokerError as a launch does."""
    env = environment.read()
    run = runs.folder(env.home, RUN)
    paper = _detached(options, cell, before, run) if options.detach else _launched(options, cell, before, run)
    files = () if exchange is None else tuple(exchange.files)
    if files:
        paper = replace(paper, spec=replace(paper.spec, exchange=str(run.exchange)))
    return replace(paper, files=files, folder=runs.shown(run.root, env.home))


def _launched(options: Options, cell: str | None, before: Mapping[str, str], run: RunFolder) -> Paper:
    from gpu_launch.launch import prepare

    checked, broker = prepare(options, cell=cell, before=before)
    crew = crews.fitting(checked.plan)
    if crew is not None:
        return _on_crew(checked, crew, run)
    asked = _Recorder()
    plan = checked.plan
    if plan.workers:
        # As `gang` does.
        asked.create_job(
            run_id=RUN,
            nnodes=plan.workers,
            min_nnodes=max(1, plan.least_workers) if plan.is_elastic else None,
            nproc_per_node=plan.nproc_per_node,
            server=checked.request.env.server,
            exclude_nodes=plan.exclude_nodes,
            demand=plan.demand,
        )
    return _on_paper(checked, broker, run, asked.body or None)


def _detached(options: Options, cell: str | None, before: Mapping[str, str], run: RunFolder) -> Paper:
    from gpu_launch.detached import submit

    env = environment.read()
    broker = Broker.inside(env, patience_s=_PATIENCE_S)
    user_set = environment.changed(before, os.environ)
    checked = submit.examine(options, cell=cell, env=env, broker=broker, user_set=user_set)
    asked = _Recorder()
    submit.ask(checked, asked, run, env)
    return replace(_on_paper(checked, broker, run, asked.body), order=submit.build_order(checked))


def _on_paper(checked: Checked, broker: Broker | None, run: RunFolder, body: Mapping[str, Any] | None) -> Paper:
    """Nothing stands: the other nodes' addresses are not known."""
    plan = checked.plan
    own = network.own(checked.request.env.subnet, wait_s=2.0)
    roster = Roster(
        own=plan.own,
        workers=tuple(range(plan.workers)),
        nodes=tuple(f"NODE{index + int(plan.own)}" for index in range(plan.workers)),
        nproc_per_node=plan.nproc_per_node,
    )
    addresses = (*((own.address,) if plan.own else ()), *roster.nodes)
    return Paper(
        plan=plan,
        spec=_spec(checked, run, roster, addresses[0]),
        addresses=addresses,
        body=body,
        cluster=_cluster(broker) if body is not None else None,
        standing="",
        **_found(own.name),
    )


def _on_crew(checked: Checked, crew: Crew, run: RunFolder) -> Paper:
    roster = crew.roster(checked.plan)
    assert roster is not None  # noqa: S101 - a crew that lives has one
    infos = crew.fleet.infos(roster)
    own = network.own(checked.request.env.subnet, wait_s=2.0)
    return Paper(
        plan=checked.plan,
        spec=_spec(checked, run, roster, infos[0].address),
        addresses=tuple(info.address for info in infos),
        body=None,
        cluster=None,
        standing=crew.describe(),
        nodes=tuple(f"{info.node}: {_pairs(info.settings)}" for info in infos),
        **_found(own.name),
    )


def _found(interface: str) -> dict[str, Any]:
    facts = settings.look(interface, far=True)
    found = tuple(item for item in settings.decide(facts) if item.name not in os.environ)
    return {"found": found, "warnings": settings.warn(facts)}


def _pairs(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())


def _cluster(broker: Broker | None) -> Cluster | None:
    try:
        return broker.cluster() if broker is not None else None
    except BrokerError:
        return None


def _spec(checked: Checked, run: RunFolder, roster: Roster, first: str) -> LaunchSpec:
    return build_spec(
        checked,
        run,
        roster=roster,
        first=NodeInfo(worker=None, node=first, address=first, interface="", port=PORT),
        attempt=0,
        channel=Channel(url="", server_public=b"", client_public=b"", client_secret=b""),
    )


def text(paper: Paper) -> str:
    """As a person reads it. Pure."""
    parts = [_request_text(paper), _free_text(paper), _order_text(paper), _command_text(paper), _settings_text(paper)]
    parts += [f"Note: {said}" for said in paper.warnings]
    return "\n\n".join(part for part in parts if part) + "\n\nNothing was asked for, and nothing started.\n"


def _request_text(paper: Paper) -> str:
    if paper.standing:
        return f"It would run at once on workers that stand already: {paper.standing}"
    if paper.body is None:
        return "Nobody would be asked: this notebook's own GPUs are enough."
    return "Asked of the broker, POST /jobs:\n" + json.dumps(paper.body, indent=2, ensure_ascii=False)


def _free_text(paper: Paper) -> str:
    if paper.body is None:
        return ""
    if paper.cluster is None:
        return "Whether that is free is not known: the broker does not answer."
    waiting, free = paper.cluster.waiting, free_nodes(paper.plan, paper.cluster)
    named = ", ".join(free) or "none"
    if len(free) >= paper.plan.least_workers and not waiting:
        return f"Free now: {named}. It would start at once."
    needed = f"{render.count(max(1, paper.plan.least_workers), 'node')} needed, free now: {named}"
    waits = f"{render.count(waiting, 'request')} of others wait" + ("s" if waiting == 1 else "")
    return f"{needed}; {waits}, so its place in the queue would be about {waiting + 1}."


def _order_text(paper: Paper) -> str:
    if paper.order is None:
        return ""
    return f"Written to {paper.folder}/{runs.ORDER}:\n{order.dump(paper.order)}"


def _command_text(paper: Paper) -> str:
    lines = command.build_by_hand(paper.spec, list(paper.addresses)).splitlines()
    said = [f"By hand, in {shlex.quote(paper.spec.cwd)}, one line a node:"]
    said += [f"  {line}" for line in lines if line and not line.startswith("#")]
    if paper.files:
        said.append(f"with {', '.join(paper.files)} in {paper.folder}/exchange.")
    if not paper.standing:
        said.append("RUN stands for the run's id, and NODE… for addresses that are known when the nodes are.")
    return "\n".join(said)


def _settings_text(paper: Paper) -> str:
    """Names and values in one column, reasons in another."""
    environ = paper.spec.environ
    rows = [(f"{item.name}={item.value}", item.reason) for item in paper.found if item.name not in environ]
    rows += [(f"{name}={value}", "set in this notebook") for name, value in sorted(environ.items())]
    wide = min(44, max((len(pair) for pair, _ in rows), default=0))
    where = "this container; every other node finds its own" if paper.plan.workers else "this container"
    said = [f"Set for the ranks, as found in {where}:", *(f"  {pair:<{wide}}  {why}" for pair, why in rows)]
    return "\n".join([*said, *(f"  {node}" for node in paper.nodes)])
