"""What all of our authenticators do alike: names and groups of cluster.toml decide, at every login and in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jupyterhub.auth import Authenticator
from tornado import web
from traitlets import Instance, Unicode

from gpuhub.login.rules import Rules, Verdict


class Ruled(Authenticator):  # type: ignore[misc] # JupyterHub is untyped
    """Stands before JupyterHub's or oauthenticator's own class, which only finds out who somebody is."""

    rules = Instance(Rules, config=True, help="Who may log in, and who is an administrator.")
    hint = Unicode(config=True, help="A line under the login form.")

    async def check_allowed(self, username: str, authentication: dict[str, Any] | None = None) -> bool:
        """Whether somebody who is known by now may log in; refuses with the reason."""
        groups = (authentication or {}).get("groups") or ()
        if not self.rules.decide(username, groups).allowed:
            raise Refused(
                f"You are {username} at {self.place}, and {username} may not use this hub. An administrator can allow "
                "the name or one of its groups in cluster.toml."
            )
        return True

    def is_admin(self, handler: Any, authentication: dict[str, Any]) -> bool:
        """Yes or no, never JupyterHub's "as before": who left the group or the list is no administrator any more."""
        groups = authentication.get("groups") or ()
        verdict: Verdict = self.rules.decide(authentication["name"], groups)
        return verdict.admin

    async def refresh_user(self, user: Any, handler: Any = None, **more: Any) -> bool | dict[str, Any]:
        """Between logins, and after a restart with other settings: what may this user do now?"""
        if handler is not None and not hasattr(handler, "_token_authenticated"):
            # JupyterHub 6.1.1 asks for this after a no, and has set it only where tokens are taken: not on pages.
            handler._token_authenticated = False
        before = {group.name for group in user.orm_user.groups} if self.manage_groups else set()
        found = await self.groups_now(user.name, before)
        if found is None:
            return False
        groups = self.rules.known(found)
        verdict = self.rules.decide(user.name, groups)
        if not verdict.allowed:
            return False
        if verdict.admin == user.admin and groups == before:
            return True
        fresh: dict[str, Any] = {"name": user.name, "admin": verdict.admin}
        return fresh | ({"groups": sorted(groups)} if self.manage_groups else {})

    async def groups_now(self, name: str, before: Iterable[str]) -> Iterable[str] | None:
        """The user's groups, where they can be had without a login: else those of the last one. None: no such user."""
        return before

    @property
    def place(self) -> str:
        """Where the name is known, for messages."""
        return self.login_service or "this hub"


class Refused(web.HTTPError):
    """403 with a page that says why; `text` may hold names, but nothing long and nothing secret."""

    def __init__(self, text: str) -> None:
        super().__init__(403, text, reason="Not allowed")
        #: Where JupyterHub finds what to show.
        self.jupyterhub_message = text
