"""The base of both spawners: settings, the notebook's lease, and errors for the user."""

from __future__ import annotations

import asyncio
import html
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from jupyterhub.spawner import Spawner, SpawnException
from jupyterhub.traitlets import Callable as CallableTrait
from sqlalchemy.orm import object_session
from traitlets import Instance, Unicode, default

from gpuhub.broker_api.errors import TooManyRequests
from gpuhub.broker_api.schemas import LeaseState, LeaseView
from gpuhub.common.errors import (
    BrokerUnreachable,
    Conflict,
    GpuhubError,
    ImageMissing,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Unavailable,
)
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, ProfileSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.spawners import notebook_lease, readiness
from gpuhub.spawners.progress_log import ProgressLog
from gpuhub.spawners.traits import check_values
from gpuhub.storage.homes import prepare_user
from gpuhub.web.spawn_form import IMAGE_FIELD, build_spawn_form, find_user_groups
from gpuhub.web.text import describe_holdings, describe_waiting

#: What a start may be asked for.
SPAWN_OPTIONS = ("profile", "image", "keep", "suspend")
#: Time limit for the broker to learn that a persistent notebook is stopped before its container goes, seconds.
_ANNOUNCE_S = 10.0
#: Interval between two attempts at that, seconds.
_ANNOUNCE_RETRY_S = 1.0
#: Time between SIGTERM and SIGKILL, seconds; JupyterLab ends on SIGTERM within about a second.
STOP_GRACE_S = 5


_HTTP_STATUSES: tuple[tuple[type[GpuhubError], int], ...] = (
    (TooManyRequests, 503),
    (InvalidRequest, 400),
    (TooManyRequests, 429),
    (NotAllowed, 403),
    (NotFound, 404),
    (Conflict, 409),
    (Unavailable, 503),
    (ImageMissing, 503),
)


class SpawnFailed(SpawnException):  # type: ignore[misc] # JupyterHub is untyped
    """The notebook cannot be started; `text` is shown on every page and in the response of the REST API."""

    def __init__(self, text: str, *, reason: str, status_code: int = 400) -> None:
        super().__init__(text, reason=reason, message_html=render_lines(text), status_code=status_code)
        # JupyterHub's pages and progress events read these two, and not what SpawnException has.
        self.jupyterhub_message = text
        self.jupyterhub_html_message = render_lines(text)

    @classmethod
    def from_error(cls, error: GpuhubError) -> SpawnFailed:
        """Build a failure with the same text and the matching HTTP status."""
        status = next((status for kind, status in _HTTP_STATUSES if isinstance(error, kind)), 500)
        return cls(str(error), reason=error.code, status_code=status)


def render_lines(text: str) -> str:
    """Return the escaped text as HTML with a line break after each line."""
    return "<br>".join(html.escape(line) for line in text.splitlines())


def parse_spawn_options(fields: dict[str, list[str]]) -> dict[str, str]:
    """Return the form's fields as user options: `{"profile": name}`, and those of `SPAWN_OPTIONS` that were chosen.

    The form has one choice of images for each profile that offers several, `image-NAME`; that of the profile counts.

    Raises:
        SpawnFailed: A field is unknown or given twice.
    """
    for key, values in fields.items():
        if key not in SPAWN_OPTIONS and not key.startswith(IMAGE_FIELD):
            raise SpawnFailed(
                f"The form has no field {key[:40]!r}, only {', '.join(SPAWN_OPTIONS)}.", reason="invalid-request"
            )
        if len(values) != 1:
            raise SpawnFailed(f"Exactly one {key.partition('-')[0]} can be chosen.", reason="invalid-request")
    if not fields:
        return {}
    if "profile" not in fields:
        raise SpawnFailed("Exactly one profile can be chosen.", reason="invalid-request")
    (profile,) = fields["profile"]
    images = fields.get("image") or fields.get(f"{IMAGE_FIELD}{profile}")
    options = {"profile": profile, "image": images[0]} if images else {"profile": profile}
    return options | {name: fields[name][0] for name in ("keep", "suspend") if name in fields}


def is_kept(options: Mapping[str, object]) -> bool:
    """Return whether the notebook asks again for its GPUs when its container was lost.

    Raises:
        InvalidRequest: The option has another value than yes, no, true or false.
    """
    return _parse_switch(options, "keep", default=False)


def is_suspendable(options: Mapping[str, object]) -> bool:
    """Return whether the notebook may be suspended for others while it is idle.

    Raises:
        InvalidRequest: As for `is_kept`.
    """
    return _parse_switch(options, "suspend", default=True)


def _parse_switch(options: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = options.get(name, default)
    if value not in (True, False, "yes", "no"):
        raise InvalidRequest(f"{name}: {str(value)[:40]!r} is neither yes nor no")
    return value in (True, "yes")


class LeasedSpawner(Spawner):  # type: ignore[misc] # JupyterHub is untyped
    """A spawner whose notebook runs on the node and GPUs of a lease. Subclasses define `_start` and `_remove`."""

    #: Whether the hub's process ends, which cancels all starts: the next one continues with leases and containers.
    is_hub_ending = False

    cluster = Instance(ClusterSettings, help="The settings in cluster.toml.").tag(config=True)
    instance = Unicode("gpuhub", help="The instance's name; everything made on a node carries it.").tag(config=True)
    head_address = Unicode(help="The head node's address as nodes reach it.").tag(config=True)
    make_broker = CallableTrait(help="Returns the process's one broker client.").tag(config=True)

    node = Unicode(help="The node of the notebook; empty without one.")
    lease_id = Unicode(help="The notebook's lease; empty without one.")
    profile_name = Unicode(help="The profile of this start.")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._progress_log = ProgressLog()
        self._undo_task: asyncio.Task[None] | None = None
        self._recovery_task: asyncio.Task[None] | None = None
        self._claim_task: asyncio.Task[tuple[LeaseView, bool]] | None = None
        self._is_restored = False
        self._is_watched = False
        self._keeps_lease = False
        #: The notebook asks again for its GPUs when its container was lost.
        self.is_persistent = False
        super().__init__(*args, **kwargs)
        self._default_http_timeout: int = self.http_timeout

    @default("options_form")  # type: ignore[untyped-decorator] # traitlets is untyped
    def _default_options_form(self) -> Callable[[Any], Coroutine[Any, Any, str]]:
        return build_spawn_form

    @default("options_from_form")  # type: ignore[untyped-decorator]
    def _default_options_from_form(self) -> Callable[[dict[str, list[str]]], dict[str, str]]:
        return parse_spawn_options

    @default("apply_user_options")  # type: ignore[untyped-decorator]
    def _default_apply_user_options(self) -> Callable[[Any, Any], None]:
        # `start` checks and applies the options; without this function JupyterHub warns that they have no effect.
        return lambda _spawner, _options: None

    @property
    def broker(self) -> notebook_lease.LeaseBroker:
        broker: notebook_lease.LeaseBroker = self.make_broker()
        return broker

    @property
    def will_resume(self) -> bool:
        """Return False: a server that has ended is never resumed, so JupyterHub removes its tokens."""
        return False

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = super().get_state()
        if self.lease_id:
            state |= {"lease": self.lease_id, "node": self.node, "profile": self.profile_name}
            state |= {"persistent": True} if self.is_persistent else {}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.lease_id = state.get("lease", "")
        self.node = state.get("node", "")
        self.profile_name = state.get("profile", "")
        self.is_persistent = bool(state.get("persistent", False))
        self._is_restored = bool(self.lease_id)

    def clear_state(self) -> None:
        super().clear_state()
        self.node = self.lease_id = self.profile_name = ""
        self.is_persistent = False

    def save_state(self) -> None:
        """Write the state to the database now, because JupyterHub does so only after `start` has returned."""
        self.orm_spawner.state = self.get_state()
        session = object_session(self.orm_spawner)
        if session is not None:
            session.commit()

    async def start(self) -> str:
        """Start the notebook and return the origin of its URL once it answers.

        Raises:
            SpawnFailed: The start failed, with a text for the user; everything that it created is removed.
        """
        self._progress_log = ProgressLog()
        self.http_timeout = self._default_http_timeout
        self._is_restored = self._keeps_lease = False
        try:
            check_values(self)
            origin = await self._start()
        except asyncio.CancelledError:
            # The start was stopped, or took too long. The hub does not wait for the cleanup, but `stop` does.
            if not LeasedSpawner.is_hub_ending:
                self._undo_task = asyncio.create_task(self._undo())
            raise
        except BaseExceptionGroup as group:
            raise await self._fail(group.exceptions[0]) from group
        except Exception as error:
            raise await self._fail(error) from error
        else:
            # JupyterHub's own wait follows.
            readiness.limit_wait_up(self.server, self._has_ended)
            return origin
        finally:
            self._progress_log.close()

    @abstractmethod
    async def poll(self) -> int | None:
        """Return None while the notebook runs or its state is unknown, else its exit code; 0 if it is gone."""

    @abstractmethod
    async def _start(self) -> str:
        """Perform the steps of a start and return the origin of the notebook's URL."""

    @abstractmethod
    async def _has_ended(self) -> bool:
        """Return whether the notebook is known to have ended."""

    @abstractmethod
    async def _remove(self, *, grace_s: int) -> None:
        """End the notebook if it can be reached, with `grace_s` seconds to end. Raises no GpuhubError."""

    async def log_output(self) -> None:
        """Copy the last output of a notebook that did not start to the hub's log, if it can be read."""

    async def _identify(self) -> UserIdentity:
        state = Paths(self.instance).state
        return await prepare_user(self.cluster.users, self.cluster.storage, state, self.user.name)

    def _find_groups(self) -> frozenset[str]:
        return find_user_groups(self.cluster, self.user)

    async def _claim(self, profile: ProfileSettings) -> tuple[LeaseView, bool]:
        # Shielded, so that `_undo` still gets the lease when this start is stopped during the request.
        self._claim_task = asyncio.create_task(self._request_lease(profile))
        lease, was_there = await asyncio.shield(self._claim_task)
        self.is_persistent = lease.persistent
        self.lease_id, self.profile_name = lease.id, profile.name
        self._claim_task = None
        self.save_state()
        return lease, was_there

    async def _request_lease(self, profile: ProfileSettings) -> tuple[LeaseView, bool]:
        groups = [group.name for group in self.user.orm_user.groups]
        return await notebook_lease.claim_lease(
            self.broker,
            self.user.name,
            self.name,
            profile.name,
            groups,
            persistent=is_kept(self.user_options),
            image=profile.image if self.user_options.get("image") else None,
            suspendable=is_suspendable(self.user_options),
        )

    async def release_lease(self, *, wait: bool) -> None:
        """Release the lease; with `wait`, return when its GPUs are free or after some seconds."""
        if not self.lease_id:
            return
        lease_id, self.lease_id = self.lease_id, ""
        try:
            await notebook_lease.release_lease(self.broker, lease_id, wait=wait)
        except BrokerUnreachable as error:
            self.log.warning("The broker will release lease %s when its notebook is gone: %s", lease_id, error)
        except GpuhubError as error:
            self.log.warning("Lease %s of %s: %s", lease_id, self._log_name, error)

    async def _recover_lease(self, lease_id: str, container: str) -> None:
        """Activate a restored server's lease if that is still to be done; the server may be stopped meanwhile."""
        try:
            await readiness.activate_granted(self.broker, lease_id, container)
        except GpuhubError as error:
            self.log.warning("Lease %s of %s: %s", lease_id, self._log_name, error)

    async def _report_holdings(self, lease: LeaseView, profile: ProfileSettings) -> None:
        """Tell a user whose start waits what else of theirs holds GPUs."""
        if lease.state is LeaseState.REQUESTED and profile.gpu_count:
            text = describe_holdings(await self.broker.leases(), lease, profile.models)
            if text:
                self._progress_log.add(text, percent=10)

    def _report_waiting(self, lease: LeaseView | None) -> None:
        text, html_text = describe_waiting(lease)
        self._progress_log.add(text, percent=15, html_text=html_text)

    async def _fail(self, error: BaseException) -> SpawnFailed:
        """Undo the start, and return the exception to raise instead of `error`."""
        await self.log_output()
        await self._undo()
        if isinstance(error, SpawnFailed):
            return error
        if isinstance(error, GpuhubError):
            return SpawnFailed.from_error(error)
        self.log.error("Starting %s failed", self._log_name, exc_info=error)
        return SpawnFailed(
            "The notebook could not be started because of an unexpected error. "
            "The administrator can find it in the hub's log.",
            reason="unexpected",
            status_code=500,
        )

    async def _undo(self) -> None:
        """End the notebook and release the lease, as far as broker and node answer."""
        if self._claim_task is not None:
            try:
                self.lease_id = (await self._claim_task)[0].id
            except GpuhubError as error:
                self.log.info("No lease for %s: %s", self._log_name, error)
            self._claim_task = None
        await self._announce_end()
        await self._remove(grace_s=0)
        await self.release_lease(wait=False)

    async def _announce_end(self) -> None:
        """Release a persistent notebook's lease before its container goes, which the broker would take for a loss."""
        if not (self.is_persistent and self.lease_id):
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ANNOUNCE_S
        while True:
            try:
                await notebook_lease.release_lease(self.broker, self.lease_id, wait=False)
            except BrokerUnreachable as error:
                if loop.time() < deadline:
                    await asyncio.sleep(_ANNOUNCE_RETRY_S)
                    continue
                self.log.warning("The broker may start %s again, although it is stopped: %s", self._log_name, error)
            except GpuhubError as error:
                self.log.warning("Lease %s of %s: %s", self.lease_id, self._log_name, error)
            return

    async def _await_undo(self) -> None:
        if self._undo_task is not None:
            undoing, self._undo_task = self._undo_task, None
            await undoing

    async def stop(self, now: bool = False) -> None:
        """End the notebook and release its lease; the broker ends what cannot be reached now."""
        await self._await_undo()
        await self._announce_end()
        await self._remove(grace_s=0 if now else STOP_GRACE_S)
        await self.release_lease(wait=True)

    async def run_post_stop_hook(self) -> None:
        """Remove the rest of a server that ended, however it ended, and release its lease."""
        await self._await_undo()
        if self.is_persistent and self.lease_id:
            # It ended without being stopped. The broker sees that on the node, and asks again for its GPUs.
            self.lease_id = ""
        elif not self._keeps_lease:
            await self._remove(grace_s=0)
            await self.release_lease(wait=False)
        hook = super().run_post_stop_hook()
        if hook is not None:
            await hook

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of the current start, from the first one on."""
        async for event in self._progress_log.follow():
            yield event
