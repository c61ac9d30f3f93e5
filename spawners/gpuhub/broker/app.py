"""The broker's application, put together from its parts, and the process that serves it."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from gpuhub.backends.builtin import BuiltinBackend
from gpuhub.backends.interface import WORKER_TIMEOUT_S, SchedulingBackend
from gpuhub.backends.plugin import find_plugin
from gpuhub.broker import audit
from gpuhub.broker.admission.users import UserDirectory
from gpuhub.broker.api.application import build_http_app
from gpuhub.broker.api.auth import Authenticator, TokenChecker
from gpuhub.broker.api.lists import ListRenderer
from gpuhub.broker.api.server import build_server_config
from gpuhub.broker.api.service_auth import ServiceAuthenticator
from gpuhub.broker.audit import AuditLog
from gpuhub.broker.controllers import loop
from gpuhub.broker.controllers.backend_controller import BackendController, CoreHost
from gpuhub.broker.controllers.cost_controller import CostController
from gpuhub.broker.controllers.deadlines import DeadlineController, UnprovenLeases
from gpuhub.broker.controllers.hub_client import HubClient, ServerApi
from gpuhub.broker.controllers.idle_controller import IdleController
from gpuhub.broker.controllers.nodes.network_gc import NetworkCollector
from gpuhub.broker.controllers.nodes.node_controller import NodeController
from gpuhub.broker.controllers.nodes.node_probe import EnsureFirewall, FirewallChecker
from gpuhub.broker.controllers.nodes.power_controller import PowerController
from gpuhub.broker.controllers.nodes.stopped_work import end_stopped_work
from gpuhub.broker.controllers.nodes.volume_gc import VolumeCollector
from gpuhub.broker.controllers.notification_controller import NotificationController
from gpuhub.broker.controllers.server_restarter import ServerRestarter
from gpuhub.broker.controllers.suspension_controller import SuspensionController
from gpuhub.broker.controllers.worker_launcher import StartWorker, WorkerLauncher
from gpuhub.broker.db.store import Store
from gpuhub.broker.files.backend_couriers import BackendCouriers
from gpuhub.broker.files.couriers import CourierPool, StartCourier
from gpuhub.broker.files.dataset_stager import DatasetStager
from gpuhub.broker.files.guest_files import GuestFiles
from gpuhub.broker.files.user_files import UserFiles
from gpuhub.broker.metrics.exporter import MetricsExporter
from gpuhub.broker.operations.admin import AdminOperations
from gpuhub.broker.operations.bench import BenchOperations
from gpuhub.broker.operations.cluster import ClusterOperations
from gpuhub.broker.operations.costs import CostOperations
from gpuhub.broker.operations.live import LiveViews
from gpuhub.broker.operations.notebook_datasets import LeaseStaging
from gpuhub.broker.operations.notebook_shares import NotebookShareOperations
from gpuhub.broker.operations.notifications import NotificationOperations
from gpuhub.broker.operations.operations import BrokerOperations
from gpuhub.broker.operations.output_shares import ShareOperations
from gpuhub.broker.operations.power import PowerOperations
from gpuhub.broker.operations.recipes import RecipeOperations
from gpuhub.broker.operations.services import ServiceOperations
from gpuhub.broker.operations.user_limits import LimitOperations
from gpuhub.broker.services.supervisor import ServiceSupervisor
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.common.errors import SetupError
from gpuhub.common.log_text import EscapingFormatter
from gpuhub.common.open_files import raise_open_file_limit
from gpuhub.common.paths import Paths
from gpuhub.common.secrets import BROKER_TOKEN, DESTINATION_KEY, JOB_KEY, METRICS_TOKEN, SPAWNER_TOKEN, read_secret
from gpuhub.config import settings
from gpuhub.config.head_address import build_hub_origin, find_head_address
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers.firewall_container import ensure_firewall
from gpuhub.docker.containers.user_containers import start_courier, start_worker
from gpuhub.domain.clock import Clock
from gpuhub.nodes.inventory import GpuReading, build_inventory
from gpuhub.nodes.power_switch import check_ipmi
from gpuhub.notifications import machine_destinations, sender
from gpuhub.notifications.url_cipher import UrlCipher
from gpuhub.tls import internal_certificates
from gpuhub.tls.public_access import read_certificate_ends

log = logging.getLogger(__name__)


class HubApi(TokenChecker, ServerApi, UserDirectory, Protocol):
    """What the broker needs of the hub."""

    async def close(self) -> None:
        """Drop the connections."""
        ...


def create_app(
    *,
    cluster: ClusterSettings,
    store: Store,
    daemons: DockerClients,
    hub: HubApi,
    start_worker: StartWorker,
    start_courier: StartCourier,
    destination_key: str,
    job_secret: str,
    machine_urls: Mapping[str, str] | None = None,
    ensure_filter: EnsureFirewall | None = None,
    backend: SchedulingBackend | None = None,
    stopped_nodes: Path | None = None,
    clock: Clock | None = None,
    own_token: str = "",
    spawner_token: str = "",
    metrics_token: str = "",
    bench_file: Path | None = None,
    read_head_free: Callable[[], int] | None = None,
    read_certificate_ends: Callable[[], Mapping[str, float]] | None = None,
    hub_page: str = "/hub/gpus",
) -> FastAPI:
    """Return the application; its loops run while it does. The caller closes store and daemons afterwards.

    `backend` decides which lease gets which GPUs: the builtin one where none is given. `stopped_nodes` is the file of
    nodes that `gpuhub down` has stopped, and `bench_file` keeps what `gpuhub bench` measured. `destination_key`
    encrypts users' destinations of notifications in the store, and `job_secret` is that of the keys with which jobs
    reach services; `machine_urls` are those of the owner of the machines, by id.
    """
    clock, backend = clock or Clock(), backend or BuiltinBackend(cluster)
    capabilities = backend.capabilities
    core = BrokerState(
        cluster=cluster,
        store=store,
        scheduler=backend.scheduler,
        inventory=build_inventory(cluster, _seen(store)),
        clock=clock,
    )

    store.outbox.machine_destinations = tuple(machine_urls or {})
    cipher = UrlCipher(destination_key)
    notifications = NotificationController(core=core, send=sender.send, cipher=cipher, machine_urls=machine_urls or {})
    couriers = CourierPool(core=core, daemons=daemons, start=start_courier)
    files, guest_files = (
        UserFiles(
            core,
            couriers if capabilities.containers else BackendCouriers(backend),
            has_containers=capabilities.containers,
        ),
        GuestFiles(core=core, daemons=daemons, couriers=couriers),
    )
    stager = DatasetStager(core=core, daemons=daemons)
    staging = LeaseStaging(core, stager.stage)
    supervisor = ServiceSupervisor(cluster, daemons)
    audit_log = AuditLog(clock)
    # Where another scheduler grants leases, it also switches the nodes.
    power = (
        PowerController(core=core, daemons=daemons, couriers=couriers, is_transferring=lambda: stager.is_transferring)
        if capabilities.containers and not capabilities.external_jobs
        else None
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await backend.setup(CoreHost(core))
        await core.start()
        if stopped_nodes is not None:
            await end_stopped_work(core, stopped_nodes)
        launcher = WorkerLauncher(
            core=core,
            instance=daemons.instance,
            start_worker=start_worker if capabilities.containers else backend.start_worker,
            refuse_ended=partial(backend.confirm, timeout_s=WORKER_TIMEOUT_S) if capabilities.external_jobs else None,
            stage=stager.stage if capabilities.containers else None,
            send_files=guest_files.send,
        )
        unproven = UnprovenLeases()
        runs: dict[str, Callable[[], Awaitable[None]]] = {
            "deadlines": DeadlineController(core=core, unproven=unproven).run,
            "worker launcher": launcher.run,
            "server restarter": ServerRestarter(core=core, servers=hub).run,
            "notifications": notifications.run,
            "costs": CostController(core).run,
            **({} if power is None else {"power of nodes": power.run}),
        }
        if capabilities.containers:
            nodes = NodeController(
                core=core,
                daemons=daemons,
                launcher=launcher,
                couriers=couriers,
                unproven=unproven,
                firewall=None if ensure_filter is None else FirewallChecker(ensure_filter, clock),
                read_head_free=read_head_free,
                find_staging=staging.find_starting,
                fetch_files=guest_files.fetch,
            )
            runs |= {
                "node controller": nodes.run,
                "volumes": VolumeCollector(core=core, daemons=daemons).run,
                "datasets": stager.run,
                "services": supervisor.run,
                "networks": NetworkCollector(core=core, daemons=daemons, stager=stager).run,
            }
        if cluster.stops_idle_notebooks or cluster.suspends_idle_notebooks:
            runs["idle notebooks"] = IdleController(core).run
        if cluster.moves_gpu_memory or core.ledger.find_leases("suspended"):
            runs["suspended notebooks"] = SuspensionController(core, daemons).run
        if capabilities.external_jobs:
            runs["backend controller"] = BackendController(core, backend).run
        loops = [asyncio.ensure_future(loop.keep_running(what, run)) for what, run in runs.items()]
        try:
            yield
        finally:
            await loop.stop(loops)
            await notifications.close()
            await staging.close()
            await launcher.close()
            await backend.close()
            await core.close()
            await hub.close()
            audit_log.close()

    operations = BrokerOperations(core, backend, hub)
    cluster_operations = ClusterOperations(core, backend)
    exporter = MetricsExporter(
        core, backend, read_head_free=read_head_free, read_certificate_ends=read_certificate_ends
    )
    app = build_http_app(lifespan, cluster, audit_log, exporter)
    parts = {
        "core": core,
        "broker": operations,
        "cluster": cluster_operations,
        "lists": ListRenderer(),
        "costs": CostOperations(core, backend),
        "recipes": RecipeOperations(core.cluster.jobs.recipes),
        "live_views": LiveViews(core, operations, cluster_operations),
        "output_shares": ShareOperations(core, files, hub),
        "notebook_shares": NotebookShareOperations(core, files, hub),
        "notifications": NotificationOperations(core, cipher, sender.send),
        "admin": AdminOperations(core, backend),
        "power": PowerOperations(core, backend, power),
        "bench": BenchOperations(core, bench_file),
        "user_limits": LimitOperations(core, backend),
        "staging": staging,
        "authenticator": (authenticator := Authenticator(hub, clock, own_token, spawner_token, metrics_token)),
        "service_authenticator": ServiceAuthenticator(core, authenticator, job_secret),
        "metrics": exporter,
        "user_files": files,
        "daemons": daemons,
        "services": ServiceOperations(core, supervisor),
        "hub_page": hub_page,
    }
    for name, part in parts.items():
        setattr(app.state, name, part)
    return app


def _seen(store: Store) -> dict[str, list[GpuReading]]:
    seen: defaultdict[str, list[GpuReading]] = defaultdict(list)
    for gpu in store.load_seen_gpus():
        seen[gpu.node].append(GpuReading(uuid=gpu.uuid, index=gpu.index, model=gpu.model, memory_mib=gpu.memory_mib))
    return dict(seen)


def run(cluster_file: Path, paths: Paths) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        SettingsError: cluster.toml is wrong.
        SetupError: another broker runs, the token is missing, or the store or the address cannot be used.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    raise_open_file_limit()
    # Each long poll and each poll of a node would be a line.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    cluster = settings.load(cluster_file)
    address = find_head_address(cluster)
    token = read_secret(paths, BROKER_TOKEN)
    machine_urls = machine_destinations.load(cluster.notifications)
    check_ipmi(cluster)
    destination_key = read_secret(paths, DESTINATION_KEY)
    store = Store.open_configured(cluster.database, paths)
    daemons = DockerClients(cluster.nodes, instance=paths.instance, run_dir=paths.run)
    lines = audit.open_log(paths.log / "audit.log")
    certificates = (
        internal_certificates.CertificateStore(paths.internal_certificates) if cluster.has_internal_tls else None
    )
    hub = HubClient(
        f"{build_hub_origin(cluster, address)}/hub/api",
        token,
        tls=None if certificates is None else certificates.build_hub_context(),
    )
    try:
        app = create_app(
            cluster=cluster,
            store=store,
            daemons=daemons,
            hub=hub,
            start_worker=partial(start_worker, daemons, cluster, paths),
            start_courier=partial(start_courier, daemons, cluster, paths),
            destination_key=destination_key,
            job_secret=read_secret(paths, JOB_KEY),
            machine_urls=machine_destinations.build_ids(machine_urls, destination_key),
            ensure_filter=partial(ensure_firewall, daemons, cluster, paths.instance),
            backend=find_plugin(cluster).build(cluster, paths),
            stopped_nodes=paths.stopped_nodes,
            own_token=token,
            spawner_token=read_secret(paths, SPAWNER_TOKEN),
            metrics_token=read_secret(paths, METRICS_TOKEN),
            bench_file=paths.bench,
            read_head_free=lambda: shutil.disk_usage(paths.state).free,
            read_certificate_ends=partial(read_certificate_ends, cluster, paths),
        )
        tls = {} if certificates is None else certificates.broker_options()
        server = uvicorn.Server(build_server_config(app, host=address, port=cluster.hub.broker_port, **tls))
        with suppress(KeyboardInterrupt):
            server.run()
        if not server.started:
            raise SetupError("the broker did not start; the lines above have the reason")
    finally:
        daemons.close()
        store.close()
        lines.close()
