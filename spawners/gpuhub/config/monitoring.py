"""`[monitoring]` in cluster.toml: the Prometheus that `make up MONITORING=1` starts on the head node."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from gpuhub.common.units import Size, Span
from gpuhub.config.base import Port, SettingsTable
from gpuhub.config.machines.network import HubSettings


class MonitoringSettings(SettingsTable):
    """Port, retention and alerts of Prometheus on the head node."""

    #: TCP port of Prometheus, on loopback.
    port: Port = 9090
    #: Time for which metrics are kept, seconds.
    retention: Span = 30 * 86400
    #: Maximum size of all metrics, bytes; the oldest are removed first.
    max_size: Size = 4 * 1024**3
    #: Address of an Alertmanager that gets the alerts; None: alerts are only shown on Prometheus' own page.
    alertmanager: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]+:[0-9]{1,5}$")] | None = None


def find_port_mistakes(monitoring: MonitoringSettings, hub: HubSettings) -> list[str]:
    """Return a line for each port of the hub that Prometheus would use as well."""
    keys = ("port", "api_port", "broker_port", "proxy_api_port")
    return [
        f"monitoring.port: {monitoring.port} is hub.{key} already: choose another one"
        for key in keys
        if getattr(hub, key) == monitoring.port
    ]
