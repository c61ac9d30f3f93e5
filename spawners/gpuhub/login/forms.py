"""Logins by a form with name and password, of which the name is checked before anything is done with it."""

from __future__ import annotations

import asyncio
import functools
import grp
import os
import pwd
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from firstuseauthenticator import FirstUseAuthenticator
from jupyterhub.auth import LocalAuthenticator, PAMAuthenticator
from jupyterhub.authenticators.shared import SharedPasswordAuthenticator
from jupyterhub.handlers import LoginHandler
from jupyterhub.utils import maybe_future
from tornado import web

from gpuhub.login import account_names
from gpuhub.login.ruled import Ruled

#: One text for every failure, so that nobody learns which names there are.
WRONG = "Wrong user name or password, or the name may not log in here"
_PAM_PATIENCE_S = 60
_LONGEST_PASSWORD = 1024
#: bcrypt looks at no more, and its library refuses more.
_BCRYPT_BYTES = 72


class FormHandler(LoginHandler):  # type: ignore[misc] # JupyterHub is untyped
    """JupyterHub's own, with our words for what went wrong."""

    #: Why there was no login; the authenticator says it.
    reason = ""

    async def post(self) -> None:
        """Refuse half a form, which JupyterHub would answer with an internal error."""
        for field in ("username", "password"):
            if field not in self.request.body_arguments:
                raise web.HTTPError(400, reason=f"The form has no {field}")
        await super().post()

    def _render(self, login_error: str | None = None, username: str | None = None, **more: Any) -> Any:
        return super()._render(login_error=self.reason or login_error, username=username, **more)


class Form(Ruled):
    """Refuses names that are none before anybody is asked, and those that no group could allow."""

    def get_handlers(self, app: Any) -> list[tuple[str, type]]:
        """Those of the class behind, with our form."""
        return [(path, FormHandler if path.endswith("/login") else found) for path, found in super().get_handlers(app)]

    async def authenticate(self, handler: Any, data: dict[str, str]) -> dict[str, Any] | None:
        """The user's model, or None."""
        name = self.normalize_username(data["username"])
        if not self.validate_username(name):
            handler.reason = f"This cannot be a user's name here: {account_names.explain_pattern()}"
            return None
        handler.reason = WRONG
        if len(data["password"]) > _LONGEST_PASSWORD or "\0" in data["password"]:
            return None
        model = await self.identify(handler, name, data["password"])
        if model is not None:
            # Whatever goes wrong from here on says so itself.
            handler.reason = ""
        return model

    async def identify(self, handler: Any, name: str, password: str) -> dict[str, Any] | None:
        """As `authenticate`, for a name that could be one."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """For messages."""
        return "this hub"


class Password(Form, SharedPasswordAuthenticator):  # type: ignore[misc]
    """One password for all users, and one for all administrators."""

    async def identify(self, handler: Any, name: str, password: str) -> dict[str, Any] | None:
        """JupyterHub's own comparison raises at letters that are not ASCII."""
        if not self.rules.decide(name, ()).allowed:
            return None
        wanted = self.admin_password if name in self.rules.admins else self.user_password
        is_right = wanted is not None and secrets.compare_digest(password.encode(), wanted.encode())
        return {"name": name} if is_right else None


class FirstUse(Form, FirstUseAuthenticator):  # type: ignore[misc]
    """Each user's own password, chosen at the first login, and changed at /hub/auth/change-password."""

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        """Not the hub's own, which bcrypt would hold up; and one only, so that two first logins give one password."""
        return ThreadPoolExecutor(1, thread_name_prefix="first-use")

    async def identify(self, handler: Any, name: str, password: str) -> dict[str, Any] | None:
        """Names decide before the password is seen: only who may log in gets to choose one."""
        if not self.rules.decide(name, ()).allowed:
            return None
        if mistake := _password_mistake(password, self.min_password_length):
            handler.reason = mistake
            return None
        data = {"username": name, "password": password}
        # A coroutine in name only: it waits for nothing.
        work = functools.partial(asyncio.run, FirstUseAuthenticator.authenticate(self, handler, data))
        found = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return {"name": name} if found else None

    def reset_password(self, username: str, new_password: str) -> str:
        """What to tell the user who asked for another password."""
        mistake = _password_mistake(new_password, self.min_password_length)
        return mistake or self._thread.submit(super().reset_password, username, new_password).result()

    def delete_user(self, user: Any) -> None:
        """The next login chooses a password again."""
        self._thread.submit(super().delete_user, user).result()


def _password_mistake(password: str, least: int) -> str:
    """What is wrong with a password that somebody chose; empty: nothing."""
    if len(password) < least:
        return f"A password of at least {least} characters is needed"
    if len(password.encode()) > _BCRYPT_BYTES:
        return f"The password is too long: {_BCRYPT_BYTES} letters at most, fewer with other letters than a-z"
    return ""


class Pam(Form, PAMAuthenticator):  # type: ignore[misc]
    """Accounts of the head node. PAM sees no password of who could not log in anyway: nobody guesses root's here."""

    async def identify(self, handler: Any, name: str, password: str) -> dict[str, Any] | None:
        """Names and groups decide before PAM sees the password."""
        groups = await self.groups_now(name, ())
        if groups is None or not self.rules.decide(name, groups).allowed:
            return None
        asked = super(Form, self).authenticate(handler, {"username": name, "password": password})
        try:
            found = await asyncio.wait_for(maybe_future(asked), _PAM_PATIENCE_S)
        except TimeoutError:
            raise web.HTTPError(503, reason="The head node's accounts do not answer") from None
        return {"name": name, "groups": sorted(self.rules.known(groups))} if found else None

    async def groups_now(self, name: str, before: Iterable[str]) -> Iterable[str] | None:
        """The system's groups, read anew."""
        work = asyncio.get_running_loop().run_in_executor(self.executor, _system_groups, name)
        try:
            return await asyncio.wait_for(work, _PAM_PATIENCE_S)
        except TimeoutError:
            raise web.HTTPError(503, reason="The head node's accounts do not answer") from None

    def add_user(self, user: Any) -> Any:
        """Without the look for an account: a name in cluster.toml may get its account later."""
        return super(LocalAuthenticator, self).add_user(user)


def _system_groups(name: str) -> frozenset[str] | None:
    """Names of an account's groups on this machine; None without an account; blocks."""
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        return None
    return frozenset(_group_names(os.getgrouplist(name, account.pw_gid)))


def _group_names(numbers: Iterable[int]) -> Iterable[str]:
    for number in numbers:
        try:
            yield grp.getgrgid(number).gr_name
        except KeyError:
            continue  # a number without a name cannot stand in the settings
