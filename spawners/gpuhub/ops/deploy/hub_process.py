"""JupyterHub as `gpuhub up` starts it: `python -m gpuhub.ops.deploy.hub_process -f jupyterhub_config.py`."""

from __future__ import annotations

import ssl
from typing import Any

from jupyterhub.app import JupyterHub


class GpuHub(JupyterHub):  # type: ignore[misc] # jupyterhub is untyped
    """JupyterHub that reaches its services with internal TLS as well."""

    async def start_service(self, service_name: str, service: Any, ssl_context: ssl.SSLContext | None = None) -> bool:
        # JupyterHub 6.1 passes the context of its server, which cannot open connections: it would wait and then
        # report that the service does not run.
        del ssl_context
        return bool(await super().start_service(service_name, service))


if __name__ == "__main__":
    GpuHub.launch_instance()
