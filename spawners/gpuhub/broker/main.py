"""The broker's process."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import uvicorn

from gpuhub import settings, urls
from gpuhub.broker import audit
from gpuhub.broker.app import create_app
from gpuhub.broker.hub import HubApi
from gpuhub.broker.slurm_submitting import SlurmSide, find_submitter
from gpuhub.broker.store import Store
from gpuhub.containers.courier import start_courier
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.workers import start_worker
from gpuhub.guard.container import ensure_guard
from gpuhub.identity import find_name
from gpuhub.nodes.head import head_address
from gpuhub.paths import Paths
from gpuhub.secrets import BROKER_TOKEN, read_secret
from gpuhub.settings import Cluster
from gpuhub.slurm.make import make_api
from gpuhub.trust import internal

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
    address = head_address(cluster)
    token = read_secret(paths, BROKER_TOKEN)
    store = Store.open_file(paths.store)
    daemons = Daemons(cluster.nodes, instance=paths.instance, run_dir=paths.run)
    lines = audit.open_log(paths.log / "audit.log")
    certificates = internal.Store(paths.internal_certificates) if cluster.has_internal_tls else None
    hub = HubApi(
        f"{urls.hub_origin(cluster, address)}/hub/api",
        token,
        tls=None if certificates is None else certificates.to_hub(),
    )
    try:
        app = create_app(
            cluster=cluster,
            store=store,
            daemons=daemons,
            hub=hub,
            start_worker=partial(start_worker, daemons, cluster, paths),
            start_courier=partial(start_courier, daemons, cluster, paths),
            ensure_filter=partial(ensure_guard, daemons, cluster, paths.instance),
            slurm=None if cluster.engine == "builtin" else _slurm_side(cluster, paths),
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


def _slurm_side(cluster: Cluster, paths: Paths) -> SlurmSide:
    api = make_api(cluster.slurm, partial(find_name, paths.state))
    return SlurmSide(api=api, find_submitter=partial(find_submitter, cluster, paths))
