"""Actions of the page: what its buttons send, and the handlers that pass it to the broker as the user."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from gpuhub.broker_api.schemas import CordonRequest, LeaseState, Purpose
from gpuhub.broker_api.schemas.limits import UserLimitsRequest
from gpuhub.broker_api.schemas.output_shares import MAX_SHARE_S
from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, InvalidRequest
from gpuhub.web.handlers import BrokerUserHandler, check_action_size

T = TypeVar("T")
_HOUR_S = 3600
_Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,64}$")]
_NodeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")]
_ViewerName = Annotated[str, StringConstraints(min_length=1, max_length=64)]
_UserName = Annotated[str, StringConstraints(pattern=f"^{names.USERNAME_PATTERN}$")]
_Reason = Annotated[str, StringConstraints(max_length=300)]


class _PageAction(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ExtendAction(_PageAction):
    """Extends a lease."""

    do: Literal["extend"]
    lease: _Id
    hours: Annotated[int, Field(ge=1, le=24 * 366)]


class ForceAction(_PageAction):
    """Releases a lease's GPUs without proof."""

    do: Literal["force"]
    lease: _Id


class ChangeNodeAction(_PageAction):
    """Cordons, drains or undrains a node."""

    do: Literal["cordon", "drain", "undrain"]
    node: _NodeName
    reason: _Reason = ""
    grace_s: Annotated[int, Field(ge=0, le=30 * 86400)] = 0


class SwitchPowerAction(_PageAction):
    """Wakes a node, or puts it to sleep."""

    do: Literal["wake", "sleep"]
    node: _NodeName


class SetLimitsAction(_PageAction):
    """Sets limits of a user in place of those of cluster.toml; None where cluster.toml decides."""

    do: Literal["limits"]
    user: _UserName
    max_gpus: int | None = None
    gpu_hours_per_week: float | None = None
    max_waiting: int | None = None
    max_jobs: int | None = None
    longest_lease_s: float | None = None
    reason: _Reason = ""


class LeaveQueueRequest(BaseModel):
    """Removes a request from the queue."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    lease: _Id


class KeepAction(_PageAction):
    """Keeps an idle notebook."""

    do: Literal["keep"]
    lease: _Id


class SuspendAction(_PageAction):
    """Suspends a notebook, or resumes it when its GPU is free."""

    do: Literal["suspend", "resume"]
    lease: _Id


class StopLeaseAction(_PageAction):
    """Ends a notebook or a job by its lease."""

    do: Literal["stop"]
    lease: _Id


class CancelJobAction(_PageAction):
    """Cancels a job."""

    do: Literal["cancel"]
    job: _Id


class ShareAction(_PageAction):
    """Shares the output of a job with a user."""

    do: Literal["share"]
    job: _Id
    viewer: _ViewerName
    hours: Annotated[int, Field(ge=1, le=MAX_SHARE_S // _HOUR_S)]


class EndShareAction(_PageAction):
    """Ends the share of a job with a user."""

    do: Literal["end_share"]
    job: _Id
    viewer: _ViewerName


class EndNotebookShareAction(_PageAction):
    """Ends the share of a notebook with a user."""

    do: Literal["end_notebook_share"]
    notebook: _Id
    viewer: _ViewerName


PageAction = (
    ShareAction
    | EndShareAction
    | EndNotebookShareAction
    | ExtendAction
    | ForceAction
    | KeepAction
    | SuspendAction
    | StopLeaseAction
    | CancelJobAction
    | ChangeNodeAction
    | SwitchPowerAction
    | SetLimitsAction
)


#: Names of limits in the dialog.
_LIMIT_TITLES = {
    "max_gpus": "GPUs at once",
    "gpu_hours_per_week": "GPU-hours in 7 days",
    "max_waiting": "Requests waiting",
    "max_jobs": "Jobs that have not ended",
    "longest_lease_s": "Longest time, in seconds,",
}

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
    check_action_size(body)
    try:
        return kind.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(
            f"this is not a valid request of the page: {where or 'the body'}: {first['msg']}"
        ) from None


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


async def stop_lease(broker: Any, lease_id: str) -> None:
    """End a notebook, or a job with its lease.

    Raises:
        GpuhubError: The broker refuses.
    """
    lease = await broker.get_lease(lease_id)
    if lease.purpose is Purpose.JOB:
        await broker.end_job(lease.subject)
    else:
        await broker.release(lease_id)


async def set_limits(broker: Any, action: SetLimitsAction) -> None:
    """Set limits of a user, or give those of cluster.toml back where none is named.

    Raises:
        InvalidRequest: A value is out of range.
        GpuhubError: The broker refuses.
    """
    values = action.model_dump(exclude={"do", "user", "reason"}, exclude_none=True)
    if not values:
        await broker.clear_limits(action.user)
        return
    try:
        request = UserLimitsRequest(**values, reason=action.reason)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = _LIMIT_TITLES[str(first["loc"][0])]
        raise InvalidRequest(f"{name} cannot be {first['input']:g}: {first['msg'].lower()}.") from None
    await broker.set_limits(action.user, request)


async def perform_action(broker: Any, action: PageAction) -> None:
    """Perform an action through the broker.

    Raises:
        GpuhubError: The broker refuses.
    """
    if isinstance(action, ExtendAction):
        await broker.extend(action.lease, action.hours * _HOUR_S)
    elif isinstance(action, ForceAction | KeepAction | SuspendAction):
        # Each is the name of the broker's method.
        await getattr(broker, action.do)(action.lease)
    elif isinstance(action, StopLeaseAction):
        await stop_lease(broker, action.lease)
    elif isinstance(action, CancelJobAction):
        await broker.end_job(action.job)
    elif isinstance(action, ShareAction):
        await broker.share_output(action.job, action.viewer, action.hours * _HOUR_S)
    elif isinstance(action, EndShareAction):
        await broker.end_shares(action.job, action.viewer)
    elif isinstance(action, EndNotebookShareAction):
        await broker.end_notebook_shares(action.notebook, action.viewer)
    elif isinstance(action, SetLimitsAction):
        await set_limits(broker, action)
    elif isinstance(action, SwitchPowerAction):
        await broker.switch_power(action.node, on=action.do == "wake")
    elif action.do == "undrain":
        await broker.change_node(action.node, action.do)
    else:
        await broker.change_node(action.node, action.do, CordonRequest(reason=action.reason, grace_s=action.grace_s))
