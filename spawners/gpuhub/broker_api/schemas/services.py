"""Wire models of services that stay."""

from __future__ import annotations

import enum

from gpuhub.broker_api.schemas.leases import WireModel


class ServiceState(enum.StrEnum):
    """What a service does."""

    STARTING = "starting"
    RUNNING = "running"
    #: It has ended, or cannot be started; it is tried again after a while.
    FAILED = "failed"
    #: Its node does not answer.
    UNREACHABLE = "unreachable"


class ServiceView(WireModel):
    """A service of the settings, for those who may use it and for administrators."""

    name: str
    #: Its address, below that of the hub.
    path: str
    node: str
    state: ServiceState
    #: Why it does not run; empty for others than administrators.
    message: str = ""
    #: How often its program was started again since the broker started.
    restarts: int = 0
