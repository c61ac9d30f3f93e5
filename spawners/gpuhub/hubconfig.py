"""What jupyterhub_config.py is made of: the values that need more than reading a setting."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from gpuhub import names, settings
from gpuhub.broker.auth import ANY_OWNER_SCOPE
from gpuhub.broker.client import BrokerClient
from gpuhub.containers import acting
from gpuhub.containers.acting import Tokens
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.glance import Glance
from gpuhub.containers.gpus_handlers import ActHandler, GpusPageHandler, GpusPartsHandler, RunsHandler, WhyHandler
from gpuhub.containers.handlers import ClusterHandler, LeaveHandler
from gpuhub.errors import SettingsError
from gpuhub.nodes import head
from gpuhub.paths import DEFAULT_INSTANCE, Paths
from gpuhub.secrets import (
    ADMIN_PASSWORD,
    BROKER_TOKEN,
    PROXY_TOKEN,
    SPAWNER_TOKEN,
    USER_PASSWORD,
    read_secret,
)
from gpuhub.settings import Cluster

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
def head_address() -> str:
    """Where nodes and containers reach hub and broker."""
    return head.head_address(cluster())


def broker_origin() -> str:
    """The broker's own address, without the prefix."""
    return f"http://{head_address()}:{cluster().hub.broker_port}"


@functools.cache
def make_daemons() -> Daemons:
    """This process's one Daemons."""
    return Daemons(cluster().nodes, instance=paths().instance, run_dir=paths().run)


@functools.cache
def make_broker() -> BrokerClient:
    """This process's one broker client."""
    return BrokerClient(f"{broker_origin()}/services/{BROKER_SERVICE}", read_secret(paths(), SPAWNER_TOKEN))


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
    """Our pages under /hub/."""
    parts = {
        "make_broker": make_broker,
        "cluster": cluster(),
        "glance": Glance(lambda: make_broker().cluster()),
        "tokens": Tokens(),
    }
    return [
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


def authenticator() -> str:
    """JupyterHub's name of the authenticator for `users.login`."""
    return {"password": "shared-password", "pam": "pam"}[cluster().users.login]


def user_password() -> str | None:
    """The one password of all users, where that is how they log in."""
    return read_secret(paths(), USER_PASSWORD) if cluster().users.login == "password" else None


def admin_password() -> str | None:
    """The administrators' password, where that is how they log in."""
    return read_secret(paths(), ADMIN_PASSWORD) if cluster().users.login == "password" else None
