"""What jupyterhub_config.py is made of: the values that need more than reading a setting."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpuhub import names, settings, urls
from gpuhub.batch import ports
from gpuhub.broker.auth import ANY_OWNER_SCOPE
from gpuhub.broker.client import BrokerClient
from gpuhub.containers import acting
from gpuhub.containers.acting import Tokens
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.glance import Glance
from gpuhub.containers.gpus_handlers import (
    ActHandler,
    GpusPageHandler,
    GpusPartsHandler,
    LeaveHandler,
    RunsHandler,
    WhyHandler,
)
from gpuhub.containers.handlers import ClusterHandler
from gpuhub.errors import SettingsError
from gpuhub.locks import take_lock
from gpuhub.login import values as login
from gpuhub.nodes import head
from gpuhub.paths import DEFAULT_INSTANCE, Paths
from gpuhub.secrets import (
    BROKER_TOKEN,
    PROXY_TOKEN,
    SPAWNER_TOKEN,
    read_secret,
)
from gpuhub.settings import Cluster
from gpuhub.slurm.api import SlurmApi
from gpuhub.slurm.make import make_api
from gpuhub.trust import public, renewal
from gpuhub.trust.internal import Store

BROKER_SERVICE = "broker"
SPAWNER_SERVICE = "gpuhub-spawner"
BROKER_ACCESS_SCOPE = acting.SCOPE
#: JupyterHub anchors a pattern at its beginning only.
ANCHORED_USERNAME_PATTERN = rf"(?:{names.USERNAME_PATTERN})\Z"


@functools.cache
def paths() -> Paths:
    """The instance that the environment names."""
    return Paths(os.environ.get("GPUHUB_INSTANCE", DEFAULT_INSTANCE))


@functools.cache
def cluster() -> Cluster:
    """The settings in the file that the environment names."""
    file = os.environ.get("GPUHUB_CLUSTER_FILE")
    if file is None:
        raise SettingsError("GPUHUB_CLUSTER_FILE is not set: it names the cluster.toml; `gpuhub up` sets it")
    return settings.load(Path(file))


@functools.cache
def lock() -> int:
    """This process is the instance's one hub, for as long as it lives.

    Raises:
        SetupError: another hub runs: two of them would each take the other's servers for crashed.
    """
    return take_lock(paths().state / "hub.lock", "another hub runs on this instance")


@functools.cache
def head_address() -> str:
    """Where nodes and containers reach hub and broker."""
    return head.head_address(cluster())


def broker_origin() -> str:
    """The broker's own address, without the prefix."""
    return urls.broker_origin(cluster(), head_address())


@functools.cache
def make_daemons() -> Daemons:
    """This process's one Daemons."""
    return Daemons(cluster().nodes, instance=paths().instance, run_dir=paths().run)


@functools.cache
def make_broker() -> BrokerClient:
    """This process's one broker client."""
    return BrokerClient(
        urls.broker_url(cluster(), head_address()),
        read_secret(paths(), SPAWNER_TOKEN),
        tls=Store(paths().internal_certificates).to_broker() if cluster().has_internal_tls else None,
    )


@functools.cache
def make_slurm() -> SlurmApi:
    """This process's one way to ask Slurm."""
    return make_api(cluster().slurm)


def are_notebooks_jobs() -> bool:
    """Notebooks run as Slurm jobs of their own, on nodes without Docker."""
    return not cluster().has_docker


def spawner_class() -> str:
    """What starts notebooks, by its name among JupyterHub's spawners."""
    return "gpuhub-slurm" if are_notebooks_jobs() else "gpuhub-docker"


def notebook_command() -> list[str]:
    """The notebook's program, without options."""
    command = cluster().slurm.command
    is_plain = are_notebooks_jobs() and cluster().slurm.runtime == "plain" and command is not None
    return [str(command) if is_plain else "jupyterhub-singleuser"]


def alt_names() -> list[str]:
    """By what the hub's own certificates name it, besides the loopback."""
    return list(renewal.alt_names(head_address()))


def proxy_api_url() -> str:
    """Where the proxy takes the hub's orders."""
    return f"{urls.scheme(tls=cluster().has_internal_tls)}://127.0.0.1:{cluster().hub.proxy_api_port}"


def public_url() -> str:
    """What browsers open, such as `https://gpuhub.lan`."""
    return public.public_url(cluster().hub, head_address())


def canonical_url() -> str:
    """The one address to which JupyterHub leads browsers; empty where it keeps to whatever they used."""
    url = public.canonical_url(cluster().hub, head_address())
    return f"{url}/" if url else ""


def subdomain_host() -> str:
    """Below which each user's notebooks have a name of their own; empty where they share the hub's."""
    return public.subdomain_host(cluster().hub, head_address())


def extra_routes() -> dict[str, str]:
    """Under the hub's own name too, with subdomains, is the broker: that is where gpu-launch asks for it.

    It takes tokens only, never a cookie, so that no page of a notebook can act through it.
    """
    name = urlsplit(subdomain_host()).hostname
    return {f"{name}/services/{BROKER_SERVICE}/": broker_origin()} if name else {}


def tornado_settings() -> dict[str, Any]:
    """Headers and cookies of the hub's pages, and how long a request waits for a start, seconds."""
    hub = cluster().hub
    return {
        "slow_spawn_timeout": 2,
        "headers": public.headers(hub),
        "cookie_options": public.cookie_options(hub),
    }


def proxy_token() -> str:
    """What the hub shows to the proxy."""
    return read_secret(paths(), PROXY_TOKEN)


def services() -> list[dict[str, Any]]:
    """The broker, and the spawner's own identity."""
    return [
        {
            "name": BROKER_SERVICE,
            "url": broker_origin(),
            "api_token": read_secret(paths(), BROKER_TOKEN),
            "oauth_no_confirm": True,
            "display": False,
            # While the hub waits for a service at its start, no notebook is routed.
            "timeout": 3,
        },
        {"name": SPAWNER_SERVICE, "api_token": read_secret(paths(), SPAWNER_TOKEN), "display": False},
    ]


def roles() -> list[dict[str, Any]]:
    """Who may do what: users reach the broker, the broker and the spawner reach servers."""
    return [
        {
            "name": "user",
            "description": "Everything of one's own, and the broker",
            "scopes": ["self", BROKER_ACCESS_SCOPE],
        },
        {
            "name": "gpuhub-broker",
            "description": "Ends servers whose time is up, and has starts that waited go on",
            "services": [BROKER_SERVICE],
            "scopes": ["list:users", "read:users:name", "read:servers", "servers"],
        },
        {
            "name": SPAWNER_SERVICE,
            "description": "Leases for any owner",
            "services": [SPAWNER_SERVICE],
            "scopes": [ANY_OWNER_SCOPE, BROKER_ACCESS_SCOPE],
        },
    ]


def custom_scopes() -> dict[str, dict[str, str]]:
    """The scopes that JupyterHub does not know by itself."""
    return {ANY_OWNER_SCOPE: {"description": "Ask for leases of any owner, see and end all of them"}}


def handlers() -> list[tuple[str, type, dict[str, Any]]]:
    """Our pages under /hub/, and where notebooks that are Slurm jobs report."""
    parts = {
        "make_broker": make_broker,
        "cluster": cluster(),
        "glance": Glance(lambda: make_broker().cluster()),
        "tokens": Tokens(),
    }
    of_jobs: list[tuple[str, type, dict[str, Any]]] = []
    if are_notebooks_jobs():
        of_jobs.append((ports.PATH, ports.PortHandler, {}))
    return of_jobs + [
        (path, handler, parts)
        for path, handler in (
            (r"/gpus", GpusPageHandler),
            (r"/gpuhub/gpus", GpusPartsHandler),
            (r"/gpuhub/why", WhyHandler),
            (r"/gpuhub/runs", RunsHandler),
            (r"/gpuhub/act", ActHandler),
            (r"/gpuhub/cluster", ClusterHandler),
            (r"/gpuhub/leave", LeaveHandler),
        )
    ]


def login_settings() -> dict[str, dict[str, Any]]:
    """The authenticators' classes with what each is told."""
    return login.authenticator_settings(cluster(), paths(), public_url())
