"""What both spawners share: settings, the lease they ask for, wait for and give back, and what their user reads."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from jupyterhub.spawner import Spawner
from jupyterhub.traitlets import Callable as CallableTrait
from sqlalchemy.orm import object_session
from traitlets import Instance, Unicode, default

from gpuhub.broker.schemas import Lease
from gpuhub.containers import leasing
from gpuhub.containers.form import parse_form
from gpuhub.containers.progress import ProgressLog
from gpuhub.containers.telling import describe_waiting
from gpuhub.containers.troubles import SpawnFailed
from gpuhub.errors import BrokerUnreachable, GpuhubError
from gpuhub.identity import Identity
from gpuhub.paths import Paths
from gpuhub.settings import Cluster, Profile
from gpuhub.storage.preparing import prepare_user

#: JupyterLab ends on SIGTERM within a second or so.
STOP_GRACE_S = 5


class LeasedSpawner(Spawner):  # type: ignore[misc] # JupyterHub is untyped
    """A spawner whose notebook runs where a lease says. Subclasses say how: `_start`, `_remove`."""

    cluster = Instance(Cluster, help="What cluster.toml says.").tag(config=True)
    instance = Unicode("gpuhub", help="The instance's name; everything made on a node carries it.").tag(config=True)
    head_address = Unicode(help="The head node's address as nodes reach it.").tag(config=True)
    make_broker = CallableTrait(help="Returns the process's one broker client.").tag(config=True)

    node = Unicode(help="The node of the notebook; empty without one.")
    lease_id = Unicode(help="The notebook's lease; empty without one.")
    profile_name = Unicode(help="The profile of this start.")

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

    @default("options_form")  # type: ignore[untyped-decorator] # traitlets is untyped
    def _default_options_form(self) -> Callable[[Any], Coroutine[Any, Any, str]]:
        # The form is one of a spawner's: it knows this module.
        from gpuhub.containers.spawn_page import build_spawn_form

        return build_spawn_form

    @default("options_from_form")  # type: ignore[untyped-decorator]
    def _default_options_from_form(self) -> Callable[[dict[str, list[str]]], dict[str, str]]:
        return parse_form

    @default("apply_user_options")  # type: ignore[untyped-decorator]
    def _default_apply_user_options(self) -> Callable[[Any, Any], None]:
        # `start` checks and applies them; without this JupyterHub warns that nobody does.
        return lambda _spawner, _options: None

    @property
    def broker(self) -> leasing.Broker:
        """The broker."""
        found: leasing.Broker = self.make_broker()
        return found

    @property
    def will_resume(self) -> bool:
        """What has ended is never started again: JupyterHub tidies up its tokens."""
        return False

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
        self._is_restored = bool(self.lease_id)

    def clear_state(self) -> None:
        """Forget node and lease."""
        super().clear_state()
        self.node = self.lease_id = self.profile_name = ""

    def save_state(self) -> None:
        """Write the state now: JupyterHub itself does so after `start` has returned only."""
        self.orm_spawner.state = self.get_state()
        session = object_session(self.orm_spawner)
        if session is not None:
            session.commit()

    async def start(self) -> str:
        """From the lease on: the origin of the notebook's URL, which answers already.

        Raises:
            SpawnFailed: with a text for the user; what was made, and the lease, are gone then.
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

    @abstractmethod
    async def poll(self) -> int | None:
        """None while the notebook runs or nobody can tell; else its exit code, 0 when it is gone."""

    @abstractmethod
    async def _start(self) -> str:
        """The steps of a start, and the origin of the notebook's URL."""

    @abstractmethod
    async def _remove(self, *, grace_s: int) -> None:
        """End the notebook where it can be reached, giving it `grace_s` seconds; raises no GpuhubError."""

    async def log_output(self) -> None:
        """Copy to the hub's log what a notebook that did not start said last, where that can be read."""

    async def _identify(self) -> Identity:
        state = Paths(self.instance).state
        return await prepare_user(self.cluster.users, self.cluster.storage, state, self.user.name)

    async def _claim(self, profile: Profile) -> tuple[Lease, bool]:
        # Shielded: when this start is stopped while the request is on its way, `_undo` still learns the lease.
        self._claiming = asyncio.create_task(self._ask_lease(profile))
        lease, was_there = await asyncio.shield(self._claiming)
        self.lease_id, self.profile_name = lease.id, profile.name
        self._claiming = None
        self.save_state()
        return lease, was_there

    async def _ask_lease(self, profile: Profile) -> tuple[Lease, bool]:
        groups = [group.name for group in self.user.orm_user.groups]
        return await leasing.claim(self.broker, self.user.name, self.name, profile.name, groups)

    async def give_back(self, *, wait: bool) -> None:
        """End the lease; with `wait`, until its GPUs are free or some seconds have passed."""
        if not self.lease_id:
            return
        lease_id, self.lease_id = self.lease_id, ""
        try:
            await leasing.give_back(self.broker, lease_id, wait=wait)
        except BrokerUnreachable as error:
            self.log.warning("Lease %s ends when the broker sees its notebook gone: %s", lease_id, error)
        except GpuhubError as error:
            self.log.warning("Lease %s of %s: %s", lease_id, self._log_name, error)

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
        """End the notebook and give the lease back, as far as who is asked answers."""
        if self._claiming is not None:
            try:
                self.lease_id = (await self._claiming)[0].id
            except GpuhubError as error:
                self.log.info("No lease for %s: %s", self._log_name, error)
            self._claiming = None
        await self._remove(grace_s=0)
        await self.give_back(wait=False)

    async def _settle(self) -> None:
        if self._undoing is not None:
            undoing, self._undoing = self._undoing, None
            await undoing

    async def stop(self, now: bool = False) -> None:
        """End the notebook and free its GPUs; what cannot be reached is left to the broker."""
        await self._settle()
        await self._remove(grace_s=0 if now else STOP_GRACE_S)
        await self.give_back(wait=True)

    async def run_post_stop_hook(self) -> None:
        """Also where a server ended by itself, what is left of it and its lease go."""
        await self._settle()
        if not self._keeps_lease:
            await self._remove(grace_s=0)
            await self.give_back(wait=False)
        hook = super().run_post_stop_hook()
        if hook is not None:
            await hook

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Events of the current start; who looks later gets them all."""
        async for event in self._events.follow():
            yield event
