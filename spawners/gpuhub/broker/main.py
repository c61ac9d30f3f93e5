"""The broker's process."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import uvicorn

from gpuhub.backends.plugin import find_plugin
from gpuhub.broker import audit
from gpuhub.broker.app import create_app
from gpuhub.broker.controllers.servers import HubClient
from gpuhub.broker.db.store import Store
from gpuhub.common.paths import Paths
from gpuhub.common.secrets import BROKER_TOKEN, read_secret
from gpuhub.config import settings
from gpuhub.config.head_address import build_hub_origin, find_head_address
from gpuhub.docker.client import DockerClients
from gpuhub.docker.firewall_container import ensure_firewall
from gpuhub.docker.user_containers import start_courier, start_worker
from gpuhub.tls import internal_certificates

#: Long polls are cut short when the broker stops, seconds; their clients ask again.
_SHUTDOWN_S = 2


def run(cluster_file: Path, paths: Paths) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        SettingsError: cluster.toml is wrong.
        SetupError: another broker runs, the token is missing, or the store or the address cannot be used.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Each long poll and each look at a node would be a line.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    cluster = settings.load(cluster_file)
    address = find_head_address(cluster)
    token = read_secret(paths, BROKER_TOKEN)
    store = Store.open_file(paths.store)
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
            ensure_filter=partial(ensure_firewall, daemons, cluster, paths.instance),
            backend=find_plugin(cluster).build(cluster, paths),
            own_token=token,
        )
        uvicorn.run(
            app,
            host=address,
            port=cluster.hub.broker_port,
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            server_header=False,
            # Who asks is told by a token alone: forwarded headers mean nothing here.
            proxy_headers=False,
            **({} if certificates is None else certificates.broker_options()),
        )
    finally:
        daemons.close()
        store.close()
        lines.close()
