"""`gpuhub up`: everything from nothing to a login page, each step reusing what is there already."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

import gpuhub
from gpuhub import secrets, settings
from gpuhub.closet import lifecycle, plan
from gpuhub.containers import networks, swarm
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import SettingsError, SetupError
from gpuhub.head import choice, feasibility, programs
from gpuhub.head.report import Report
from gpuhub.head.supervisor import Program, Supervisor
from gpuhub.images import bring
from gpuhub.nodes.head import head_address
from gpuhub.paths import Paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `gpuhub up` was asked."""

    settings_file: Path
    hub_config: Path
    #: The source tree that images are built from.
    source: Path


def bring_up(paths: Paths, options: Options, report: Report) -> None:
    """Bring the instance up; safe to call again at any time.

    Raises:
        GpuhubError: with what to do.
    """
    programs.find_proxy()
    for folder in (paths.state, paths.run, paths.log):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o711 if folder == paths.state else 0o700)
    chosen = choice.choose(paths, options.settings_file)
    if chosen.kind is choice.Kind.PRACTICE:
        lifecycle.write_cluster_file(plan.practice_plan(paths.instance), paths)
    cluster = settings.load(chosen.cluster_file)
    _announce(chosen, cluster, report)
    secrets.ensure_secrets(paths)
    supervisor = Supervisor(paths)
    wanted = programs.build_programs(paths, chosen.cluster_file, options.hub_config)
    if chosen.kind is choice.Kind.PRACTICE:
        _start_closet(paths, supervisor, wanted, report)
    else:
        supervisor.start(wanted)
    asyncio.run(_prepare_nodes(paths, options, cluster, report))
    _start_services(paths, cluster, chosen.cluster_file, options, report)
    _farewell(paths, cluster, report)


def _announce(chosen: choice.Choice, cluster: settings.Cluster, report: Report) -> None:
    where = {
        choice.Kind.SETTINGS: f"Cluster of {chosen.cluster_file}",
        choice.Kind.THIS_MACHINE: "This machine as the only node (no cluster.toml)",
        choice.Kind.PRACTICE: "Practice closet (no cluster.toml, and no NVIDIA GPU on this machine)",
    }[chosen.kind]
    report.note(f"{where}: {', '.join(node.name for node in cluster.nodes)}")
    if cluster.notice:
        report.note(f"  {cluster.notice}")


def _start_closet(paths: Paths, supervisor: Supervisor, services: list[Program], report: Report) -> None:
    closet = plan.practice_plan(paths.instance)
    with report.step(f"Practice closet: {len(closet.nodes)} nodes, each with a Docker daemon of its own"):
        lifecycle.prepare(closet, paths)
        daemons = programs.build_closet_programs(paths, [node.name for node in closet.nodes])
        supervisor.start([*daemons, *services])
        for program in daemons:
            supervisor.ensure_started(program.name)
        lifecycle.wait_ready(closet, paths)


async def _prepare_nodes(paths: Paths, options: Options, cluster: settings.Cluster, report: Report) -> None:
    daemons = Daemons(cluster.nodes, instance=paths.instance, run_dir=paths.run)
    try:
        with report.step(f"Docker answers on {len(cluster.nodes)} node{'s' * (len(cluster.nodes) > 1)}"):
            await asyncio.gather(*(daemons.call(node.name, "version") for node in cluster.nodes))
        await bring.bring_images(daemons, cluster, paths, options.source, report)
        with report.step("Networks"):
            await swarm.ensure_swarm(daemons, cluster)
            await asyncio.gather(
                *(networks.ensure_access_network(daemons, cluster, paths.instance, node.name) for node in cluster.nodes)
            )
    finally:
        daemons.close()


def _start_services(
    paths: Paths, cluster: settings.Cluster, settings_file: Path, options: Options, report: Report
) -> None:
    """Proxy, broker, hub: in this order, so that the hub finds both when it looks."""
    supervisor = Supervisor(paths)
    if _is_stale(paths, settings_file, options.hub_config):
        # All at once and first: whatever fails below, nothing goes on with the old settings.
        for name in (programs.HUB, programs.BROKER, programs.PROXY):
            supervisor.stop(name)
    with report.step("Proxy and broker"):
        for name in (programs.PROXY, programs.BROKER):
            supervisor.ensure_started(name)
        broker = f"http://{head_address(cluster)}:{cluster.hub.broker_port}/services/broker"
        _wait_http(f"{broker}/health", 30, paths, programs.BROKER)
    with report.step("GPUs read on every node"):
        cards = feasibility.wait_for_cards(broker, paths, deadline_s=60)
        mistakes = settings.unsatisfiable_profiles(cluster.profiles, cards)
        if mistakes:
            raise SettingsError("\n".join(f"{settings_file}: {line}" for line in mistakes))
    with report.step("JupyterHub"):
        supervisor.ensure_started(programs.HUB)
        _wait_http(f"http://{cluster.hub.bind}:{cluster.hub.port}/hub/login", 60, paths, programs.HUB)


def _is_stale(paths: Paths, settings_file: Path, hub_config: Path) -> bool:
    """Whether the services run with other settings or another version than these; remembers these."""
    sources = sorted(Path(gpuhub.__file__).parent.rglob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in [*sources, hub_config])).hexdigest()
    now = {paths.used_cluster_file: settings_file.read_text(encoding="utf-8"), paths.run / "version.used": code}
    stale = [file for file, text in now.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        file.write_text(now[file], encoding="utf-8")
    return bool(stale)


def _wait_http(url: str, deadline_s: float, paths: Paths, name: str) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            if httpx.get(url, timeout=5, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # not listening yet: that is what is waited for
        time.sleep(0.1)
    log = paths.log / f"{name}.log"
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:] if log.exists() else []
    raise SetupError("\n".join([f"{name} does not answer at {url} after {deadline_s:.0f} s; the end of {log}:", *tail]))


def _farewell(paths: Paths, cluster: settings.Cluster, report: Report) -> None:
    report.note()
    report.note(f"gpuhub is up after {report.elapsed_s:.0f} s: http://{cluster.hub.bind}:{cluster.hub.port}")
    users = ", ".join(cluster.users.allowed) or "nobody but the administrators"
    report.note(f"  Who can log in: {users}")
    if cluster.users.admins:
        report.note(f"  Administrators: {', '.join(cluster.users.admins)}")
    if cluster.users.login == "password":
        report.note(f"  Password:       {secrets.read_secret(paths, secrets.USER_PASSWORD)}")
        if cluster.users.admins:
            report.note(f"  Administrators': in {paths.secrets / secrets.ADMIN_PASSWORD}")
    else:
        report.note("  Password:       that of their account on this machine")
    if cluster.notice:
        report.note(f"  Note:           {cluster.notice}")
    report.note("  Logs:           " + str(paths.log))
    report.note("  Stop it with:   sudo make down")
