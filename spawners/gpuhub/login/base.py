"""The base of all authenticators: names and groups in cluster.toml decide at every login and in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jupyterhub.auth import Authenticator
from tornado import web
from traitlets import Instance, Unicode

from gpuhub.login.rules import AccessDecision, AccessRules


class PolicyAuthenticator(Authenticator):  # type: ignore[misc] # JupyterHub is untyped
    """A mixin before JupyterHub's or oauthenticator's class, which only verifies the user's identity."""

    rules = Instance(AccessRules, config=True, help="Who may log in, and who is an administrator.")
    hint = Unicode(config=True, help="A line under the login form.")

    async def check_allowed(self, username: str, authentication: dict[str, Any] | None = None) -> bool:
        groups = (authentication or {}).get("groups") or ()
        if not self.rules.decide(username, groups).allowed:
            raise LoginRefused(
                f"You are {username} at {self.login_place}, and {username} may not use this hub. An administrator can "
                "allow the name or one of its groups in cluster.toml."
            )
        return True

    def is_admin(self, handler: Any, authentication: dict[str, Any]) -> bool:
        """Return a definite answer, never JupyterHub's "unchanged": the right ends with the group or the list."""
        groups = authentication.get("groups") or ()
        decision: AccessDecision = self.rules.decide(authentication["name"], groups)
        return decision.admin

    async def refresh_user(self, user: Any, handler: Any = None, **options: Any) -> bool | dict[str, Any]:
        """Apply the current rules between logins, and after a restart with other settings."""
        if handler is not None and not hasattr(handler, "_token_authenticated"):
            # JupyterHub 6.1.1 reads this after a refusal, but sets it only for requests with tokens, not for pages.
            handler._token_authenticated = False
        before = {group.name for group in user.orm_user.groups} if self.manage_groups else set()
        current = await self.find_groups(user.name, before)
        if current is None:
            return False
        groups = self.rules.filter_known(current)
        decision = self.rules.decide(user.name, groups)
        if not decision.allowed:
            return False
        if decision.admin == user.admin and groups == before:
            return True
        model: dict[str, Any] = {"name": user.name, "admin": decision.admin}
        return model | ({"groups": sorted(groups)} if self.manage_groups else {})

    async def find_groups(self, name: str, before: Iterable[str]) -> Iterable[str] | None:
        """Return the user's groups: current ones if no login is needed for them, else those of the last login.

        None means that the user no longer exists.
        """
        return before

    @property
    def login_place(self) -> str:
        """The name of the login for messages."""
        return self.login_service or "this hub"


class LoginRefused(web.HTTPError):
    """A refusal with status 403 and a page with the reason, which must be short and without secrets."""

    def __init__(self, text: str) -> None:
        super().__init__(403, text, reason="Not allowed")
        #: The attribute that JupyterHub shows.
        self.jupyterhub_message = text
