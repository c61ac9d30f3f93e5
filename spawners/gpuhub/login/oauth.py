"""The base of logins at a provider: names, accounts, groups, and pages for errors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oauthenticator.oauth2 import OAuthCallbackHandler
from tornado import web
from tornado.httpclient import HTTPError as ClientError
from traitlets import List, Unicode

from gpuhub.common.errors import InvalidRequest, NotAllowed
from gpuhub.login import accounts
from gpuhub.login.accounts import AccountBindings
from gpuhub.login.base import LoginRefused, PolicyAuthenticator


class CallbackHandler(OAuthCallbackHandler):  # type: ignore[misc] # oauthenticator is untyped
    """The page to which the provider redirects the browser."""

    @property
    def extra_error_html(self) -> str:
        """The link below every error."""
        return f'<a role="button" class="btn btn-jupyter" href="{self.hub.base_url}login">Sign in again</a>'

    def check_error(self) -> None:
        """Show the provider's refusal, shortened."""
        error = self.get_argument("error", "")
        if error:
            text = accounts.quote_shortened(self.get_argument("error_description", error), 200)
            raise LoginRefused(f"{self.authenticator.login_service} refused this login: {text}")

    def check_state(self) -> None:
        """Check that this browser began this login."""
        try:
            super().check_state()
        except web.HTTPError:
            raise web.HTTPError(
                400, reason="This login began in another browser or too long ago: sign in again"
            ) from None


class OAuthProviderAuthenticator(PolicyAuthenticator):
    """A mixin before one of oauthenticator's classes."""

    callback_handler = CallbackHandler
    provider = Unicode(config=True, help="The scope of account numbers: a name for this provider and no other.")
    accounts_file = Unicode(config=True, help="The file of the account numbers of users.")
    domains = List(
        Unicode(),
        config=True,
        help="Only addresses of these domains may log in; with one domain, names do not contain it.",
    )
    restricts_addresses = True
    #: Claims for the account's number, which never changes; the first that exists is used.
    number_claims: tuple[str, ...] = ("sub",)

    @property
    def bindings(self) -> AccountBindings:
        """The account of each name."""
        return AccountBindings(Path(self.accounts_file), self.provider)

    async def authenticate(self, handler: Any, data: Any = None, **options: Any) -> dict[str, Any] | None:
        """Authenticate as oauthenticator does, with an error page when the provider does not answer as expected."""
        try:
            model: dict[str, Any] | None = await super().authenticate(handler, data, **options)
        except (ClientError, OSError) as error:
            failure = f"{self.login_service} did not confirm this login"
            self.log.warning("%s: %s", failure, error)
            raise web.HTTPError(503, reason=f"{failure}: sign in again") from None
        return model

    def user_info_to_username(self, user_info: dict[str, Any]) -> str:
        claim = self.username_claim
        if claim and not user_info.get(claim):
            raise LoginRefused(f"{self.login_service} sent no {claim}: it sent {', '.join(sorted(user_info)[:30])}")
        value = super().user_info_to_username(user_info)
        _, at, domain = str(value).rpartition("@")
        if self.domains and self.restricts_addresses and not (at and domain.lower() in self.domains):
            raise LoginRefused(f"Only accounts of {' or '.join(self.domains)} may use this hub")
        try:
            return accounts.build_user_name(value, self.domains)
        except InvalidRequest as error:
            raise LoginRefused(f"{self.login_service}: {error}") from None

    async def get_user_groups(self, auth_state: dict[str, Any]) -> set[str]:
        """Return those of the provider's groups that the settings name."""
        return set(self.rules.filter_known(await self.find_provider_groups(auth_state)))

    async def find_provider_groups(self, auth_state: dict[str, Any]) -> Iterable[str]:
        """Return the account's groups at the provider, in the form of the settings."""
        raise NotImplementedError

    async def check_allowed(self, username: str, authentication: dict[str, Any] | None = None) -> bool:
        """Check the access rules, and bind the name to the account."""
        await super().check_allowed(username, authentication)
        user_info = (authentication or {})["auth_state"][self.user_auth_state_key]
        number = next((user_info[claim] for claim in self.number_claims if user_info.get(claim)), None)
        if number is None:
            raise LoginRefused(f"{self.login_service} sent no number of the account")
        try:
            self.bindings.bind(username, str(number))
        except NotAllowed as error:
            raise LoginRefused(f"{self.login_service}: {error}") from None
        return True

    def delete_user(self, user: Any) -> None:
        super().delete_user(user)
        self.bindings.release(user.name)
