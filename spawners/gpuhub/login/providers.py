"""The providers, each on oauthenticator's class for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from oauthenticator.cilogon import CILogonOAuthenticator
from oauthenticator.generic import GenericOAuthenticator
from oauthenticator.github import GitHubOAuthenticator
from oauthenticator.gitlab import GitLabOAuthenticator
from oauthenticator.google import GoogleOAuthenticator
from tornado import web
from traitlets import Unicode

from gpuhub.login.oauth import Delegated
from gpuhub.login.ruled import Refused

_NOT_A_MEMBER = frozenset({403, 404})


class Oidc(Delegated, GenericOAuthenticator):  # type: ignore[misc] # oauthenticator is untyped
    """Any OpenID Connect provider; groups are a claim."""

    groups_claim = Unicode(config=True, help="The claim that lists groups.")

    def user_info_to_username(self, user_info: dict[str, Any]) -> str:
        """An address says who somebody is only where the provider has seen that it is theirs."""
        if self.username_claim == "email" and user_info.get("email_verified") is not True:
            raise Refused(f"{self.login_service} has not verified this account's e-mail address")
        return super().user_info_to_username(user_info)

    async def groups_there(self, auth_state: dict[str, Any]) -> Iterable[str]:
        """The claim, where it is a list of texts."""
        return _texts(auth_state[self.user_auth_state_key].get(self.groups_claim))


class GitHub(Delegated, GitHubOAuthenticator):  # type: ignore[misc]
    """Groups are `organisation` and `organisation:team`, asked for one by one, so that nothing else gets known."""

    number_claims = ("id",)

    async def groups_there(self, auth_state: dict[str, Any]) -> Iterable[str]:
        """Those of the known ones in which the account is a member; an invitation is not enough."""
        login = auth_state[self.user_auth_state_key]["login"]
        return [group for group in sorted(self.rules.known_groups) if await self._is_member(group, login, auth_state)]

    async def _is_member(self, group: str, login: str, auth_state: dict[str, Any]) -> bool:
        organisation, _, team = (quote(part, safe="") for part in group.partition(":"))
        way = f"orgs/{organisation}/teams/{team}/memberships/{quote(login, safe='')}"
        url = f"{self.github_api}/{way if team else f'user/memberships/orgs/{organisation}'}"
        token = auth_state["token_response"]
        answer = await self.httpfetch(
            url,
            label="membership",
            parse_json=False,
            raise_error=False,
            method="GET",
            headers=self.build_userdata_request_headers(token["access_token"], token["token_type"]),
            validate_cert=self.validate_server_cert,
        )
        if answer.code in _NOT_A_MEMBER:
            return False
        if answer.code != 200:
            raise web.HTTPError(503, reason="GitHub does not say who is in the organisation: please sign in again")
        return bool(json.loads(answer.body).get("state") == "active")


class GitLab(Delegated, GitLabOAuthenticator):  # type: ignore[misc]
    """GitLab as a provider of OpenID Connect, which tells groups with their subgroups without any further right."""

    async def groups_there(self, auth_state: dict[str, Any]) -> Iterable[str]:
        """Full paths of groups."""
        return _texts(auth_state[self.user_auth_state_key].get("groups"))


class Google(Delegated, GoogleOAuthenticator):  # type: ignore[misc]
    """Groups are Workspace domains: Google tells others only to service accounts."""

    number_claims = ("sub", "id")
    #: `hosted_domain` sees to that: an organisation's accounts may have addresses of its other domains.
    restricts_addresses = False

    def user_info_to_username(self, user_info: dict[str, Any]) -> str:
        """An address that Google has not verified is nobody's."""
        if user_info.get("verified_email") is not True:
            raise Refused("Google has not verified this account's e-mail address")
        return super().user_info_to_username(user_info)

    def check_blocked_users(self, username: str, auth_model: dict[str, Any]) -> bool:
        """As the library's, with the reason."""
        if not super().check_blocked_users(username, auth_model):
            raise Refused(f"Only accounts of {' or '.join(self.hosted_domain)} may use this hub")
        return True

    async def groups_there(self, auth_state: dict[str, Any]) -> Iterable[str]:
        """The domain that has the account."""
        return _texts([auth_state[self.user_auth_state_key].get("hd")])


class CILogon(Delegated, CILogonOAuthenticator):  # type: ignore[misc]
    """Groups are identity providers, by entity id; with several of them, names without a domain are nobody's."""

    def user_info_to_username(self, user_info: dict[str, Any]) -> str:
        """As `Delegated`'s; the library refuses identity providers that the settings do not name."""
        chosen = self.idps.get(user_info.get("idp"))
        claim = chosen and chosen["username_derivation"]["username_claim"]
        if claim and not user_info.get(claim):
            raise Refused(f"CILogon sent no {claim}: it sent {', '.join(sorted(user_info)[:30])}")
        if claim and len(self.idps) > 1 and "@" not in str(user_info[claim]):
            raise Refused(
                f"CILogon's {claim} has no domain, and several identity providers may have such a name: "
                'set username_claim = "eppn" in cluster.toml'
            )
        return super().user_info_to_username(user_info)

    async def groups_there(self, auth_state: dict[str, Any]) -> Iterable[str]:
        """Who vouched for the account."""
        return _texts([auth_state[self.user_auth_state_key].get("idp")])


def _texts(value: object) -> list[str]:
    """The texts of a list; nothing of anything else, a lone text too: its letters are no groups."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
