"""One password for all users, and another for administrators."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from traitlets.config import Config

from gpuhub.common import secrets
from gpuhub.common.paths import Paths
from gpuhub.login import kinds
from gpuhub.login.password_forms import PasswordAuthenticator


@pytest.mark.parametrize(
    ("name", "which", "admin"),
    [
        ("ada", secrets.USER_PASSWORD, False),
        ("Ada", secrets.USER_PASSWORD, False),
        ("eve", secrets.ADMIN_PASSWORD, True),
        ("ada", secrets.ADMIN_PASSWORD, None),
        ("eve", secrets.USER_PASSWORD, None),
        ("zoe", secrets.USER_PASSWORD, None),
        ("../x", secrets.USER_PASSWORD, None),
        ("ada", "pässword", None),
        ("ada", "", None),
    ],
)
def test_login_with_user_and_administrator_passwords(
    cluster: Any, tmp_path: Path, monkeypatch: Any, name: str, which: str, admin: bool | None
) -> None:
    """Users with their password, administrators with theirs; None means a refused login without an internal error."""
    monkeypatch.setattr(Paths, "state", property(lambda _: tmp_path))
    paths = Paths("ghunit")
    secrets.ensure_secrets(paths)
    password = secrets.read_secret(paths, which) if which.endswith("-password") else which
    settings = cluster("password", 'allowed = ["ada"]\nadmins = ["eve"]', "")
    traits = kinds.build_authenticator_settings(settings, paths, "http://127.0.0.1:8000")
    login = PasswordAuthenticator(config=Config(traits), username_pattern=r"[a-z][a-z0-9_.-]{0,31}\Z")
    handler = SimpleNamespace()
    model = asyncio.run(login.get_authenticated_user(handler, {"username": name, "password": password}))
    assert (model and (model["name"], model["admin"])) == (None if admin is None else (name.lower(), admin))
    assert (handler.reason == "") == (admin is not None)
