"""GpuDockerSpawner: a JupyterHub spawner that orders the steps from a chosen profile to a running notebook."""

from __future__ import annotations

import asyncio

from gpuhub import urls
from gpuhub.broker.schemas import Lease, LeaseState
from gpuhub.containers import creation, launching, leasing, networks, restored
from gpuhub.containers.nodespawner import NodeSpawner
from gpuhub.containers.telling import describe_placing, eligible_nodes
from gpuhub.errors import GpuhubError, NodeUnreachable
from gpuhub.identity import Identity
from gpuhub.settings import Profile

#: After a restart the hub stops a notebook that does not answer within this time: long where its container runs (the
#: node may be overloaded), and days where the node cannot be reached, since notebooks live on there.
RESTORED_LIMIT_S = 600
AWAY_LIMIT_S = 7 * 86400


class GpuDockerSpawner(NodeSpawner):
    """Places each notebook on the node and GPUs that the broker leases to it."""

    async def _start(self) -> str:
        profile = launching.choose_profile(self.cluster, self.user_options)
        launching.check_server_name(self.name)
        self.image = profile.image
        self._events.tell("Asking for a place", percent=5)
        identity, network, _ = await asyncio.gather(
            self._identify(),
            networks.ensure_user_network(self.daemons, self.cluster, self.instance, self.user.name),
            self._check_image(profile),
        )
        lease, was_there = await self._claim(profile)
        running = await self._adopt(lease) if was_there and lease.nodes else None
        if running is None:
            lease = await self._renewed(lease, profile)
            running = await self._launch(lease, profile, identity, network)
        self._events.tell("JupyterLab is ready", percent=95)
        return running.origin

    async def _renewed(self, lease: Lease, profile: Profile) -> Lease:
        """A granted lease; one whose container is gone is given back, and another asked for."""
        if lease.state is LeaseState.ACTIVE:
            await self.give_back(wait=True)
            lease, _ = await self._claim(profile)
        lease = await leasing.wait_granted(self.broker, lease, self._tell_waiting)
        self.node = lease.nodes[0]
        self.save_state()
        self._events.tell(describe_placing(lease), percent=40)
        return lease

    async def _check_image(self, profile: Profile) -> None:
        candidates = eligible_nodes(await self.broker.cluster(), profile)
        await launching.check_image(self.around, profile, candidates)

    async def _launch(
        self, lease: Lease, profile: Profile, identity: Identity, network: networks.UserNetwork
    ) -> launching.Running:
        spec = launching.spec_of(
            self.around,
            lease,
            profile,
            identity,
            network,
            environment=self.get_env(),
            command=[*(self.cmd or ["jupyterhub-singleuser"]), *self.get_args()],
        )

        async def created(container: str) -> None:
            self.object_id = container
            # JupyterHub notes this when the start has ended; a hub that dies before must know how to ask.
            self.server.proto = "https" if self.internal_ssl else "http"
            self.save_state()
            await self.broker.activate(lease.id, container)

        return await launching.launch(
            self.around,
            self.node,
            spec,
            identity,
            network,
            api_path=f"{self.server.base_url}api",
            steps=launching.Steps(created=created, tell=lambda text, percent: self._events.tell(text, percent=percent)),
        )

    async def _adopt(self, lease: Lease) -> launching.Running | None:
        """Go on with the lease's container where it runs already: this hub, or an earlier one, forgot it."""
        self.node = lease.nodes[0]
        try:
            found = await launching.find_running(self.around, self.node, lease)
        except NodeUnreachable:
            # The notebook may well run there: this start fails, its lease stays.
            self.lease_id = ""
            raise
        if found is None:
            return None
        running, self.api_token = found
        self.object_id = running.container
        self.save_state()
        if lease.state is LeaseState.GRANTED:
            await self.broker.activate(lease.id, running.container)
        self.log.info("Going on with the running container of %s", self._log_name)
        return running

    async def poll(self) -> int | None:
        """None while the notebook runs or nobody can tell; else its exit code, 0 when it is gone."""
        if not self.object_id:
            # Restored with a lease and no container: this start waited when the hub was restarted. It is over, but
            # its place is kept: the broker has the hub start it anew, and that start finds the lease again.
            self._keeps_lease = self._is_restored
            return 0
        if self._is_restored and not self._is_watched and self.server is not None:
            self._is_watched = True
            restored.wait_only_while(self.server, self._is_over)
        try:
            code = await creation.exit_code(self.daemons, self.node, self.object_id)
        except GpuhubError as error:
            self.log.warning("Whether %s runs is not known: %s", self._log_name, error)
            if self._is_restored:
                self.http_timeout = AWAY_LIMIT_S
            return None
        if code is None and self._is_restored:
            self._is_restored = False
            self.http_timeout = RESTORED_LIMIT_S
            # Not waited for: the broker asks the hub who calls it, and the hub answers once this has returned.
            self._healing = asyncio.create_task(self._heal())
        return code

    async def _is_over(self) -> bool:
        """Whether the container is known to have ended."""
        try:
            return await creation.exit_code(self.daemons, self.node, self.object_id) is not None
        except GpuhubError:
            return False

    async def _heal(self) -> None:
        """A hub that died between creating a container and saying so left its lease granted."""
        try:
            await restored.activate_granted(self.broker, self.lease_id, self.object_id)
        except GpuhubError as error:
            self.log.warning("Lease %s of %s: %s", self.lease_id, self._log_name, error)

    async def get_url(self) -> str:
        """Where the notebook answers, asked from its node where this hub has not been told."""
        try:
            bindings = await self.daemons.call(self.node, "port", self.object_id, self.port)
            address, port = launching.published_address(bindings)
        except GpuhubError as error:
            self.log.info("The address of %s is as it was: %s", self._log_name, error)
            return str(self.server.url)
        # As it was started: the setting may have changed since.
        return f"{self.server.proto}://{urls.in_url(address)}:{port}{self.server.base_url}"
