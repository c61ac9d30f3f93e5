"""JupyterHub as `gpuhub up` starts it: `python -m gpuhub.ops.deploy.hub_process -f jupyterhub_config.py`."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from jupyterhub import orm
from jupyterhub.app import JupyterHub
from jupyterhub.traitlets import Callable

from gpuhub.common.open_files import raise_open_file_limit
from gpuhub.login.access_enforcer import AccessEnforcer
from gpuhub.login.rules import ADMINISTRATOR_SCOPES
from gpuhub.spawners.base import LeasedSpawner

#: Time for the headers of a request, and for an idle connection; the proxy keeps connections open. Seconds.
IDLE_S = 75.0
#: Time for the body of a request, seconds, and its maximum size, bytes.
BODY_S = 60.0
MAX_BODY_BYTES = 4 * 1024**2


class GpuHub(JupyterHub):  # type: ignore[misc] # jupyterhub is untyped
    """JupyterHub as gpuhub needs it.

    It reaches its services with internal TLS, its administrators reach no user's server, users who may not log in any
    more lose what they have, and what starts while it ends is left as it is.
    """

    make_broker = Callable(None, allow_none=True, config=True, help="Returns the client of the GPU broker.")
    _enforcement: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        # The server has options for them, which JupyterHub does not pass on.
        limits = self.http_server.conn_params
        limits.header_timeout, limits.body_timeout, limits.max_body_size = IDLE_S, BODY_S, MAX_BODY_BYTES
        if self.make_broker is not None:
            enforcer = AccessEnforcer(users=self.users, authenticator=self.authenticator, broker=self.make_broker())
            self._enforcement = asyncio.ensure_future(enforcer.run())

    async def cleanup(self) -> None:
        # JupyterHub cancels all starts afterwards.
        LeasedSpawner.is_hub_ending = True
        await super().cleanup()

    async def init_role_creation(self) -> None:
        # JupyterHub refuses other scopes for this role in load_roles, and gives it to every user whom the authenticator
        # calls an administrator.
        await super().init_role_creation()
        orm.Role.find(self.db, "admin").scopes = list(ADMINISTRATOR_SCOPES)
        self.db.commit()

    async def start_service(self, service_name: str, service: Any, ssl_context: ssl.SSLContext | None = None) -> bool:
        # JupyterHub 6.1 passes the context of its server, which cannot open connections: it would wait and then
        # report that the service does not run.
        del ssl_context
        return bool(await super().start_service(service_name, service))


if __name__ == "__main__":
    raise_open_file_limit()
    GpuHub.launch_instance()
