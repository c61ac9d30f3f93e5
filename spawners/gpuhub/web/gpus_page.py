"""The page of all GPUs: its nodes and parts, which gpuhub_gpus.js refreshes, and the handlers of page and actions.

The handlers call the broker with a token of the user.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from tornado import web

from gpuhub.broker_api.errors import NotKnown, TooManyRequests
from gpuhub.broker_api.schemas import (
    ClusterView,
    CordonRequest,
    GpuState,
    LeaseState,
    LeaseView,
    NodeState,
    NodeView,
    PendingReasonView,
    QueueEntry,
    UsageView,
)
from gpuhub.common.errors import (
    Conflict,
    GpuhubError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Unavailable,
)
from gpuhub.web.handlers import BROKER_SCOPE, BROKER_TIMEOUT_S, GpuhubHandler
from gpuhub.web.template_loader import load_macros, read_asset, read_style
from gpuhub.web.text import count_totals, is_held_by_external_job

#: Nodes on one page, and number of nodes up to which the page has no filter.
NODES_PER_PAGE = 40
MAX_NODES_WITHOUT_FILTER = 8
#: Entries that are shown from the beginning of the queue; the user's own requests are always shown.
MAX_QUEUE_ENTRIES = 12
NodeFilterKind = Literal["all", "free", "mine", "trouble"]
_HEALTHY_STATES = (GpuState.FREE, GpuState.HELD)
T = TypeVar("T")
_HOUR_S = 3600
_LeaseId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,64}$")]
_NodeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")]
_Reason = Annotated[str, StringConstraints(max_length=300)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFilter:
    """The filter of the nodes, from the page's query."""

    show: NodeFilterKind = "all"
    #: Part of the name of a node, model or holder.
    find: str = ""
    page: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePage:
    """One page of the nodes that match the filter."""

    nodes: Sequence[NodeView]
    fitting: int
    page: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusPageData:
    """Data of the page for one user; `view` is None while the broker does not answer."""

    name: str
    is_admin: bool
    view: ClusterView | None
    #: The user's leases that have not ended.
    leases: Sequence[LeaseView] = ()
    #: The user's usage; for an administrator all users' usage.
    usage: Sequence[UsageView] = ()
    #: For an administrator: quarantined leases, which only proof or an administrator can end.
    quarantined: Sequence[LeaseView] = ()


def parse_node_filter(arguments: Mapping[str, str]) -> NodeFilter:
    """Parse a query such as `show=mine&find=rig&page=2`; unknown values are ignored."""
    show, page = arguments.get("show", "all"), arguments.get("page", "1")
    return NodeFilter(
        show=next((kind for kind in get_args(NodeFilterKind) if kind == show), "all"),
        find=arguments.get("find", "").strip().casefold()[:64],
        page=int(page) if page.isdecimal() and len(page) < 6 else 1,
    )


def select_nodes(nodes: Sequence[NodeView], node_filter: NodeFilter, name: str) -> NodePage:
    """Return one page of the nodes that match the filter; `name` is the user's."""
    fitting = [node for node in nodes if _matches(node, node_filter, name)]
    pages = max(1, -(-len(fitting) // NODES_PER_PAGE))
    page = min(max(node_filter.page, 1), pages)
    shown = fitting[(page - 1) * NODES_PER_PAGE : page * NODES_PER_PAGE]
    return NodePage(nodes=shown, fitting=len(fitting), page=page, pages=pages)


def _matches(node: NodeView, node_filter: NodeFilter, name: str) -> bool:
    if node_filter.show == "free" and not any(gpu.state is GpuState.FREE for gpu in node.gpus):
        return False
    if node_filter.show == "mine" and not any(holder.owner == name for gpu in node.gpus for holder in gpu.holders):
        return False
    if node_filter.show == "trouble" and not needs_attention(node):
        return False
    return not node_filter.find or any(node_filter.find in text.casefold() for text in _searchable_texts(node))


def needs_attention(node: NodeView) -> bool:
    """Return whether an administrator should check the node."""
    is_well = node.state is NodeState.UP and node.message is None
    return not is_well or any(
        gpu.state not in _HEALTHY_STATES and not is_held_by_external_job(gpu) for gpu in node.gpus
    )


def _searchable_texts(node: NodeView) -> list[str]:
    owners = [holder.owner for gpu in node.gpus for holder in gpu.holders]
    return [node.name, node.rack or "", node.switch or "", *(gpu.model for gpu in node.gpus), *owners]


def render_parts(data: GpusPageData, node_filter: NodeFilter) -> dict[str, str]:
    """Render the parts of the page, by their `data-gpuhub-part`."""
    macros = load_macros("gpuhub_gpus_parts.html")
    view = data.view
    if view is None:
        parts = dict.fromkeys(("totals", "own", "nodes", "queue", "partitions", "reservations", "admin"), "")
        return {**parts, "problem": str(macros.problem())}
    return {
        "problem": "",
        "totals": str(macros.totals(count_totals(view))),
        "own": str(macros.own(data, next((usage for usage in data.usage if usage.owner == data.name), None))),
        "nodes": str(macros.nodes(select_nodes(view.nodes, node_filter, data.name), data)),
        "queue": str(macros.queue(select_queue_entries(data, view), view.waiting, data)),
        "partitions": str(macros.partitions(view.partitions)),
        "reservations": str(macros.reservations(view.reservations, view.now)),
        "admin": str(macros.admin(data)) if data.is_admin else "",
    }


def select_queue_entries(data: GpusPageData, view: ClusterView) -> list[QueueEntry]:
    """Return the beginning of the queue and all of the user's own requests."""
    entries = [entry for entry in view.queue if entry.position <= MAX_QUEUE_ENTRIES or entry.owner == data.name]
    listed = {entry.lease for entry in entries}
    others = [lease for lease in data.leases if lease.position is not None and lease.id not in listed]
    return entries + [
        QueueEntry(
            lease=lease.id,
            position=lease.position or 0,
            owner=lease.owner,
            purpose=lease.purpose,
            wants=f"profile {lease.profile}" if lease.profile else "the GPUs of a job",
            since=lease.created_at,
            expected_start=lease.expected_start,
        )
        for lease in sorted(others, key=lambda lease: lease.position or 0)
    ]


def render_pending_reason(why: PendingReasonView) -> str:
    """Render the reasons why a request waits, which unfold below it."""
    return str(load_macros("gpuhub_gpus_parts.html").why(why))


def render_node_leases(leases: Sequence[LeaseView], node: str) -> str:
    """Render the leases on a node, which are shown before it is drained."""
    return str(load_macros("gpuhub_gpus_parts.html").runs(leases, node))


class _PageAction(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ExtendAction(_PageAction):
    """Extends a lease."""

    do: Literal["extend"]
    lease: _LeaseId
    hours: Annotated[int, Field(ge=1, le=24 * 366)]


class ForceAction(_PageAction):
    """Releases a lease's GPUs without proof."""

    do: Literal["force"]
    lease: _LeaseId


class ChangeNodeAction(_PageAction):
    """Cordons, drains or undrains a node."""

    do: Literal["cordon", "drain", "undrain"]
    node: _NodeName
    reason: _Reason = ""
    grace_s: Annotated[int, Field(ge=0, le=30 * 86400)] = 0


class LeaveQueueRequest(BaseModel):
    """Removes a request from the queue."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    lease: _LeaseId


class KeepAction(_PageAction):
    """Keeps an idle notebook."""

    do: Literal["keep"]
    lease: _LeaseId


PageAction = ExtendAction | ForceAction | KeepAction | ChangeNodeAction


_ACTION_ADAPTER: TypeAdapter[PageAction] = TypeAdapter(Annotated[PageAction, Field(discriminator="do")])


_LEAVE_ADAPTER = TypeAdapter(LeaveQueueRequest)


def parse_action(body: bytes) -> PageAction:
    """Parse an action of the page, such as `{"do": "extend", "lease": "l0a1", "hours": 4}`.

    Raises:
        InvalidRequest: It is not a valid action.
    """
    return _parse(_ACTION_ADAPTER, body)


def parse_leave_request(body: bytes) -> LeaveQueueRequest:
    """Parse a request to leave the queue: `{"lease": "l0a1"}`.

    Raises:
        InvalidRequest: It is not of this form.
    """
    return _parse(_LEAVE_ADAPTER, body)


def _parse(kind: TypeAdapter[T], body: bytes) -> T:
    try:
        return kind.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(
            f"this is not a valid request of the page: {where or 'the body'}: {first['msg']}"
        ) from None


class BrokerUserHandler(GpuhubHandler):
    """Base of the handlers that call the broker as the user."""

    def check_scope(self) -> None:
        """Refuse a token without access to the broker; a browser's session has it."""
        if not {BROKER_SCOPE, "access:services"} & self.expanded_scopes:
            raise web.HTTPError(403)

    async def call_as_user(self, user: Any, ask: Callable[[Any], Awaitable[T]]) -> T:
        """Call the broker with the user's token and return the result.

        Raises:
            GpuhubError: The broker refuses or does not answer in time.
        """
        try:
            async with asyncio.timeout(4 * BROKER_TIMEOUT_S):
                try:
                    return await ask(self.broker.acting(self.user_tokens.get(user)))
                except NotKnown:
                    self.user_tokens.forget(user)
                    return await ask(self.broker.acting(self.user_tokens.get(user)))
        except TimeoutError:
            raise Unavailable("The GPU broker does not answer. Try again later.") from None

    def finish_error(self, error: GpuhubError) -> None:
        """Send the error's text with its HTTP status."""
        self.finish_json({"message": str(error)}, _http_status(error))

    async def load_page_data(self, user: Any) -> GpusPageData:
        """Return the page's current data for the user."""
        view = await self.cluster_caches.get(user)
        if view is None:
            return GpusPageData(name=user.name, is_admin=user.admin, view=None)
        try:
            return await self._load_user_data(user, view)
        except (Unavailable, TooManyRequests):
            return GpusPageData(name=user.name, is_admin=user.admin, view=None)

    async def _load_user_data(self, user: Any, view: ClusterView) -> GpusPageData:
        async def ask(broker: Any) -> tuple[list[LeaseView], list[UsageView], list[LeaseView]]:
            leases, usage = await asyncio.gather(
                broker.leases(owner=user.name), broker.usage(None if user.admin else user.name)
            )
            quarantined = await broker.leases(state=LeaseState.QUARANTINED.value) if user.admin else []
            return leases, usage, quarantined

        leases, usage, quarantined = await self.call_as_user(user, ask)
        return GpusPageData(
            name=user.name, is_admin=user.admin, view=view, leases=leases, usage=usage, quarantined=quarantined
        )

    def node_filter(self) -> NodeFilter:
        """Return the filter of the query."""
        return parse_node_filter({name: self.get_query_argument(name) for name in self.request.query_arguments})


class GpusPageHandler(BrokerUserHandler):
    """GET `/hub/gpus`: the page."""

    @web.authenticated
    async def get(self) -> None:
        """Send the complete page, which its script refreshes."""
        self.check_scope()
        node_filter = self.node_filter()
        data = await self.load_page_data(self.current_user)
        page = await self.render_template(
            "gpuhub_gpus.html",
            parts=render_parts(data, node_filter),
            node_filter=node_filter,
            has_filter=data.view is not None and len(data.view.nodes) > MAX_NODES_WITHOUT_FILTER,
            style=read_style("gpuhub_gpus.css"),
            script=read_asset("gpuhub_gpus.js"),
        )
        self.finish(page)


class GpusPartsHandler(BrokerUserHandler):
    """GET: `{"parts": {name: html}}`."""

    async def get(self) -> None:
        """Send the current parts."""
        user = self.require_user()
        self.check_scope()
        self.finish_json({"parts": render_parts(await self.load_page_data(user), self.node_filter())})


class PendingReasonHandler(BrokerUserHandler):
    """GET `?lease=ID`: `{"html": …}`, why a request waits."""

    async def get(self) -> None:
        """Send the broker's reasons or its refusal."""
        user = self.require_user()
        self.check_scope()
        lease = self.get_query_argument("lease", "")
        try:
            why = await self.call_as_user(user, lambda broker: broker.why(lease))
        except GpuhubError as error:
            self.finish_error(error)
            return
        self.finish_json({"html": render_pending_reason(why)})


class NodeLeasesHandler(BrokerUserHandler):
    """GET `?node=NAME`: `{"html": …}`, what runs on a node, for administrators."""

    async def get(self) -> None:
        """Send the leases of all users on the node."""
        user = self.require_user()
        self.check_scope()
        node = self.get_query_argument("node", "")
        try:
            if not user.admin:
                raise NotAllowed("only an administrator sees the leases of all users")
            leases = await self.call_as_user(user, lambda broker: broker.leases(node=node))
        except GpuhubError as error:
            self.finish_error(error)
            return
        self.finish_json({"html": render_node_leases(leases, node)})


class ActionHandler(BrokerUserHandler):
    """POST: perform an action of the page."""

    async def post(self) -> None:
        """Answer 204, or send the broker's refusal."""
        user = self.require_user()
        self.check_scope()
        try:
            act = parse_action(self.request.body)
            await self.call_as_user(user, lambda broker: perform_action(broker, act))
        except GpuhubError as error:
            self.finish_error(error)
            return
        self.set_status(204)
        self.finish()


class LeaveQueueHandler(BrokerUserHandler):
    """POST `{"lease": id}`: end a request that waits."""

    async def post(self) -> None:
        """Answer 204, or send a refusal with one line of text."""
        user = self.require_user()
        self.check_scope()
        try:
            request = parse_leave_request(self.request.body)
            await self.call_as_user(user, lambda broker: leave_queue(broker, request.lease))
        except GpuhubError as error:
            self.finish_error(error)
            return
        self.set_status(204)
        self.finish()


async def leave_queue(broker: Any, lease_id: str) -> None:
    """Remove a waiting request from the queue.

    Raises:
        Conflict: The request no longer waits.
        GpuhubError: The broker refuses.
    """
    lease = await broker.get_lease(lease_id)
    if lease.state is not LeaseState.REQUESTED:
        raise Conflict("This request is no longer in the queue.")
    await broker.release(lease_id)


async def perform_action(broker: Any, action: PageAction) -> None:
    """Perform an action through the broker.

    Raises:
        GpuhubError: The broker refuses.
    """
    if isinstance(action, ExtendAction):
        await broker.extend(action.lease, action.hours * _HOUR_S)
    elif isinstance(action, ForceAction):
        await broker.force(action.lease)
    elif isinstance(action, KeepAction):
        await broker.keep(action.lease)
    elif action.do == "undrain":
        await broker.change_node(action.node, action.do)
    else:
        await broker.change_node(action.node, action.do, CordonRequest(reason=action.reason, grace_s=action.grace_s))


def _http_status(error: GpuhubError) -> int:
    kinds = ((Unavailable, 503), (TooManyRequests, 503), (NotAllowed, 403), (InvalidRequest, 400), (NotFound, 404))
    return next((status for kind, status in kinds if isinstance(error, kind)), 409)
