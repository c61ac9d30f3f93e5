"""A DockerSpawner whose container is on one of several nodes: whom it asks, what it remembers, what it holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dockerspawner import DockerSpawner
from jupyterhub.traitlets import Callable as CallableTrait
from sqlalchemy.orm import object_session
from traitlets import Instance, Unicode, default

from gpuhub import names
from gpuhub.containers import creation, launching, leasing
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.readiness import read_log
from gpuhub.errors import BrokerUnreachable, GpuhubError
from gpuhub.settings import Cluster
from gpuhub.trust import internal


class NodeSpawner(DockerSpawner):  # type: ignore[misc] # dockerspawner is untyped
    """Client and executor of the container's node; state that survives the hub; container and lease given back."""

    cluster = Instance(Cluster, help="What cluster.toml says.").tag(config=True)
    instance = Unicode("gpuhub", help="The instance's name; everything made on a node carries it.").tag(config=True)
    head_address = Unicode(help="The head node's address as containers reach it.").tag(config=True)
    make_daemons = CallableTrait(help="Returns the process's one Daemons.").tag(config=True)
    make_broker = CallableTrait(help="Returns the process's one broker client.").tag(config=True)

    node = Unicode(help="The node of the container; empty without one.")
    lease_id = Unicode(help="The notebook's lease; empty without one.")
    profile_name = Unicode(help="The profile of this start.")

    @property
    def daemons(self) -> Daemons:
        """Every node's Docker daemon."""
        found: Daemons = self.make_daemons()
        return found

    @property
    def broker(self) -> leasing.Broker:
        """The broker."""
        found: leasing.Broker = self.make_broker()
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

    @property
    def will_resume(self) -> bool:
        """Containers are never started again: JupyterHub tidies up their tokens."""
        return False

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

    def get_state(self) -> dict[str, Any]:
        """What survives a restart of the hub."""
        state: dict[str, Any] = super().get_state()
        if self.lease_id:
            state |= {"lease": self.lease_id, "node": self.node, "profile": self.profile_name}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what an earlier hub process knew."""
        super().load_state(state)
        self.lease_id = state.get("lease", "")
        self.node = state.get("node", "")
        self.profile_name = state.get("profile", "")

    def clear_state(self) -> None:
        """Forget container, node and lease."""
        super().clear_state()
        self.object_id = self.node = self.lease_id = self.profile_name = ""

    def save_state(self) -> None:
        """Write the state now: JupyterHub itself does so after `start` has returned only."""
        self.orm_spawner.state = self.get_state()
        session = object_session(self.orm_spawner)
        if session is not None:
            session.commit()

    async def remove_container(self, *, grace_s: int) -> None:
        """Remove the container where its node answers; elsewhere the broker's reconciler does it later."""
        if not self.object_id or not self.node:
            return
        try:
            await creation.remove(self.daemons, self.node, self.object_id, grace_s=grace_s)
        except GpuhubError as error:
            self.log.warning("The container of %s stays for now: %s", self._log_name, error)
        self.object_id = ""

    async def give_back(self, *, wait: bool) -> None:
        """End the lease; with `wait`, until its GPUs are free or some seconds have passed."""
        if not self.lease_id:
            return
        lease_id, self.lease_id = self.lease_id, ""
        try:
            await leasing.give_back(self.broker, lease_id, wait=wait)
        except BrokerUnreachable as error:
            self.log.warning("Lease %s ends when the broker sees its container gone: %s", lease_id, error)
        except GpuhubError as error:
            self.log.warning("Lease %s of %s: %s", lease_id, self._log_name, error)

    async def log_output(self) -> None:
        """Copy the end of the container's output to the hub's log."""
        if not self.object_id:
            return
        try:
            text = await read_log(self.daemons, self.node, self.object_id)
        except GpuhubError as error:
            text = f"(its output cannot be read: {error})"
        self.log.warning("The container of %s said last:\n%s", self._log_name, text)
