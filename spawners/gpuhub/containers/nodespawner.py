"""A DockerSpawner whose container is on one of several nodes: whom it asks, what it remembers, what it holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dockerspawner import DockerSpawner
from jupyterhub.traitlets import Callable as CallableTrait
from traitlets import default

from gpuhub import names
from gpuhub.containers import creation, launching
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.leasedspawner import LeasedSpawner
from gpuhub.containers.readiness import read_log
from gpuhub.errors import GpuhubError
from gpuhub.trust import internal


class NodeSpawner(LeasedSpawner, DockerSpawner):  # type: ignore[misc] # dockerspawner is untyped
    """Client and executor of the container's node; the container is found again, and removed."""

    make_daemons = CallableTrait(help="Returns the process's one Daemons.").tag(config=True)

    @property
    def daemons(self) -> Daemons:
        """Every node's Docker daemon."""
        found: Daemons = self.make_daemons()
        return found

    @property
    def around(self) -> launching.Surroundings:
        """What does not change from one start to the next."""
        return launching.Surroundings(
            instance=self.instance,
            cluster=self.cluster,
            daemons=self.daemons,
            head_address=self.head_address,
            certificates=Path(self.internal_certs_location) if self.internal_ssl else None,
        )

    @property
    def client(self) -> Any:
        """The client of the container's node."""
        return self.daemons.client(self.node)

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The threads of the container's node."""
        return self.daemons.executor(self.node)

    async def create_certs(self) -> dict[str, str]:
        """Where the notebook finds its certificate, which is made with its container, when its node is known."""
        return {
            "keyfile": internal.NOTEBOOK_KEY,
            "certfile": internal.NOTEBOOK_CERTIFICATE,
            "cafile": internal.NOTEBOOK_TRUST,
        }

    async def move_certs(self, paths: dict[str, str]) -> dict[str, str]:
        """They are in the container's own words already."""
        return paths

    @default("object_name")  # type: ignore[untyped-decorator] # traitlets is untyped
    def _object_name_default(self) -> str:
        return names.notebook_container(self.instance, self.user.name, self.name)

    def clear_state(self) -> None:
        """Forget the container too."""
        super().clear_state()
        self.object_id = ""

    async def _remove(self, *, grace_s: int) -> None:
        """Remove the container where its node answers; elsewhere the broker's reconciler does it later."""
        if not self.object_id or not self.node:
            return
        try:
            await creation.remove(self.daemons, self.node, self.object_id, grace_s=grace_s)
        except GpuhubError as error:
            self.log.warning("The container of %s stays for now: %s", self._log_name, error)
        self.object_id = ""

    async def log_output(self) -> None:
        """Copy the end of the container's output to the hub's log."""
        if not self.object_id:
            return
        try:
            text = await read_log(self.daemons, self.node, self.object_id)
        except GpuhubError as error:
            text = f"(its output cannot be read: {error})"
        self.log.warning("The container of %s said last:\n%s", self._log_name, text)
