"""JupyterHub as `gpuhub up` runs it: `python -m gpuhub.head.hub -f jupyterhub_config.py`."""

from __future__ import annotations

import ssl
from typing import Any

from jupyterhub.app import JupyterHub


class GpuHub(JupyterHub):  # type: ignore[misc] # jupyterhub is untyped
    """Finds its services with internal TLS too."""

    async def start_service(self, service_name: str, service: Any, ssl_context: ssl.SSLContext | None = None) -> bool:
        """Ask for a service without the context given: JupyterHub 6.1 gives that of its own server, with which nothing
        can be connected to, waits, and then says that the service does not run.
        """
        del ssl_context
        return bool(await super().start_service(service_name, service))


if __name__ == "__main__":
    GpuHub.launch_instance()
