"""batchspawner's SlurmSpawner without the API handler that comes with it.

On import batchspawner adds `/api/batchspawner` to the hub, which takes whatever a server's token says of that server's
spawner. gpuhub has a handler of its own, see `ports`, and this one never reaches a hub.
"""

from __future__ import annotations

from batchspawner.api import BatchSpawnerAPIHandler
from batchspawner.batchspawner import JobStatus, SlurmSpawner
from jupyterhub.apihandlers import default_handlers

__all__ = ["JobStatus", "SlurmSpawner"]

default_handlers[:] = [handler for handler in default_handlers if BatchSpawnerAPIHandler not in handler]
