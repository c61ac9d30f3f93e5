"""GpuDockerSpawner: a JupyterHub spawner that runs each notebook as a container on a leased node."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dockerspawner import DockerSpawner
from jupyterhub.traitlets import Callable as CallableTrait
from jupyterhub.utils import maybe_future
from traitlets import default

from gpuhub.broker_api.schemas import LeaseState, LeaseView
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, NodeUnreachable
from gpuhub.common.log_text import escape_output
from gpuhub.config import head_address
from gpuhub.config.settings import ProfileSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker import networks
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.containers.container_spec import ContainerSpec
from gpuhub.spawners import notebook_lease, readiness
from gpuhub.spawners.base import LeasedSpawner
from gpuhub.spawners.docker import startup
from gpuhub.spawners.docker.extra_host_config import extend_spec
from gpuhub.spawners.readiness import read_log_tail
from gpuhub.tls import internal_certificates
from gpuhub.web.text import describe_placing, eligible_nodes


class NodeSpawner(LeasedSpawner, DockerSpawner):
    """A DockerSpawner whose container is on one of several nodes."""

    make_daemons = CallableTrait(help="Returns the process's one DockerClients.").tag(config=True)

    @property
    def daemons(self) -> DockerClients:
        clients: DockerClients = self.make_daemons()
        return clients

    @property
    def spawn_context(self) -> startup.SpawnContext:
        """Return the values that all starts have in common."""
        return startup.SpawnContext(
            instance=self.instance,
            cluster=self.cluster,
            daemons=self.daemons,
            head_address=self.head_address,
            certificates=Path(self.internal_certs_location) if self.internal_ssl else None,
        )

    @property
    def client(self) -> Any:
        """Return the client of the container's node."""
        return self.daemons.client(self.node)

    @property
    def executor(self) -> ThreadPoolExecutor:
        """Return the threads of the container's node."""
        return self.daemons.executor(self.node)

    async def create_certs(self) -> dict[str, str]:
        """Return where the notebook finds its certificate, which is made with the container once its node is known."""
        return {
            "keyfile": internal_certificates.NOTEBOOK_KEY,
            "certfile": internal_certificates.NOTEBOOK_CERTIFICATE,
            "cafile": internal_certificates.NOTEBOOK_TRUST,
        }

    async def move_certs(self, paths: dict[str, str]) -> dict[str, str]:
        """Return the paths unchanged: they are paths in the container already."""
        return paths

    @default("object_name")
    def _object_name_default(self) -> str:
        return names.notebook_container_name(self.instance, self.user.name, self.name)

    def clear_state(self) -> None:
        super().clear_state()
        self.object_id = ""

    async def _remove(self, *, grace_s: int) -> None:
        """Remove the container if its node answers; otherwise the broker removes it later."""
        if not self.object_id or not self.node:
            return
        try:
            await container_lifecycle.remove_container(self.daemons, self.node, self.object_id, grace_s=grace_s)
        except GpuhubError as error:
            self.log.warning("The container of %s remains for now: %s", self._log_name, error)
        self.object_id = ""

    async def log_output(self) -> None:
        if not self.object_id:
            return
        try:
            text = await read_log_tail(self.daemons, self.node, self.object_id)
        except GpuhubError as error:
            text = f"(its output cannot be read: {error})"
        self.log.warning("Last output of the container of %s:\n%s", self._log_name, escape_output(text))


#: After a restart the hub stops a notebook that does not answer within this time, seconds. It is long if the container
#: runs (the node may be overloaded), and days if the node cannot be reached, because its notebooks continue.
RESTORED_TIMEOUT_S = 600
UNREACHABLE_TIMEOUT_S = 7 * 86400


class GpuDockerSpawner(NodeSpawner):
    """Places each notebook on the node and GPUs that the broker leases to it."""

    async def _start(self) -> str:
        profile = startup.choose_profile(
            self.cluster, self.user_options, owner=self.user.name, groups=self._find_groups()
        )
        startup.check_server_name(self.name)
        self.image = profile.image
        self._progress_log.add("Requesting resources", percent=5)
        identity, _ = await asyncio.gather(self._identify(), self._check_image(profile))
        lease, was_there = await self._claim(profile)
        running = await self._adopt(lease) if was_there and lease.nodes else None
        if running is None:
            # After the claim: the broker removes networks of owners without a lease. Meanwhile it grants.
            network = await networks.ensure_user_network(self.daemons, self.cluster, self.instance, self.user.name)
            lease = await self._obtain_grant(lease, profile)
            running = await self._start_notebook(lease, profile, identity, network)
        self._progress_log.add("JupyterLab is ready", percent=95)
        return running.origin

    async def _obtain_grant(self, lease: LeaseView, profile: ProfileSettings) -> LeaseView:
        """Return a granted lease; if the container of an active one is gone, release it and request another."""
        if lease.state is LeaseState.ACTIVE:
            await self.release_lease(wait=True)
            lease, _ = await self._claim(profile)
        await self._report_holdings(lease, profile)
        lease = await notebook_lease.wait_for_grant(self.broker, lease, self._report_waiting)
        self.node = lease.nodes[0]
        self.save_state()
        self._progress_log.add(describe_placing(lease), percent=40)
        return lease

    async def _check_image(self, profile: ProfileSettings) -> None:
        view = await self.broker.cluster(self._find_groups() & self.cluster.access_groups)
        candidates = eligible_nodes(view, profile)
        await startup.check_image(self.spawn_context, profile, candidates)

    async def _start_notebook(
        self, lease: LeaseView, profile: ProfileSettings, identity: UserIdentity, network: networks.UserNetwork
    ) -> startup.RunningNotebook:
        staged = {}
        if self.cluster.storage.stage or profile.stage:
            staged = await notebook_lease.stage_datasets(
                self.broker, lease, lambda text: self._progress_log.add(text, percent=45)
            )
        spec = startup.build_spec(
            self.spawn_context,
            lease,
            profile,
            identity,
            network,
            environment=self.get_env(),
            command=[*(self.cmd or ["jupyterhub-singleuser"]), *self.get_args()],
            groups=self._find_groups(),
            staged=staged,
        )

        spec = await self._extend_spec(spec)

        async def created(container: str) -> None:
            self.object_id = container
            # JupyterHub stores this after the start; a hub that dies before needs it to reach the notebook.
            self.server.proto = "https" if self.internal_ssl else "http"
            self.save_state()
            await self.broker.activate(lease.id, container)

        return await startup.start_notebook(
            self.spawn_context,
            self.node,
            spec,
            identity,
            network,
            api_path=f"{self.server.base_url}api",
            callbacks=startup.SpawnCallbacks(
                created=created, report=lambda text, percent: self._progress_log.add(text, percent=percent)
            ),
        )

    async def _extend_spec(self, spec: ContainerSpec) -> ContainerSpec:
        """Return the container with what an administrator adds through DockerSpawner's traits."""
        binds = self._volumes_to_binds(self.volumes, {})
        extra = self.extra_host_config
        if callable(extra):
            extra = await maybe_future(extra(self))
        return extend_spec(
            spec,
            binds=self._volumes_to_binds(self.read_only_volumes, binds, mode="ro"),
            mounts=self.mount_binds,
            extra=self._render_templates(extra),
        )

    async def _adopt(self, lease: LeaseView) -> startup.RunningNotebook | None:
        """Return the lease's container if it runs already, which this hub or an earlier one lost track of."""
        self.node = lease.nodes[0]
        try:
            running_and_token = await startup.find_running_notebook(self.spawn_context, self.node, lease)
        except NodeUnreachable:
            # The notebook may still run there, so this start fails but its lease remains.
            self.lease_id = ""
            raise
        if running_and_token is None:
            return None
        running, self.api_token = running_and_token
        self.object_id = running.container
        self.save_state()
        if lease.state is LeaseState.GRANTED:
            await self.broker.activate(lease.id, running.container)
        self.log.info("Continuing with the running container of %s", self._log_name)
        return running

    async def poll(self) -> int | None:
        if not self.object_id:
            # Restored with a lease but no container: the start was waiting when the hub was restarted. It is over, but
            # its lease remains: the broker makes the hub start the server again, and that start finds the lease.
            self._keeps_lease = self._is_restored
            return 0
        if self._is_restored and not self._is_watched and self.server is not None:
            self._is_watched = True
            readiness.limit_wait_up(self.server, self._has_ended)
        try:
            code = await container_lifecycle.read_exit_code(self.daemons, self.node, self.object_id)
        except GpuhubError as error:
            self.log.warning("The state of %s is unknown: %s", self._log_name, error)
            if self._is_restored:
                self.http_timeout = UNREACHABLE_TIMEOUT_S
            return None
        if code is None and self._is_restored:
            self._is_restored = False
            self.http_timeout = RESTORED_TIMEOUT_S
            # Not awaited: the broker asks the hub to identify its caller, and the hub answers only after this returns.
            self._recovery_task = asyncio.create_task(self._recover_lease(self.lease_id, self.object_id))
        return code

    async def _has_ended(self) -> bool:
        try:
            return await container_lifecycle.read_exit_code(self.daemons, self.node, self.object_id) is not None
        except GpuhubError:
            return False

    async def get_url(self) -> str:
        """Return the notebook's URL with the address and port that its node publishes."""
        try:
            bindings = await self.daemons.call(self.node, "port", self.object_id, self.port)
            address, port = startup.parse_published_address(bindings)
        except GpuhubError as error:
            self.log.info("The address of %s could not be read and stays the same: %s", self._log_name, error)
            return str(self.server.url)
        # With the scheme of its start, because the setting may have changed since.
        return f"{self.server.proto}://{head_address.format_host(address)}:{port}{self.server.base_url}"
