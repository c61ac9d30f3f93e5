"""What our logins at another party have in common: names, accounts, groups, and pages that say what went wrong."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oauthenticator.oauth2 import OAuthCallbackHandler
from tornado import web
from tornado.httpclient import HTTPError as ClientError
from traitlets import List, Unicode

from gpuhub.errors import InvalidRequest, NotAllowed
from gpuhub.login import account_names
from gpuhub.login.accounts import Accounts
from gpuhub.login.ruled import Refused, Ruled


class CallbackHandler(OAuthCallbackHandler):  # type: ignore[misc] # oauthenticator is untyped
    """Where the provider sends the browser back to."""

    @property
    def extra_error_html(self) -> str:
        """Under every error: how to go on."""
        return f'<a role="button" class="btn btn-jupyter" href="{self.hub.base_url}login">Sign in again</a>'

    def check_error(self) -> None:
        """The provider's own refusal, shown but never at length."""
        error = self.get_argument("error", "")
        if error:
            text = account_names.shorten(self.get_argument("error_description", error), 200)
            raise Refused(f"{self.authenticator.login_service} refused this login: {text}")

    def check_state(self) -> None:
        """Whether this browser began this login."""
        try:
            super().check_state()
        except web.HTTPError:
            raise web.HTTPError(400, reason="This login began elsewhere or too long ago: sign in again") from None


class Delegated(Ruled):
    """Stands before one of oauthenticator's classes."""

    callback_handler = CallbackHandler
    provider = Unicode(config=True, help="Whose account numbers are kept: a name for this provider and no other.")
    accounts_file = Unicode(config=True, help="Where they are kept.")
    domains = List(Unicode(), config=True, help="Addresses of these only; with one, names are without it.")
    restricts_addresses = True
    #: Claims of which the first that is there is the account's number, which never changes.
    number_claims: tuple[str, ...] = ("sub",)

    @property
    def accounts(self) -> Accounts:
        """Which account each name belongs to."""
        return Accounts(Path(self.accounts_file), self.provider)

    async def authenticate(self, handler: Any, data: Any = None, **more: Any) -> dict[str, Any] | None:
        """As oauthenticator's, with a page that says so when the provider does not play along."""
        try:
            model: dict[str, Any] | None = await super().authenticate(handler, data, **more)
        except (ClientError, OSError) as error:
            what = f"{self.login_service} did not confirm this login"
            self.log.warning("%s: %s", what, error)
            raise web.HTTPError(503, reason=f"{what}: sign in again") from None
        return model

    def user_info_to_username(self, user_info: dict[str, Any]) -> str:
        """The name here."""
        claim = self.username_claim
        if claim and not user_info.get(claim):
            raise Refused(f"{self.login_service} sent no {claim}: it sent {', '.join(sorted(user_info)[:30])}")
        value = super().user_info_to_username(user_info)
        _, at, domain = str(value).rpartition("@")
        if self.domains and self.restricts_addresses and not (at and domain.lower() in self.domains):
            raise Refused(f"Only accounts of {' or '.join(self.domains)} may use this hub")
        try:
            return account_names.name_here(value, self.domains)
        except InvalidRequest as error:
            raise Refused(f"{self.login_service}: {error}") from None

    async def get_user_groups(self, auth_state: dict[str, Any]) -> set[str]:
        """Those of the provider's groups that mean something here."""
        return set(self.rules.known(await self.groups_there(auth_state)))

    async def groups_there(self, auth_state: dict[str, Any]) -> Iterable[str]:
        """The groups at the provider, as the settings name them."""
        raise NotImplementedError

    async def check_allowed(self, username: str, authentication: dict[str, Any] | None = None) -> bool:
        """Whether the account may log in under its name, which is its own from then on."""
        await super().check_allowed(username, authentication)
        user_info = (authentication or {})["auth_state"][self.user_auth_state_key]
        number = next((user_info[claim] for claim in self.number_claims if user_info.get(claim)), None)
        if number is None:
            raise Refused(f"{self.login_service} did not say which account this is")
        try:
            self.accounts.claim(username, str(number))
        except NotAllowed as error:
            raise Refused(f"{self.login_service}: {error}") from None
        return True

    def delete_user(self, user: Any) -> None:
        """The name is free again."""
        super().delete_user(user)
        self.accounts.forget(user.name)
