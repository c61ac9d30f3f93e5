"""The page on which users choose where notifications are sent: its list, and the handlers of page and actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from tornado import web

from gpuhub.broker_api.schemas import DestinationChange, DestinationRequest, DestinationView, UserNotificationKind
from gpuhub.common.errors import GpuhubError, InvalidRequest
from gpuhub.web.handlers import BrokerUserHandler, check_action_size
from gpuhub.web.static_files import find_static_url
from gpuhub.web.template_loader import load_macros

#: Texts of what a user can choose.
KINDS: dict[UserNotificationKind, str] = {
    "granted": "Your GPU is there, after a wait in the queue",
    "time-left": "Ten minutes are left",
    "idle": "An idle notebook will be stopped",
    "job-ended": "A job has ended",
    "job-failed": "A job failed",
    "job-preempted": "A job is preempted",
    "notebook-lost": "A notebook that is kept has lost its node",
}
#: Examples of destinations, with their service.
EXAMPLES = (
    ("ntfy", "ntfys://ntfy.sh/a-name-nobody-guesses"),
    ("Mail", "mailtos://user:password@example.org?smtp=mail.example.org&to=you@example.org"),
    ("Telegram", "tgram://bot-token/chat-id"),
    ("Slack", "slack://token-a/token-b/token-c/#channel"),
    ("Matrix", "matrixs://user:password@matrix.org/#room"),
    ("Discord", "discord://webhook-id/webhook-token"),
    ("Webhook", "jsons://example.org/path"),
)
_Id = Annotated[str, StringConstraints(pattern=r"^d[0-9a-f]{1,40}$")]


class _Action(BaseModel):
    # Errors must not quote the destination, which has passwords.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class AddAction(_Action):
    """Adds a destination."""

    do: Literal["add"]
    destination: DestinationRequest


class ChangeAction(_Action):
    """Chooses other notifications for a destination."""

    do: Literal["change"]
    id: _Id
    kinds: tuple[UserNotificationKind, ...]


class DestinationAction(_Action):
    """Tests or removes a destination."""

    do: Literal["test", "remove"]
    id: _Id


NotificationAction = AddAction | ChangeAction | DestinationAction
_ADAPTER: TypeAdapter[NotificationAction] = TypeAdapter(Annotated[NotificationAction, Field(discriminator="do")])


def parse_action(body: bytes) -> NotificationAction:
    """Parse an action of the page, such as `{"do": "test", "id": "d0a1"}`.

    Raises:
        InvalidRequest: It is not a valid action; the text does not quote it.
    """
    check_action_size(body)
    try:
        return _ADAPTER.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if "url" in first["loc"]:
            raise InvalidRequest(
                "the destination must be one line of 8 to 1000 ASCII characters without spaces: percent-encode others"
            ) from None
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(
            f"this is not a valid request of the page: {where or 'the body'}: {first['msg']}"
        ) from None


async def perform_action(broker: Any, action: NotificationAction) -> None:
    """Perform an action through the broker.

    Raises:
        GpuhubError: The broker refuses.
    """
    if isinstance(action, AddAction):
        await broker.add_destination(action.destination)
    elif isinstance(action, ChangeAction):
        await broker.change_destination(action.id, DestinationChange(kinds=action.kinds))
    elif action.do == "test":
        await broker.test_destination(action.id)
    else:
        await broker.delete_destination(action.id)


def render_list(destinations: Sequence[DestinationView]) -> str:
    """Render the user's destinations."""
    return str(load_macros("gpuhub_notifications_parts.html").destinations(destinations, KINDS))


class NotificationsPageHandler(BrokerUserHandler):
    """GET `/hub/notifications`: the page."""

    @web.authenticated
    async def get(self) -> None:
        """Send the complete page, whose script refreshes the list."""
        self.check_scope()
        problem, listed = "", ""
        try:
            listed = render_list(await self.call_as_user(self.current_user, lambda broker: broker.destinations()))
        except GpuhubError as error:
            problem = str(error)
        page = await self.render_template(
            "gpuhub_notifications.html",
            problem=problem,
            listed=listed,
            kinds=KINDS,
            examples=EXAMPLES,
            asset_url=find_static_url(self.hub.base_url),
        )
        self.finish(page)


class DestinationsHandler(BrokerUserHandler):
    """GET: `{"html": …, "waiting": n}`, the user's destinations. POST: perform an action of the page."""

    async def get(self) -> None:
        """Send the current list, or the broker's refusal."""
        user = self.require_user()
        self.check_scope()
        try:
            destinations = await self.call_as_user(user, lambda broker: broker.destinations())
        except GpuhubError as error:
            self.finish_error(error)
            return
        self.finish_json({"html": render_list(destinations), "waiting": sum(row.waiting for row in destinations)})

    async def post(self) -> None:
        """Answer 204, or send the broker's refusal."""
        user = self.require_user()
        self.check_scope()
        try:
            action = parse_action(self.request.body)
            await self.call_as_user(user, lambda broker: perform_action(broker, action))
        except GpuhubError as error:
            self.finish_error(error)
            return
        self.set_status(204)
        self.finish()
