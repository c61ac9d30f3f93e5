"""The broker on this machine, asked by root with the broker's own token."""

from __future__ import annotations

from gpuhub import secrets, settings
from gpuhub.broker.client import BrokerClient
from gpuhub.errors import SettingsError, SetupError
from gpuhub.nodes.head import head_address
from gpuhub.paths import Paths

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
    url = f"http://{_in_url(head_address(cluster))}:{cluster.hub.broker_port}/services/broker"
    return BrokerClient(url, secrets.read_secret(paths, secrets.BROKER_TOKEN), patience_s=_PATIENCE_S)


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
