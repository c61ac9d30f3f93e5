"""The broker on this machine, asked by root with the broker's own token."""

from __future__ import annotations

from gpuhub import secrets, settings, urls
from gpuhub.broker.client import BrokerClient
from gpuhub.errors import SettingsError, SetupError
from gpuhub.nodes.head import head_address
from gpuhub.paths import Paths
from gpuhub.trust.internal import Store

#: Somebody waits at the terminal: a restart of the broker is waited out, an outage is told, seconds.
_PATIENCE_S = 3.0


def open_broker(paths: Paths) -> BrokerClient:
    """A client of the instance's broker, with an administrator's rights.

    Raises:
        SetupError: nothing runs, or the caller cannot read the broker's token.
    """
    if not paths.used_cluster_file.exists():
        raise SetupError("gpuhub does not run here: start it with `sudo make up`")
    try:
        cluster = settings.load(paths.used_cluster_file)
    except SettingsError as error:
        raise SetupError(f"the settings that gpuhub runs with cannot be read: {error}") from error
    return BrokerClient(
        urls.broker_url(cluster, head_address(cluster)),
        secrets.read_secret(paths, secrets.BROKER_TOKEN),
        patience_s=_PATIENCE_S,
        tls=Store(paths.internal_certificates).to_broker() if cluster.has_internal_tls else None,
    )
