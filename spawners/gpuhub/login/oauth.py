"""The authenticators of providers, each based on oauthenticator's class, and their base: accounts and error pages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from oauthenticator.cilogon import CILogonOAuthenticator
from oauthenticator.generic import GenericOAuthenticator
from oauthenticator.github import GitHubOAuthenticator
from oauthenticator.gitlab import GitLabOAuthenticator
from oauthenticator.google import GoogleOAuthenticator
from oauthenticator.oauth2 import OAuthCallbackHandler
from tornado import web
from tornado.httpclient import HTTPError as ClientError
from traitlets import List, Unicode

from gpuhub.common.errors import InvalidRequest, NotAllowed
from gpuhub.login import accounts
from gpuhub.login.accounts import AccountBindings
from gpuhub.login.base import LoginRefused, PolicyAuthenticator

_NOT_A_MEMBER = frozenset({403, 404})


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


class OidcAuthenticator(OAuthProviderAuthenticator, GenericOAuthenticator):  # type: ignore[misc] # oauthenticator is untyped
    """Any OpenID Connect provider: groups are a claim."""

    groups_claim = Unicode(config=True, help="The claim that lists groups.")

    def user_info_to_username(self, user_info: dict[str, Any]) -> str:
        """Refuse an address that the provider has not verified."""
        if self.username_claim == "email" and user_info.get("email_verified") is not True:
            raise LoginRefused(f"{self.login_service} has not verified this account's e-mail address")
        return super().user_info_to_username(user_info)

    async def find_provider_groups(self, auth_state: dict[str, Any]) -> Iterable[str]:
        return _texts(auth_state[self.user_auth_state_key].get(self.groups_claim))


class GitHubAuthenticator(OAuthProviderAuthenticator, GitHubOAuthenticator):  # type: ignore[misc]
    """GitHub: groups are `organisation` and `organisation:team`; only those in the settings are requested."""

    number_claims = ("id",)

    async def find_provider_groups(self, auth_state: dict[str, Any]) -> Iterable[str]:
        """Return the groups in the settings with the account as an active member; an invitation is not enough."""
        login = auth_state[self.user_auth_state_key]["login"]
        return [group for group in sorted(self.rules.known_groups) if await self._is_member(group, login, auth_state)]

    async def _is_member(self, group: str, login: str, auth_state: dict[str, Any]) -> bool:
        organisation, _, team = (quote(part, safe="") for part in group.partition(":"))
        path = f"orgs/{organisation}/teams/{team}/memberships/{quote(login, safe='')}"
        url = f"{self.github_api}/{path if team else f'user/memberships/orgs/{organisation}'}"
        token = auth_state["token_response"]
        response = await self.httpfetch(
            url,
            label="membership",
            parse_json=False,
            raise_error=False,
            method="GET",
            headers=self.build_userdata_request_headers(token["access_token"], token["token_type"]),
            validate_cert=self.validate_server_cert,
        )
        if response.code in _NOT_A_MEMBER:
            return False
        if response.code != 200:
            raise web.HTTPError(503, reason="GitHub did not return the organisation's members: please sign in again")
        return bool(json.loads(response.body).get("state") == "active")


class GitLabAuthenticator(OAuthProviderAuthenticator, GitLabOAuthenticator):  # type: ignore[misc]
    """GitLab, with its OpenID Connect: groups with subgroups are in the claims, without a further right."""

    async def find_provider_groups(self, auth_state: dict[str, Any]) -> Iterable[str]:
        return _texts(auth_state[self.user_auth_state_key].get("groups"))


class GoogleAuthenticator(OAuthProviderAuthenticator, GoogleOAuthenticator):  # type: ignore[misc]
    """Google: groups are Workspace domains, because Google shows other groups only to service accounts."""

    number_claims = ("sub", "id")
    #: `hosted_domain` checks this; an organisation's accounts may have addresses of its other domains.
    restricts_addresses = False

    def user_info_to_username(self, user_info: dict[str, Any]) -> str:
        """Refuse an address that Google has not verified."""
        if user_info.get("verified_email") is not True:
            raise LoginRefused("Google has not verified this account's e-mail address")
        return super().user_info_to_username(user_info)

    def check_blocked_users(self, username: str, auth_model: dict[str, Any]) -> bool:
        """Refuse with the reason, which the library does not give."""
        if not super().check_blocked_users(username, auth_model):
            raise LoginRefused(f"Only accounts of {' or '.join(self.hosted_domain)} may use this hub")
        return True

    async def find_provider_groups(self, auth_state: dict[str, Any]) -> Iterable[str]:
        return _texts([auth_state[self.user_auth_state_key].get("hd")])


class CILogonAuthenticator(OAuthProviderAuthenticator, CILogonOAuthenticator):  # type: ignore[misc]
    """CILogon: groups are identity providers by entity id; with several, names need a domain."""

    def user_info_to_username(self, user_info: dict[str, Any]) -> str:
        """Check the claim; the library refuses identity providers that the settings do not name."""
        chosen = self.idps.get(user_info.get("idp"))
        claim = chosen and chosen["username_derivation"]["username_claim"]
        if claim and not user_info.get(claim):
            raise LoginRefused(f"CILogon sent no {claim}: it sent {', '.join(sorted(user_info)[:30])}")
        if claim and len(self.idps) > 1 and "@" not in str(user_info[claim]):
            raise LoginRefused(
                f"CILogon's {claim} has no domain, and several identity providers may have such a name: "
                'set username_claim = "eppn" in cluster.toml'
            )
        return super().user_info_to_username(user_info)

    async def find_provider_groups(self, auth_state: dict[str, Any]) -> Iterable[str]:
        return _texts([auth_state[self.user_auth_state_key].get("idp")])


def _texts(value: object) -> list[str]:
    """Return the texts in a list; none for any other value, also for a single text."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
