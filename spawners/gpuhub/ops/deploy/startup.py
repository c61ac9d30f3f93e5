"""`gpuhub up`: starts an instance, from an empty machine to the login page, and reuses what exists already."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import gpuhub
from gpuhub.backends.plugin import find_plugin
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.open_files import describe_low_limit, raise_open_file_limit
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.containers import profiles
from gpuhub.config.head_address import build_broker_url, find_head_address
from gpuhub.login import kinds as login
from gpuhub.login.account_checks import check_accounts
from gpuhub.nodes.power_switch import check_ipmi
from gpuhub.notifications import machine_destinations
from gpuhub.ops.backup import restoration, upgrade_backups
from gpuhub.ops.backup.contents import Head
from gpuhub.ops.console import StepReport
from gpuhub.ops.deploy import cluster_choice, database, file_server, monitoring, own_config, programs
from gpuhub.ops.deploy.cluster_choice import ClusterProvider, find_provider
from gpuhub.ops.deploy.node_setup import set_up_nodes
from gpuhub.ops.deploy.programs import Supervisor
from gpuhub.ops.deploy.proxy import find_proxy
from gpuhub.ops.deploy.readiness import wait_for_gpus, wait_for_http, wait_for_public_url
from gpuhub.ops.images import wheels
from gpuhub.tls import internal_certificates, public_access
from gpuhub.tls.internal_certificates import CertificateStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupOptions:
    """The options of `gpuhub up`."""

    settings_file: Path
    hub_config: Path
    #: The source tree that images are built from.
    source: Path
    #: Scheduling backend of the provider's nodes; None for the one that runs or the default.
    engine: str | None = None
    #: Which of the provider's clusters; None for the last one, where it is not this machine's own GPUs.
    closet: str | None = None
    #: The provider's node that gets this machine's own GPUs; None: as chosen last, or none with another `closet`.
    real_gpu: str | None = None
    #: Build all images again, with Debian's current packages.
    refresh: bool = False
    #: Whether Prometheus runs beside the hub; None: as chosen last.
    monitoring: bool | None = None


def start_hub(paths: Paths, options: StartupOptions, report: StepReport) -> None:
    """Start the instance; safe to call again at any time.

    Raises:
        GpuhubError: A step failed; the text names the remedy.
    """
    _check_head(paths, options)
    low_limit = describe_low_limit(raise_open_file_limit())
    for folder in (paths.state, paths.run, paths.log):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o711 if folder == paths.state else 0o700)
    supervisor = Supervisor(paths)
    provider = find_provider()
    running = provider.find_running_backend(supervisor.states()) if provider and supervisor.is_running() else None
    chosen = cluster_choice.choose_cluster(
        paths,
        options.settings_file,
        variant=options.closet,
        real_gpu=options.real_gpu,
        is_provider_running=running is not None,
    )
    if chosen.origin is cluster_choice.ClusterOrigin.PROVIDER:
        provider = _require_provider(provider)
        engine = cluster_choice.choose_engine(options.engine, running)
        provider.write_cluster_file(
            paths, engine, options.closet, real_gpu=options.real_gpu, is_running=running is not None
        )
    else:
        provider = None
    cluster = settings.load(chosen.cluster_file)
    cluster_choice.check_requested_engine(chosen, cluster.engine, options.engine)
    _announce(chosen, provider, cluster, report)
    for note in (*login.check_login(cluster, paths), *check_accounts(cluster, paths), low_limit):
        if note:
            report.note(f"  {note}.")
    machine_destinations.load(cluster.notifications)
    check_ipmi(cluster)
    database.ensure_database(cluster, paths)
    https = public_access.ensure_certificate(cluster, paths, find_head_address(cluster))
    services = programs.build_programs(paths, chosen.cluster_file, options.hub_config)
    prometheus = build_prometheus(paths, cluster, supervisor, requested=options.monitoring)
    services += prometheus
    services += programs.build_guest_programs(cluster, paths, chosen.cluster_file)
    services += file_server.build_file_server(cluster, paths)
    if provider is not None:
        provider.start(paths, supervisor, cluster, services, report)
    else:
        supervisor.start(services)
    with report.step("File server") if cluster.storage.serve else nullcontext():
        file_server.ensure_exports(cluster, paths, supervisor)
    backend = find_plugin(cluster)
    if backend.capabilities(cluster).external_jobs:
        with report.step(f"{backend.title} has everything that the settings name"):
            asyncio.run(backend.check_site(cluster))
    away: frozenset[str] = frozenset()
    if backend.capabilities(cluster).containers:
        away = asyncio.run(set_up_nodes(paths, cluster, options.source, report, refresh=options.refresh))
    with report.step("gpu-launch for laptops"):
        wheels.ensure_laptop_wheel(options.source, paths.laptop_wheel, lambda _step: None)
    _start_services(paths, cluster, chosen.cluster_file, options, report, away=away)
    if prometheus:
        _start_monitoring(paths, cluster, options, report)
    report_addresses(paths, cluster, https, report)


def _check_head(paths: Paths, options: StartupOptions) -> None:
    """Check what no setting changes, before anything starts."""
    find_proxy()
    restoration.check_finished(paths)
    own_config.check_syntax(options.hub_config)


def _require_provider(provider: ClusterProvider | None) -> ClusterProvider:
    if provider is None:
        raise SetupError(
            "there is no cluster.toml here, this machine has no NVIDIA GPU, and no practice closet is installed: write "
            "a cluster.toml; cluster.example.toml shows how"
        )
    return provider


def _announce(
    chosen: cluster_choice.ClusterChoice,
    provider: ClusterProvider | None,
    cluster: settings.ClusterSettings,
    report: StepReport,
) -> None:
    where = {
        cluster_choice.ClusterOrigin.SETTINGS: f"Cluster of {chosen.cluster_file}",
        cluster_choice.ClusterOrigin.THIS_MACHINE: "This machine as the only node (no cluster.toml)",
        cluster_choice.ClusterOrigin.PROVIDER: f"{provider.title if provider else ''} (no cluster.toml)",
    }[chosen.origin]
    report.note(f"{where}: {', '.join(node.name for node in cluster.nodes)}")
    if cluster.notice:
        report.note(f"  {cluster.notice}")


def _start_services(
    paths: Paths,
    cluster: settings.ClusterSettings,
    settings_file: Path,
    options: StartupOptions,
    report: StepReport,
    *,
    away: Collection[str],
) -> None:
    """Start proxy, broker and hub in this order: the hub needs the other two when it starts.

    Args:
        away: Nodes that do not answer.
    """
    supervisor = Supervisor(paths)
    tls = _ensure_certificates(paths, cluster, report) if cluster.has_internal_tls else None
    if _is_stale(paths, settings_file, options.hub_config):
        # All are stopped first: if a later step fails, no service continues with the old settings.
        for name in (programs.HUB, programs.BROKER, programs.PROXY, programs.GUESTS):
            supervisor.stop(name)
    _back_up_databases(paths, cluster, options, report)
    with report.step("Proxy and broker"):
        for name in (programs.PROXY, programs.BROKER):
            supervisor.ensure_started(name)
        broker = build_broker_url(cluster, find_head_address(cluster))
        wait_for_http(f"{broker}/health", 30, paths, programs.BROKER, tls=tls)
    if cluster.guests.endpoint is not None:
        with report.step("WireGuard for guests"):
            supervisor.ensure_started(programs.GUESTS)
    with report.step("GPUs read on every node" if not away else "GPUs read"):
        found = wait_for_gpus(broker, paths, deadline_s=60, tls=tls, away=away)
        # A node whose GPUs are not known may have those that a profile wants.
        mistakes = [] if away or found.unread else profiles.unsatisfiable_profiles(cluster.profiles, found.gpus)
        if mistakes:
            raise SettingsError("\n".join(f"{settings_file}: {line}" for line in mistakes))
    for line in found.unread:
        report.note(f"  ! {line}. The GPUs of the other nodes can be used; `gpuhub doctor` says more.")
    with report.step("JupyterHub"):
        supervisor.ensure_started(programs.HUB)
        wait_for_public_url(cluster, paths)


def _back_up_databases(
    paths: Paths, cluster: settings.ClusterSettings, options: StartupOptions, report: StepReport
) -> None:
    """Copy the head node's state if hub and broker are about to change their tables."""
    head = Head(paths=paths, cluster_file=options.settings_file.absolute(), hub_config=options.hub_config)
    backup = upgrade_backups.ensure_upgrade_backup(head, cluster)
    if backup is not None:
        report.note(f"The tables of the databases change with this version; as they were: {backup}")
        report.note("  To go back: docs/operations.md, Upgrading.")
    upgrade_backups.record_version(paths)


def build_prometheus(
    paths: Paths, cluster: settings.ClusterSettings, supervisor: Supervisor, *, requested: bool | None
) -> list[programs.Program]:
    """Return Prometheus if it runs beside the hub: as requested, which later calls keep, else as requested last.

    Raises:
        SetupError: It is not installed, or another program has its port.
    """
    is_chosen = paths.monitoring_choice.exists() if requested is None else requested
    if not is_chosen:
        paths.monitoring_choice.unlink(missing_ok=True)
        return []
    if not is_monitored(supervisor):
        monitoring.check_port(cluster.monitoring.port)
    program = monitoring.build_program(cluster, paths)
    paths.monitoring_choice.touch(mode=0o600)
    return [program]


def is_monitored(supervisor: Supervisor) -> bool:
    """Return whether Prometheus is among the programs that are supervised now."""
    return supervisor.is_running() and programs.PROMETHEUS in supervisor.states()


def _start_monitoring(
    paths: Paths, cluster: settings.ClusterSettings, options: StartupOptions, report: StepReport
) -> None:
    """Start Prometheus, or restart it with changed files."""
    supervisor = Supervisor(paths)
    url = f"http://127.0.0.1:{cluster.monitoring.port}"
    with report.step(f"Prometheus on {url}"):
        if monitoring.ensure_files(cluster, paths, options.source, find_head_address(cluster)):
            supervisor.stop(programs.PROMETHEUS)
        supervisor.ensure_started(programs.PROMETHEUS)
        wait_for_http(f"{url}/-/ready", 60, paths, programs.PROMETHEUS)


def _ensure_certificates(paths: Paths, cluster: settings.ClusterSettings, report: StepReport) -> ssl.SSLContext:
    """Make the certificates of proxy, hub and broker where they do not fit, and return the context for the broker."""
    folder = paths.internal_certificates
    done = internal_certificates.ensure_internal_certificates(folder, find_head_address(cluster))
    if done.scope is internal_certificates.RenewalScope.CERTIFICATES:
        report.note(f"New certificates for proxy, hub and broker: {done.reason}")
    elif done.scope is internal_certificates.RenewalScope.EVERYTHING:
        report.note(f"New internal authorities: {done.reason}. Notebooks that run now must be stopped and started.")
    return CertificateStore(folder).build_broker_context()


def _is_stale(paths: Paths, settings_file: Path, hub_config: Path) -> bool:
    """Return whether the services run with other settings or another version; the current ones are recorded."""
    folder = Path(gpuhub.__file__).parent
    sources = sorted([*folder.rglob("*.py"), *folder.rglob("*.cjs")])
    code = hashlib.sha256(
        b"".join(file.read_bytes() for file in [*sources, *own_config.list_files(hub_config), hub_config])
    ).hexdigest()
    now = {
        paths.used_cluster_file: settings_file.read_text(encoding="utf-8"),
        paths.run / "version.used": code,
        paths.run / "login.used": login.build_fingerprint(settings.load(settings_file)),
        paths.run / "certificates.used": internal_certificates.hash_certificates(paths.internal_certificates),
    }
    stale = [file for file, text in now.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        file.write_text(now[file], encoding="utf-8")
    return bool(stale)


def report_addresses(
    paths: Paths, cluster: settings.ClusterSettings, https: public_access.ProxyCertificate | None, report: StepReport
) -> None:
    """Write where the hub is, who can log in, and which commands an administrator needs next."""
    report.note()
    address = find_head_address(cluster)
    report.note(f"gpuhub is up after {report.elapsed_s:.0f} s: {public_access.build_public_url(cluster.hub, address)}")
    for line in public_access.describe_certificate(https, cluster.hub, paths, address) if https is not None else ():
        report.note(f"  {line}")
    for line in login.describe_login(cluster, paths, public_access.build_public_url(cluster.hub, address)):
        report.note(f"  {line}")
    if cluster.notice:
        report.note(f"  Note:           {cluster.notice}")
    backend = find_plugin(cluster)
    for line in backend.describe_commands(cluster):
        report.note(f"  {backend.title + ':':<15} {line}")
    report.note("  Logs:           " + str(paths.log))
    report.note("  Stop it with:   sudo make down")
