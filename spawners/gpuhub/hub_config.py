"""The values of jupyterhub_config.py that need more than reading a setting."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpuhub.backends.plugin import find_capabilities, find_plugin
from gpuhub.broker.api.auth import (
    ANY_OWNER_SCOPE,
    METRICS_SCOPE,
    METRICS_SERVICE,
    RECLAIM_SCOPE,
    SPAWNER_SERVICE,
)
from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.common import names
from gpuhub.common.errors import SettingsError
from gpuhub.common.paths import DEFAULT_INSTANCE, Paths, acquire_lock
from gpuhub.common.secrets import BROKER_TOKEN, METRICS_TOKEN, PROXY_TOKEN, SPAWNER_TOKEN, read_secret
from gpuhub.config import head_address as head
from gpuhub.config import settings
from gpuhub.config.database import build_database_url
from gpuhub.config.head_address import build_broker_origin, build_broker_url, url_scheme
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients
from gpuhub.login import kinds as login
from gpuhub.login.access_enforcer import REVOKE_SCOPE, RevokeHandler
from gpuhub.login.rules import USER_SCOPES
from gpuhub.ops.deploy import own_config
from gpuhub.slurm_client.factory import make_client
from gpuhub.slurm_client.interface import SlurmClient
from gpuhub.spawners.slurm import port
from gpuhub.tls import internal_certificates, public_access
from gpuhub.tls.internal_certificates import CertificateStore
from gpuhub.web import lab_assets
from gpuhub.web.gpus_page.actions import ActionHandler, LeaveQueueHandler
from gpuhub.web.gpus_page.event_streams import OutputStreamHandler, PageStreamHandler
from gpuhub.web.gpus_page.feeds import LiveFeeds
from gpuhub.web.gpus_page.pages import GpusPageHandler, NodeLeasesHandler, PendingReasonHandler
from gpuhub.web.handlers import BROKER_SCOPE, ClusterCaches, ClusterHandler, LaptopWheelHandler, UserTokens
from gpuhub.web.help_page import HelpPageHandler
from gpuhub.web.idle_notices import IdleNoticesHandler
from gpuhub.web.lab_assets import LabAssetsHandler
from gpuhub.web.notifications_page import DestinationsHandler, NotificationsPageHandler
from gpuhub.web.shared_jobs import SharedJobPageHandler, SharedJobStreamHandler
from gpuhub.web.shared_notebooks import (
    SharedNotebookFrameHandler,
    SharedNotebookPageHandler,
    SharedNotebookStateHandler,
)
from gpuhub.web.spawn_form import find_user_groups
from gpuhub.web.static_files import STATIC, StaticFilesHandler
from gpuhub.web.visits import JobPortHandler, ServiceHandler

BROKER_SERVICE = "broker"
CULLER_SERVICE = "gpuhub-idle-culler"
BROKER_ACCESS_SCOPE = BROKER_SCOPE
#: JupyterHub anchors a pattern at its beginning only.
ANCHORED_USERNAME_PATTERN = rf"(?:{names.USERNAME_PATTERN})\Z"


@functools.cache
def paths() -> Paths:
    """Return the paths of the instance that the environment names."""
    return Paths(os.environ.get("GPUHUB_INSTANCE", DEFAULT_INSTANCE))


@functools.cache
def cluster() -> ClusterSettings:
    """Return the settings in the file that the environment names."""
    file = os.environ.get("GPUHUB_CLUSTER_FILE")
    if file is None:
        raise SettingsError("GPUHUB_CLUSTER_FILE is not set: it names the cluster.toml; `gpuhub up` sets it")
    return settings.load(Path(file))


@functools.cache
def lock() -> int:
    """Make this process the only hub of the instance until it ends.

    Raises:
        SetupError: Another hub runs: each of two hubs would take the other's servers for crashed.
    """
    return acquire_lock(paths().state / "hub.lock", "another hub runs on this instance")


@functools.cache
def head_address() -> str:
    """Return the address of hub and broker for nodes and containers."""
    return head.find_head_address(cluster())


def broker_origin() -> str:
    """Return the broker's address without the prefix of its path."""
    return build_broker_origin(cluster(), head_address())


@functools.cache
def make_daemons() -> DockerClients:
    """Return the Docker clients of this process."""
    return DockerClients(cluster().nodes, instance=paths().instance, run_dir=paths().run)


@functools.cache
def make_broker() -> AsyncBrokerClient:
    """Return the broker client of this process."""
    return AsyncBrokerClient(
        build_broker_url(cluster(), head_address()),
        read_secret(paths(), SPAWNER_TOKEN),
        tls=CertificateStore(paths().internal_certificates).build_broker_context()
        if cluster().has_internal_tls
        else None,
    )


@functools.cache
def make_slurm() -> SlurmClient:
    """Return the Slurm client of this process."""
    return make_client(cluster().slurm)


def are_notebooks_jobs() -> bool:
    """Return whether notebooks are jobs of the scheduling backend, on nodes without Docker."""
    return not find_capabilities(cluster()).containers


def spawner_class() -> str:
    """Return the spawner's name in the entry points of JupyterHub."""
    return find_plugin(cluster()).spawner_class(cluster())


def load_spawner_class() -> type[Any]:
    """Return the class that starts notebooks."""
    (entry_point,) = entry_points(group="jupyterhub.spawners", name=spawner_class())
    loaded: type[Any] = entry_point.load()
    return loaded


def notebook_command() -> list[str]:
    """Return the notebook's program, without options."""
    return find_plugin(cluster()).notebook_command(cluster())


def alt_names() -> list[str]:
    """Return the names in the hub's internal certificates in addition to the loopback."""
    return list(internal_certificates.build_alt_names(head_address()))


def proxy_api_url() -> str:
    """Return the address of the proxy's API."""
    return f"{url_scheme(tls=cluster().has_internal_tls)}://127.0.0.1:{cluster().hub.proxy_api_port}"


def database_url() -> str:
    """Return SQLAlchemy's URL of the hub's database; a password is in a file that it names."""
    return build_database_url(cluster().database, paths(), "hub")


def public_url() -> str:
    """Return the hub's address for browsers, such as `https://gpuhub.lan`."""
    return public_access.build_public_url(cluster().hub, head_address())


def canonical_url() -> str:
    """Return the one address to which JupyterHub redirects browsers; empty where it keeps the one they used."""
    url = public_access.build_canonical_url(cluster().hub, head_address())
    return f"{url}/" if url else ""


def subdomain_host() -> str:
    """Return the domain with a subdomain for each user's notebooks; empty where they share the hub's name."""
    return public_access.build_subdomain_host(cluster().hub, head_address())


def extra_routes() -> dict[str, str]:
    """Return the proxy's routes to the broker in addition to JupyterHub's own: those of services that stay, and with
    subdomains the one under the hub's name, which gpu-launch uses.

    The broker accepts only tokens and never a cookie, so that pages of notebooks cannot use these routes.
    """
    host = urlsplit(subdomain_host()).hostname or ""
    routed = [service.name for service in cluster().services] + ([BROKER_SERVICE] if host else [])
    return {f"{host}/services/{name}/": broker_origin() for name in routed}


def service_links(user: Any) -> list[dict[str, str]]:
    """Return name and address of the services that the hub's `user` may use, for the menu; JupyterHub calls it."""
    if not user:
        return []
    groups = find_user_groups(cluster(), user)
    return [
        {"name": service.name, "href": f"/services/{service.name}/"}
        for service in cluster().services
        if service.admits(user.name, groups)
    ]


def check_service_names(hub_services: Iterable[Mapping[str, Any]]) -> None:
    """Check that JupyterHub's own services, also those of an administrator, have other names than services that stay.

    Raises:
        SettingsError: Two have the same name, and with it the same address.
    """
    taken = {service.name for service in cluster().services} & {str(one.get("name")) for one in hub_services}
    if taken:
        raise SettingsError(
            f"services: {', '.join(sorted(taken))}: {own_config.FOLDER} has a service of that name: choose another one"
        )


def tornado_settings() -> dict[str, Any]:
    """Return headers and cookies of the hub's pages, and the longest wait of a request for a start, seconds."""
    hub = cluster().hub
    return {
        "slow_spawn_timeout": 2,
        "headers": public_access.build_headers(hub),
        "cookie_options": public_access.build_cookie_options(hub),
    }


def proxy_token() -> str:
    """Return the token of the hub for the proxy's API."""
    return read_secret(paths(), PROXY_TOKEN)


def services() -> list[dict[str, Any]]:
    """Return JupyterHub's services: broker, spawner and Prometheus, and the culler where it is used."""
    return [
        {
            "name": BROKER_SERVICE,
            "url": broker_origin(),
            "api_token": read_secret(paths(), BROKER_TOKEN),
            "oauth_no_confirm": True,
            "display": False,
            # The hub routes no notebooks while it waits for a service at its start.
            "timeout": 3,
        },
        {"name": SPAWNER_SERVICE, "api_token": read_secret(paths(), SPAWNER_TOKEN), "display": False},
        {"name": METRICS_SERVICE, "api_token": read_secret(paths(), METRICS_TOKEN), "display": False},
        *([_culler_service()] if cluster().stops_idle_notebooks else []),
    ]


def _culler_service() -> dict[str, Any]:
    """Return the service that stops idle notebooks, which the hub starts and gives a token at each of its starts."""
    environment = {"GPUHUB_BROKER_URL": build_broker_url(cluster(), head_address())}
    if cluster().has_internal_tls:
        environment["GPUHUB_INTERNAL_CERTIFICATES"] = str(paths().internal_certificates)
    return {
        "name": CULLER_SERVICE,
        "command": [sys.executable, "-m", "gpuhub.culler"],
        "environment": environment,
        "display": False,
    }


def roles() -> list[dict[str, Any]]:
    """Return the roles: users may use the broker, and the broker and the spawner may use servers."""
    return [
        {
            "name": "user",
            "description": "Everything of one's own, and the broker",
            "scopes": ["self", BROKER_ACCESS_SCOPE],
        },
        {
            "name": "gpuhub-broker",
            "description": "Ends servers whose time is up, continues starts that waited, and revokes tokens",
            "services": [BROKER_SERVICE],
            "scopes": ["list:users", "read:users:name", "read:servers", "servers", REVOKE_SCOPE],
        },
        {
            "name": SPAWNER_SERVICE,
            "description": "Leases for any owner",
            "services": [SPAWNER_SERVICE],
            "scopes": [ANY_OWNER_SCOPE, BROKER_ACCESS_SCOPE],
        },
        {
            "name": METRICS_SERVICE,
            "description": "Reads the metrics of hub and broker",
            "services": [METRICS_SERVICE],
            "scopes": [METRICS_SCOPE],
        },
        *([_culler_role()] if cluster().stops_idle_notebooks else []),
    ]


def _culler_role() -> dict[str, Any]:
    return {
        "name": CULLER_SERVICE,
        "description": "Stops idle notebooks that the broker names",
        "services": [CULLER_SERVICE],
        "scopes": [
            "list:users",
            "read:users:name",
            "read:servers",
            "delete:servers",
            BROKER_ACCESS_SCOPE,
            RECLAIM_SCOPE,
        ],
    }


def custom_scopes() -> dict[str, dict[str, str]]:
    """Return the scopes that gpuhub defines."""
    return {
        ANY_OWNER_SCOPE: {"description": "Ask for leases of any owner, see and end all of them"},
        REVOKE_SCOPE: {"description": "Revoke all tokens and sessions of a user"},
        RECLAIM_SCOPE: {"description": "Ask which idle notebooks to stop"},
    } | USER_SCOPES


def handlers() -> list[tuple[str, type, dict[str, Any]]]:
    """Return gpuhub's handlers below /hub/; notebooks that are Slurm jobs report to one of them."""
    user_tokens = UserTokens()
    parts: dict[str, Any] = {
        "make_broker": make_broker,
        "cluster": cluster(),
        "cluster_caches": ClusterCaches(cluster(), lambda groups: make_broker().cluster(groups)),
        "user_tokens": user_tokens,
    }
    streaming = parts | {"feeds": LiveFeeds(cluster(), make_broker, user_tokens)}
    others: list[tuple[str, type, dict[str, Any]]] = [
        (LaptopWheelHandler.PATH, LaptopWheelHandler, {"path": str(paths().laptop_wheel)}),
        (LabAssetsHandler.PATH, LabAssetsHandler, {"path": str(paths().lab_assets)}),
        (StaticFilesHandler.PATH, StaticFilesHandler, {"path": str(STATIC)}),
        (RevokeHandler.PATH, RevokeHandler, {}),
    ]
    if are_notebooks_jobs():
        others.append((port.PATH, port.PortHandler, {}))
    others += [
        (path, handler, streaming)
        for path, handler in (
            (r"/gpuhub/stream", PageStreamHandler),
            (r"/gpuhub/output", OutputStreamHandler),
            (r"/gpuhub/shared-stream", SharedJobStreamHandler),
        )
    ]
    return others + [
        (path, handler, parts)
        for path, handler in (
            (r"/gpus", GpusPageHandler),
            (r"/gpuhub/why", PendingReasonHandler),
            (r"/gpuhub/runs", NodeLeasesHandler),
            (r"/gpuhub/act", ActionHandler),
            (r"/gpuhub/idle", IdleNoticesHandler),
            (r"/gpuhub/cluster", ClusterHandler),
            (r"/gpuhub/leave", LeaveQueueHandler),
            (r"/notifications", NotificationsPageHandler),
            (r"/gpuhub/notifications", DestinationsHandler),
            (JobPortHandler.PATH, JobPortHandler),
            (SharedJobPageHandler.PATH, SharedJobPageHandler),
            (SharedNotebookPageHandler.PATH, SharedNotebookPageHandler),
            (SharedNotebookStateHandler.PATH, SharedNotebookStateHandler),
            (SharedNotebookFrameHandler.PATH, SharedNotebookFrameHandler),
            (ServiceHandler.PATH, ServiceHandler),
            (HelpPageHandler.PATH, HelpPageHandler),
        )
    ]


def notebook_environment() -> dict[str, Callable[[Any], str]]:
    """Return variables of notebooks, as functions of their spawner."""
    return {
        lab_assets.URL_VARIABLE: lambda _spawner: lab_variables()[lab_assets.URL_VARIABLE],
        lab_assets.EXTENSIONS_VARIABLE: lambda _spawner: lab_variables()[lab_assets.EXTENSIONS_VARIABLE],
    }


def lab_variables() -> dict[str, str]:
    """Return where browsers find JupyterLab's files; empty where each notebook's own server has to send them.

    With subdomains they would come from another site, which fonts must not.
    """
    variables = lab_assets.build_notebook_variables(paths().lab_assets)
    return dict.fromkeys(variables, "") if subdomain_host() else variables


def lab_first_urls(user: Any) -> list[str]:
    """Return the addresses of files that a user's browser fetches while a notebook starts; JupyterHub calls it."""
    return lab_assets.list_first_urls(paths().lab_assets) if user and not subdomain_host() else []


def login_settings() -> dict[str, dict[str, Any]]:
    """Return the traits of each of the authenticator's classes."""
    return login.build_authenticator_settings(cluster(), paths(), public_url())
