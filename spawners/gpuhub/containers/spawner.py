"""GpuDockerSpawner: a JupyterHub spawner that orders the steps from a chosen profile to a running notebook."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from traitlets import default

from gpuhub import urls
from gpuhub.broker.schemas import Lease, LeaseState
from gpuhub.containers import creation, launching, leasing, networks, restored
from gpuhub.containers.form import parse_form
from gpuhub.containers.nodespawner import NodeSpawner
from gpuhub.containers.progress import ProgressLog
from gpuhub.containers.spawn_page import build_spawn_form
from gpuhub.containers.telling import describe_placing, describe_waiting, eligible_nodes
from gpuhub.containers.troubles import SpawnFailed
from gpuhub.errors import GpuhubError, NodeUnreachable
from gpuhub.identity import Identity
from gpuhub.paths import Paths
from gpuhub.settings import Profile
from gpuhub.storage.preparing import prepare_user

#: From the grant to a notebook that answers; the wait for the grant has its own limit.
START_DEADLINE_S = 120.0
#: JupyterLab ends on SIGTERM within a second or so.
STOP_GRACE_S = 5
#: After a restart the hub stops a notebook that does not answer within this time: long where its container runs (the
#: node may be overloaded), and days where the node cannot be reached, since notebooks live on there.
RESTORED_LIMIT_S = 600
AWAY_LIMIT_S = 7 * 86400


class GpuDockerSpawner(NodeSpawner):
    """Places each notebook on the node and GPUs that the broker leases to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._events = ProgressLog()
        self._undoing: asyncio.Task[None] | None = None
        self._healing: asyncio.Task[None] | None = None
        self._claiming: asyncio.Task[tuple[Lease, bool]] | None = None
        self._is_restored = False
        self._is_watched = False
        self._keeps_lease = False
        super().__init__(*args, **kwargs)
        self._usual_http_timeout: int = self.http_timeout

    @default("options_form")
    def _default_options_form(self) -> Callable[[NodeSpawner], Coroutine[Any, Any, str]]:
        return build_spawn_form

    @default("options_from_form")
    def _default_options_from_form(self) -> Callable[[dict[str, list[str]]], dict[str, str]]:
        return parse_form

    @default("apply_user_options")
    def _default_apply_user_options(self) -> Callable[[Any, Any], None]:
        # `start` checks and applies them; without this JupyterHub warns that nobody does.
        return lambda _spawner, _options: None

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what an earlier hub process knew."""
        super().load_state(state)
        self._is_restored = bool(self.lease_id)

    async def start(self) -> str:
        """Lease, container, network: the origin of the notebook's URL, which answers already.

        Raises:
            SpawnFailed: with a text for the user; container and lease are gone then.
        """
        self._events = ProgressLog()
        self.http_timeout = self._usual_http_timeout
        self._is_restored = self._keeps_lease = False
        try:
            return await self._start()
        except asyncio.CancelledError:
            # Stopped meanwhile, or too slow; the hub does not wait for this one, `stop` does.
            self._undoing = asyncio.create_task(self._undo())
            raise
        except BaseExceptionGroup as group:
            raise await self._explain(group.exceptions[0]) from group
        except Exception as error:
            raise await self._explain(error) from error
        finally:
            self._events.close()

    async def _start(self) -> str:
        profile = launching.choose_profile(self.cluster, self.user_options)
        launching.check_server_name(self.name)
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

    async def _identify(self) -> Identity:
        state = Paths(self.instance).state
        return await prepare_user(self.cluster.users, self.cluster.storage, state, self.user.name)

    async def _check_image(self, profile: Profile) -> None:
        candidates = eligible_nodes(await self.broker.cluster(), profile)
        await launching.check_image(self.around, profile, candidates)

    async def _claim(self, profile: Profile) -> tuple[Lease, bool]:
        # Shielded: when this start is stopped while the request is on its way, `_undo` still learns the lease.
        self._claiming = asyncio.create_task(self._ask_lease(profile))
        lease, was_there = await asyncio.shield(self._claiming)
        self.lease_id, self.profile_name, self.image = lease.id, profile.name, profile.image
        self._claiming = None
        self.save_state()
        return lease, was_there

    async def _ask_lease(self, profile: Profile) -> tuple[Lease, bool]:
        groups = [group.name for group in self.user.orm_user.groups]
        return await leasing.claim(self.broker, self.user.name, self.name, profile.name, groups)

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

    def _tell_waiting(self, lease: Lease | None) -> None:
        text, more_html = describe_waiting(lease)
        self._events.tell(text, percent=15, more_html=more_html)

    async def _explain(self, error: BaseException) -> SpawnFailed:
        """Undo what was done, and what to raise instead of `error`."""
        await self.log_output()
        await self._undo()
        if isinstance(error, SpawnFailed):
            return error
        if isinstance(error, GpuhubError):
            return SpawnFailed.from_error(error)
        self.log.error("Starting %s failed", self._log_name, exc_info=error)
        return SpawnFailed(
            "The notebook could not be started, for a reason that gpuhub does not know. "
            "The administrator finds it in the hub's log.",
            reason="unexpected",
            status_code=500,
        )

    async def _undo(self) -> None:
        """Remove the container and give the lease back, as far as node and broker answer."""
        if self._claiming is not None:
            try:
                self.lease_id = (await self._claiming)[0].id
            except GpuhubError as error:
                self.log.info("No lease for %s: %s", self._log_name, error)
            self._claiming = None
        await self.remove_container(grace_s=0)
        await self.give_back(wait=False)

    async def _settle(self) -> None:
        if self._undoing is not None:
            undoing, self._undoing = self._undoing, None
            await undoing

    async def stop(self, now: bool = False) -> None:
        """Remove the container and free its GPUs; what cannot be reached is left to the broker's reconciler."""
        await self._settle()
        await self.remove_container(grace_s=0 if now else STOP_GRACE_S)
        await self.give_back(wait=True)

    async def run_post_stop_hook(self) -> None:
        """Also where a server ended by itself, its container and lease go."""
        await self._settle()
        if not self._keeps_lease:
            await self.remove_container(grace_s=0)
            await self.give_back(wait=False)
        hook = super().run_post_stop_hook()
        if hook is not None:
            await hook

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

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Events of the current start; who looks later gets them all."""
        async for event in self._events.follow():
            yield event
