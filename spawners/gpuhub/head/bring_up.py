"""`gpuhub up`: everything from nothing to a login page, each step reusing what is there already."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

import gpuhub
from gpuhub import secrets, settings, urls
from gpuhub.closet import lifecycle, plan
from gpuhub.containers import networks, swarm
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import SettingsError, SetupError
from gpuhub.guard.container import ensure_guard
from gpuhub.head import choice, closets, feasibility, programs
from gpuhub.head.report import Report
from gpuhub.head.supervisor import Supervisor
from gpuhub.images import bring
from gpuhub.login import start as login
from gpuhub.nodes.head import head_address
from gpuhub.paths import Paths
from gpuhub.trust import certificates, public, renewal, trusting
from gpuhub.trust.internal import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `gpuhub up` was asked."""

    settings_file: Path
    hub_config: Path
    #: The source tree that images are built from.
    source: Path
    #: Of the practice closet; None where nothing was said.
    engine: choice.Engine | None = None


def bring_up(paths: Paths, options: Options, report: Report) -> None:
    """Bring the instance up; safe to call again at any time.

    Raises:
        GpuhubError: with what to do.
    """
    programs.find_proxy()
    for folder in (paths.state, paths.run, paths.log):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o711 if folder == paths.state else 0o700)
    supervisor = Supervisor(paths)
    chosen = choice.choose(paths, options.settings_file)
    if chosen.kind is choice.Kind.PRACTICE:
        engine = choice.choose_engine(options.engine, closets.running_engine(supervisor))
        lifecycle.write_cluster_file(plan.practice_plan(paths.instance), paths, engine)
    cluster = settings.load(chosen.cluster_file)
    choice.refuse_other_engine(chosen, cluster.engine, options.engine)
    _announce(chosen, cluster, report)
    for note in login.check(cluster, paths):
        report.note(f"  {note}.")
    secrets.ensure_secrets(paths)
    https = certificates.ensure(cluster, paths, head_address(cluster))
    wanted = programs.build_programs(paths, chosen.cluster_file, options.hub_config)
    if chosen.kind is choice.Kind.PRACTICE:
        closets.start(paths, supervisor, cluster, wanted, report)
    else:
        supervisor.start(wanted)
    if cluster.engine == "slurm":
        with report.step("Slurm has what the settings name"):
            asyncio.run(feasibility.check_slurm(cluster))
    if cluster.has_docker:
        asyncio.run(_prepare_nodes(paths, options, cluster, report))
    _start_services(paths, cluster, chosen.cluster_file, options, report)
    say_farewell(paths, cluster, https, report)


def _announce(chosen: choice.Choice, cluster: settings.Cluster, report: Report) -> None:
    where = {
        choice.Kind.SETTINGS: f"Cluster of {chosen.cluster_file}",
        choice.Kind.THIS_MACHINE: "This machine as the only node (no cluster.toml)",
        choice.Kind.PRACTICE: "Practice closet (no cluster.toml, and no NVIDIA GPU on this machine)",
    }[chosen.kind]
    report.note(f"{where}: {', '.join(node.name for node in cluster.nodes)}")
    if cluster.notice:
        report.note(f"  {cluster.notice}")


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
        title = "Packet filter" if cluster.network.guard else "No packet filter (network.guard = false)"
        with report.step(title):
            await asyncio.gather(*(ensure_guard(daemons, cluster, paths.instance, node.name) for node in cluster.nodes))
    finally:
        daemons.close()


def _start_services(
    paths: Paths, cluster: settings.Cluster, settings_file: Path, options: Options, report: Report
) -> None:
    """Proxy, broker, hub: in this order, so that the hub finds both when it looks."""
    supervisor = Supervisor(paths)
    tls = _ensure_certificates(paths, cluster, report) if cluster.has_internal_tls else None
    if _is_stale(paths, settings_file, options.hub_config):
        # All at once and first: whatever fails below, nothing goes on with the old settings.
        for name in (programs.HUB, programs.BROKER, programs.PROXY):
            supervisor.stop(name)
    with report.step("Proxy and broker"):
        for name in (programs.PROXY, programs.BROKER):
            supervisor.ensure_started(name)
        broker = urls.broker_url(cluster, head_address(cluster))
        _wait_http(f"{broker}/health", 30, paths, programs.BROKER, tls=tls)
    with report.step("GPUs read on every node"):
        cards = feasibility.wait_for_cards(broker, paths, deadline_s=60, tls=tls)
        mistakes = settings.unsatisfiable_profiles(cluster.profiles, cards)
        if mistakes:
            raise SettingsError("\n".join(f"{settings_file}: {line}" for line in mistakes))
    with report.step("JupyterHub"):
        supervisor.ensure_started(programs.HUB)
        wait_public(cluster, paths)


def wait_public(cluster: settings.Cluster, paths: Paths) -> None:
    """Until the hub answers where browsers find it, with the certificate that it should have."""
    https = certificates.find_files(cluster, paths)
    origin = f"{urls.scheme(tls=https is not None)}://{urls.in_url(cluster.hub.bind)}:{cluster.hub.port}"
    tls = None if https is None else certificates.build_pinned_context(https.certificate)
    _wait_http(f"{origin}/hub/health", 60, paths, programs.HUB, tls=tls)


def _ensure_certificates(paths: Paths, cluster: settings.Cluster, report: Report) -> ssl.SSLContext:
    """The certificates of proxy, hub and broker, made anew where they do not fit; how the broker is asked with them."""
    folder = paths.internal_certificates
    done = renewal.ensure(folder, head_address(cluster))
    if done.renewal is renewal.Renewal.CERTIFICATES:
        report.note(f"New certificates for proxy, hub and broker: {done.reason}")
    elif done.renewal is renewal.Renewal.EVERYTHING:
        report.note(f"New internal authorities: {done.reason}. Notebooks that run now must be stopped and started.")
    return Store(folder).to_broker()


def _is_stale(paths: Paths, settings_file: Path, hub_config: Path) -> bool:
    """Whether the services run with other settings or another version than these; remembers these."""
    folder = Path(gpuhub.__file__).parent
    sources = sorted([*folder.rglob("*.py"), *folder.rglob("*.cjs")])
    code = hashlib.sha256(b"".join(file.read_bytes() for file in [*sources, hub_config])).hexdigest()
    now = {
        paths.used_cluster_file: settings_file.read_text(encoding="utf-8"),
        paths.run / "version.used": code,
        paths.run / "login.used": login.fingerprint(settings.load(settings_file)),
        paths.run / "certificates.used": renewal.fingerprint(paths.internal_certificates),
    }
    stale = [file for file, text in now.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        file.write_text(now[file], encoding="utf-8")
    return bool(stale)


def _wait_http(url: str, deadline_s: float, paths: Paths, name: str, *, tls: ssl.SSLContext | None = None) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            if httpx.get(url, timeout=5, trust_env=False, verify=tls or True).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # not listening yet: that is what is waited for
        time.sleep(0.1)
    log = paths.log / f"{name}.log"
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:] if log.exists() else []
    raise SetupError("\n".join([f"{name} does not answer at {url} after {deadline_s:.0f} s; the end of {log}:", *tail]))


def say_farewell(paths: Paths, cluster: settings.Cluster, https: certificates.Ready | None, report: Report) -> None:
    """Where the hub is, who can log in, and what an administrator needs next."""
    report.note()
    address = head_address(cluster)
    report.note(f"gpuhub is up after {report.elapsed_s:.0f} s: {public.public_url(cluster.hub, address)}")
    for line in trusting.describe(https, cluster.hub, paths, address) if https is not None else ():
        report.note(f"  {line}")
    for line in login.describe(cluster, paths, public.public_url(cluster.hub, address)):
        report.note(f"  {line}")
    if cluster.notice:
        report.note(f"  Note:           {cluster.notice}")
    if cluster.engine == "slurm" and cluster.slurm.conf is not None:
        report.note(f"  Slurm:          export SLURM_CONF={cluster.slurm.conf}, then squeue, sbatch …")
    report.note("  Logs:           " + str(paths.log))
    report.note("  Stop it with:   sudo make down")
