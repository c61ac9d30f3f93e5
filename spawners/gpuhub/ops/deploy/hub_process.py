"""JupyterHub as `gpuhub up` starts it: `python -m gpuhub.ops.deploy.hub_process -f jupyterhub_config.py`."""

from __future__ import annotations

import ssl
from typing import Any

from jupyterhub import orm
from jupyterhub.app import JupyterHub

from gpuhub.login.rules import ADMINISTRATOR_SCOPES


class GpuHub(JupyterHub):  # type: ignore[misc] # jupyterhub is untyped
    """JupyterHub that reaches its services with internal TLS, and whose administrators reach no user's server."""

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
    GpuHub.launch_instance()
