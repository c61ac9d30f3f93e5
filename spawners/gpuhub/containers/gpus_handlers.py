"""The page of all GPUs, and leaving the queue: GET shows, POST does, all of it asked of the broker as the user."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from tornado import web

from gpuhub.broker.refusals import NotKnown, TooManyRequests
from gpuhub.broker.schemas import ClusterView, CordonRequest, Lease, LeaseState, UsageView
from gpuhub.containers import rendering
from gpuhub.containers.acting import SCOPE
from gpuhub.containers.glance import PATIENCE_S
from gpuhub.containers.gpus_page import FEW_NODES, Look, Wish, build_parts, build_runs, build_why, parse_wish
from gpuhub.containers.handlers import OurHandler
from gpuhub.errors import Conflict, GpuhubError, InvalidRequest, NotAllowed, NotFound, Unavailable

T = TypeVar("T")

_HOUR_S = 3600
_LeaseId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,64}$")]
_NodeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")]
_Reason = Annotated[str, StringConstraints(max_length=300)]


class _Act(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Extend(_Act):
    """More time for a lease."""

    do: Literal["extend"]
    lease: _LeaseId
    hours: Annotated[int, Field(ge=1, le=24 * 366)]


class Force(_Act):
    """Free a lease's GPUs without proof."""

    do: Literal["force"]
    lease: _LeaseId


class ChangeNode(_Act):
    """Cordon, drain or undrain a node."""

    do: Literal["cordon", "drain", "undrain"]
    node: _NodeName
    reason: _Reason = ""
    grace_s: Annotated[int, Field(ge=0, le=30 * 86400)] = 0


class Leave(BaseModel):
    """Wait no longer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    lease: _LeaseId


Act = Extend | Force | ChangeNode
_ACT: TypeAdapter[Act] = TypeAdapter(Annotated[Act, Field(discriminator="do")])
_LEAVE = TypeAdapter(Leave)


def parse_act(body: bytes) -> Act:
    """What a button of the page asks for: `{"do": "extend", "lease": "l0a1", "hours": 4}`.

    Raises:
        InvalidRequest: it is nothing that a button asks for.
    """
    return _parse(_ACT, body)


def parse_leave(body: bytes) -> Leave:
    """The request that is to wait no longer: `{"lease": "l0a1"}`.

    Raises:
        InvalidRequest: it is anything else.
    """
    return _parse(_LEAVE, body)


def _parse(kind: TypeAdapter[T], body: bytes) -> T:
    try:
        return kind.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(
            f"this is nothing that the page can ask for: {where or 'the body'}: {first['msg']}"
        ) from None


class UsersHandler(OurHandler):
    """A handler that asks the broker as the user."""

    def check_scope(self) -> None:
        """Refuse a token that may not use the broker itself; a browser's session may."""
        if not {SCOPE, "access:services"} & self.expanded_scopes:
            raise web.HTTPError(403)

    async def as_user(self, user: Any, ask: Callable[[Any], Awaitable[T]]) -> T:
        """The broker's answer to the user.

        Raises:
            GpuhubError: what the broker refused, or that it does not answer in time.
        """
        try:
            async with asyncio.timeout(4 * PATIENCE_S):
                try:
                    return await ask(self.broker.acting(self.tokens.of(user)))
                except NotKnown:
                    self.tokens.forget(user)
                    return await ask(self.broker.acting(self.tokens.of(user)))
        except TimeoutError:
            raise Unavailable("The GPU broker does not answer at present.") from None

    def refuse(self, error: GpuhubError) -> None:
        """Answer with the broker's words."""
        self.answer({"message": str(error)}, _status(error))

    async def look(self, user: Any) -> Look:
        """What the user sees at this moment."""
        view = await self.glance.look()
        if view is None:
            return Look(name=user.name, is_admin=user.admin, view=None)
        try:
            return await self._look_closely(user, view)
        except Unavailable:
            return Look(name=user.name, is_admin=user.admin, view=None)

    async def _look_closely(self, user: Any, view: ClusterView) -> Look:
        async def ask(broker: Any) -> tuple[list[Lease], list[UsageView], list[Lease]]:
            leases, usage = await asyncio.gather(
                broker.leases(owner=user.name), broker.usage(None if user.admin else user.name)
            )
            quarantined = await broker.leases(state=LeaseState.QUARANTINED.value) if user.admin else []
            return leases, usage, quarantined

        leases, usage, quarantined = await self.as_user(user, ask)
        return Look(name=user.name, is_admin=user.admin, view=view, leases=leases, usage=usage, quarantined=quarantined)

    def wish(self) -> Wish:
        """Which nodes the query asks for."""
        return parse_wish({name: self.get_query_argument(name) for name in self.request.query_arguments})


class GpusPageHandler(UsersHandler):
    """GET `/hub/gpus`: the page."""

    @web.authenticated
    async def get(self) -> None:
        """The page, complete; its script refreshes it."""
        self.check_scope()
        wish = self.wish()
        look = await self.look(self.current_user)
        page = await self.render_template(
            "gpuhub_gpus.html",
            parts=build_parts(look, wish),
            wish=wish,
            has_filter=look.view is not None and len(look.view.nodes) > FEW_NODES,
            style=rendering.read_style("gpuhub_gpus.css"),
            script=rendering.read_part("gpuhub_gpus.js"),
        )
        self.finish(page)


class GpusPartsHandler(UsersHandler):
    """GET: `{"parts": {name: html}}`."""

    async def get(self) -> None:
        """What has to be shown now."""
        user = self.prepare_user()
        self.check_scope()
        self.answer({"parts": build_parts(await self.look(user), self.wish())})


class WhyHandler(UsersHandler):
    """GET `?lease=ID`: `{"html": …}`, why a request waits."""

    async def get(self) -> None:
        """The broker's reasons, or its refusal."""
        user = self.prepare_user()
        self.check_scope()
        lease = self.get_query_argument("lease", "")
        try:
            why = await self.as_user(user, lambda broker: broker.why(lease))
        except GpuhubError as error:
            self.refuse(error)
            return
        self.answer({"html": build_why(why)})


class RunsHandler(UsersHandler):
    """GET `?node=NAME`: `{"html": …}`, what runs on a node, for administrators."""

    async def get(self) -> None:
        """Everybody's leases there."""
        user = self.prepare_user()
        self.check_scope()
        node = self.get_query_argument("node", "")
        try:
            if not user.admin:
                raise NotAllowed("only an administrator sees everybody's leases")
            leases = await self.as_user(user, lambda broker: broker.leases(node=node))
        except GpuhubError as error:
            self.refuse(error)
            return
        self.answer({"html": build_runs(leases, node)})


class ActHandler(UsersHandler):
    """POST: do what a button says."""

    async def post(self) -> None:
        """Answer 204, or the broker's refusal in its own words."""
        user = self.prepare_user()
        self.check_scope()
        try:
            act = parse_act(self.request.body)
            await self.as_user(user, lambda broker: do(broker, act))
        except GpuhubError as error:
            self.refuse(error)
            return
        self.set_status(204)
        self.finish()


class LeaveHandler(UsersHandler):
    """POST `{"lease": id}`: end a request that waits."""

    async def post(self) -> None:
        """Answer 204, or a refusal with one line of text."""
        user = self.prepare_user()
        self.check_scope()
        try:
            asked = parse_leave(self.request.body)
            await self.as_user(user, lambda broker: leave(broker, asked.lease))
        except GpuhubError as error:
            self.refuse(error)
            return
        self.set_status(204)
        self.finish()


async def leave(broker: Any, lease_id: str) -> None:
    """End a request that waits, and nothing else.

    Raises:
        Conflict: it does not wait.
        GpuhubError: what the broker refused.
    """
    lease = await broker.get_lease(lease_id)
    if lease.state is not LeaseState.REQUESTED:
        raise Conflict("This request does not wait any more.")
    await broker.release(lease_id)


async def do(broker: Any, act: Act) -> None:
    """Ask the broker for it.

    Raises:
        GpuhubError: what it refused.
    """
    if isinstance(act, Extend):
        await broker.extend(act.lease, act.hours * _HOUR_S)
    elif isinstance(act, Force):
        await broker.force(act.lease)
    elif act.do == "undrain":
        await broker.change_node(act.node, act.do)
    else:
        await broker.change_node(act.node, act.do, CordonRequest(reason=act.reason, grace_s=act.grace_s))


def _status(error: GpuhubError) -> int:
    kinds = ((Unavailable, 503), (TooManyRequests, 429), (NotAllowed, 403), (InvalidRequest, 400), (NotFound, 404))
    return next((status for kind, status in kinds if isinstance(error, kind)), 409)
