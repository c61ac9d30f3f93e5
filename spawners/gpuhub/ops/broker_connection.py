"""The connections of root's commands to broker and hub on this machine, with the broker's own token."""

from __future__ import annotations

from gpuhub.broker.controllers.hub_client import HubClient
from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.common import secrets
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.head_address import build_broker_url, build_hub_origin, find_head_address
from gpuhub.config.settings import ClusterSettings
from gpuhub.tls.internal_certificates import CertificateStore

#: Long enough to wait out a restart of the broker, short enough for the person at the terminal; seconds.
_RETRY_LIMIT_S = 3.0


def connect_to_broker(paths: Paths, token: str | None = None) -> AsyncBrokerClient:
    """Return a client of the instance's broker with an administrator's rights, or with those of a token.

    Raises:
        SetupError: gpuhub does not run, or the caller cannot read the broker's token.
    """
    cluster = _load_settings(paths)
    return AsyncBrokerClient(
        build_broker_url(cluster, find_head_address(cluster)),
        token or secrets.read_secret(paths, secrets.BROKER_TOKEN),
        retry_limit_s=_RETRY_LIMIT_S,
        tls=CertificateStore(paths.internal_certificates).build_broker_context() if cluster.has_internal_tls else None,
    )


def connect_to_hub(paths: Paths) -> HubClient:
    """Return a client of the instance's hub with the broker's rights.

    Raises:
        SetupError: gpuhub does not run, or the caller cannot read the broker's token.
    """
    cluster = _load_settings(paths)
    return HubClient(
        f"{build_hub_origin(cluster, find_head_address(cluster))}/hub/api",
        secrets.read_secret(paths, secrets.BROKER_TOKEN),
        tls=CertificateStore(paths.internal_certificates).build_hub_context() if cluster.has_internal_tls else None,
    )


def _load_settings(paths: Paths) -> ClusterSettings:
    if not paths.used_cluster_file.exists():
        raise SetupError("gpuhub does not run here: start it with `sudo make up`")
    try:
        return settings.load(paths.used_cluster_file)
    except SettingsError as error:
        raise SetupError(f"the settings that gpuhub runs with cannot be read: {error}") from error
