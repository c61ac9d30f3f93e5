"""Logins by a form with name and password; the name is validated before it is used."""

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

from gpuhub.login import accounts
from gpuhub.login.base import PolicyAuthenticator

#: One text for every failure, so that it does not reveal which names exist.
WRONG_CREDENTIALS = "Wrong user name or password, or the name may not log in here"
#: Maximum wait for PAM and for the system's groups, seconds.
_PAM_TIMEOUT_S = 60
_LONGEST_PASSWORD = 1024
#: bcrypt uses no more, and its library refuses more.
_BCRYPT_BYTES = 72


class LoginFormHandler(LoginHandler):  # type: ignore[misc] # JupyterHub is untyped
    """JupyterHub's login page, with the authenticator's reason of a failure."""

    #: The reason of a failure; the authenticator sets it.
    reason = ""

    async def post(self) -> None:
        """Refuse an incomplete form, which JupyterHub would answer with an internal error."""
        for field in ("username", "password"):
            if field not in self.request.body_arguments:
                raise web.HTTPError(400, reason=f"The form has no {field}")
        await super().post()

    def _render(self, login_error: str | None = None, username: str | None = None, **context: Any) -> Any:
        return super()._render(login_error=self.reason or login_error, username=username, **context)


class FormAuthenticator(PolicyAuthenticator):
    """An authenticator with a form, which refuses names that cannot be user names."""

    def get_handlers(self, app: Any) -> list[tuple[str, type]]:
        return [
            (path, LoginFormHandler if path.endswith("/login") else handler)
            for path, handler in super().get_handlers(app)
        ]

    async def authenticate(self, handler: Any, data: dict[str, str]) -> dict[str, Any] | None:
        name = self.normalize_username(data["username"])
        if not self.validate_username(name):
            handler.reason = f"This cannot be a user name here: {accounts.describe_name_pattern()}"
            return None
        handler.reason = WRONG_CREDENTIALS
        if len(data["password"]) > _LONGEST_PASSWORD or "\0" in data["password"]:
            return None
        model = await self.verify_password(handler, name, data["password"])
        if model is not None:
            # Later errors have their own texts.
            handler.reason = ""
        return model

    async def verify_password(self, handler: Any, name: str, password: str) -> dict[str, Any] | None:
        """Return the user's model if the password is right, for a valid name."""
        raise NotImplementedError

    @property
    def login_place(self) -> str:
        return "this hub"


class PasswordAuthenticator(FormAuthenticator, SharedPasswordAuthenticator):  # type: ignore[misc]
    """One password for all users, and one for all administrators."""

    async def verify_password(self, handler: Any, name: str, password: str) -> dict[str, Any] | None:
        """Compare the bytes, because JupyterHub's comparison raises an error for letters outside of ASCII."""
        if not self.rules.decide(name, ()).allowed:
            return None
        expected = self.admin_password if name in self.rules.admins else self.user_password
        is_right = expected is not None and secrets.compare_digest(password.encode(), expected.encode())
        return {"name": name} if is_right else None


class ChosenPasswordAuthenticator(FormAuthenticator, FirstUseAuthenticator):  # type: ignore[misc]
    """A password for each user, chosen at the first login and changed at /hub/auth/change-password."""

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        """A thread for bcrypt, which would block the hub's; only one, so that two first logins set one password."""
        return ThreadPoolExecutor(1, thread_name_prefix="first-use")

    async def verify_password(self, handler: Any, name: str, password: str) -> dict[str, Any] | None:
        """Check the name first, so that only a user who may log in can choose a password."""
        if not self.rules.decide(name, ()).allowed:
            return None
        if problem := _find_password_problem(password, self.min_password_length):
            handler.reason = problem
            return None
        data = {"username": name, "password": password}
        # The coroutine never waits.
        work = functools.partial(asyncio.run, FirstUseAuthenticator.authenticate(self, handler, data))
        model = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return {"name": name} if model else None

    def reset_password(self, username: str, new_password: str) -> str:
        """Set another password, and return a message for the user."""
        problem = _find_password_problem(new_password, self.min_password_length)
        return problem or self._thread.submit(super().reset_password, username, new_password).result()

    def delete_user(self, user: Any) -> None:
        self._thread.submit(super().delete_user, user).result()


def _find_password_problem(password: str, min_length: int) -> str:
    """Return the problem with a chosen password; empty if there is none."""
    if len(password) < min_length:
        return f"A password of at least {min_length} characters is needed"
    if len(password.encode()) > _BCRYPT_BYTES:
        return f"The password is too long: {_BCRYPT_BYTES} letters at most, fewer with other letters than a-z"
    return ""


class PamAuthenticator(FormAuthenticator, PAMAuthenticator):  # type: ignore[misc]
    """Accounts of the head node. PAM gets only passwords of users who may log in, so that root's cannot be guessed."""

    async def verify_password(self, handler: Any, name: str, password: str) -> dict[str, Any] | None:
        groups = await self.find_groups(name, ())
        if groups is None or not self.rules.decide(name, groups).allowed:
            return None
        request = super(FormAuthenticator, self).authenticate(handler, {"username": name, "password": password})
        try:
            is_right = await asyncio.wait_for(maybe_future(request), _PAM_TIMEOUT_S)
        except TimeoutError:
            raise web.HTTPError(503, reason="The head node's accounts do not answer") from None
        return {"name": name, "groups": sorted(self.rules.filter_known(groups))} if is_right else None

    async def find_groups(self, name: str, before: Iterable[str]) -> Iterable[str] | None:
        work = asyncio.get_running_loop().run_in_executor(self.executor, _system_groups, name)
        try:
            return await asyncio.wait_for(work, _PAM_TIMEOUT_S)
        except TimeoutError:
            raise web.HTTPError(503, reason="The head node's accounts do not answer") from None

    def add_user(self, user: Any) -> Any:
        """Skip the check for an account: a name in cluster.toml may get its account later."""
        return super(LocalAuthenticator, self).add_user(user)


def _system_groups(name: str) -> frozenset[str] | None:
    """Return the names of an account's groups on this machine; None without an account. Blocks."""
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
            continue  # the settings cannot name a group without a name
