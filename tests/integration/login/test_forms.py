"""Login with accounts of the head node, and with passwords chosen at first login: a real hub behind its proxy."""

from __future__ import annotations

import asyncio
import grp
import pwd
import re
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from traitlets.config import Config

from gpuhub.config.settings import load
from gpuhub.login import kinds
from gpuhub.login.password_forms import PamAuthenticator
from tests.support.hub.login_hub import LoginHub, find_user, login_hub, sign_in

#: Names that no machine resolves.
ADA, BEN, ZOE, LAB = "ghtestada", "ghtestben", "ghtestzoe", "ghtestlab"
WRONG = "Wrong user name or password, or the name may not log in here"
STRANGE = ["../x", "$(id)", "ädä", "a" * 5000, "-rf", "root:x", "a b", "x\ny"]


def error_message(page: httpx.Response) -> str:
    """Return the error message of the form."""
    match = re.search(r'class="login_error">([^<]*)<', page.text)
    return match[1] if match else ""


@pytest.fixture(scope="module")
def accounts() -> Iterator[None]:
    """Three accounts of this machine, two of them in a group."""
    names = (ADA, BEN, ZOE)
    subprocess.run(["groupadd", LAB], check=True)
    try:
        for name in names:
            subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/bash", name], check=True)
            subprocess.run(["chpasswd"], input=f"{name}:{name}-password", text=True, check=True)
        subprocess.run(["usermod", "--append", "--groups", LAB, BEN], check=True)
        yield
    finally:
        for name in names:
            subprocess.run(["userdel", name], check=False, capture_output=True)
        subprocess.run(["groupdel", LAB], check=False, capture_output=True)
    assert not {group.pw_name for group in pwd.getpwall()} & set(names)
    assert LAB not in {group.gr_name for group in grp.getgrall()}


@pytest.fixture(scope="module")
def pam(accounts: None) -> Iterator[LoginHub]:
    users = f'[users]\nlogin = "pam"\nallowed = ["{ADA}"]\nallowed_groups = ["{LAB}"]\nadmin_groups = ["{LAB}"]'
    with login_hub("ghpam", users) as running:
        yield running
        assert "-password" not in running.log
        assert "Traceback" not in running.log, running.log[running.log.index("Traceback") - 500 :]


def authenticator(hub: LoginHub) -> PamAuthenticator:
    """Return the authenticator class as the hub configures it."""
    return PamAuthenticator(config=Config(kinds.build_authenticator_settings(load(hub.file), hub.paths, hub.url)))


def test_pam_login(pam: LoginHub) -> None:
    """An account of the head node logs in with its password and no other."""
    browser = pam.browser()
    page = sign_in(browser, ADA, f"{BEN}-password")
    assert (page.status_code, error_message(page), find_user(browser)) == (403, WRONG, None)
    page = sign_in(browser, ADA, f"{ADA}-password")
    assert (page.status_code, find_user(browser)) == (200, ADA)
    assert browser.get("/hub/admin").status_code == 403


def test_pam_account_without_access(pam: LoginHub) -> None:
    """An account that may not log in learns nothing about its password, so that root's cannot be guessed through the
    hub.
    """
    page = sign_in(pam.browser(), ZOE, f"{ZOE}-password")
    assert (page.status_code, error_message(page)) == (403, WRONG)
    assert "pam_unix" not in pam.log
    assert pam.user(ZOE) is None


def test_pam_group_membership_and_its_loss_in_open_sessions(pam: LoginHub) -> None:
    """Membership of a system group allows login and makes administrators, and losing it ends both in open sessions too."""
    browser = pam.browser()
    assert sign_in(browser, BEN, f"{BEN}-password").status_code == 200
    assert browser.get("/hub/admin").status_code == 200
    login = authenticator(pam)
    user = SimpleNamespace(name=BEN, admin=True, orm_user=SimpleNamespace(groups=[SimpleNamespace(name=LAB)]))
    assert asyncio.run(login.refresh_user(user)) is True
    subprocess.run(["gpasswd", "--delete", BEN, LAB], check=True, capture_output=True)
    assert asyncio.run(login.refresh_user(user)) is False, "as the hub asks every five minutes"
    assert error_message(sign_in(pam.browser(), BEN, f"{BEN}-password")) == WRONG
    user.name = ADA
    assert asyncio.run(login.refresh_user(user)) == {"name": ADA, "admin": False, "groups": []}


@pytest.mark.parametrize("name", STRANGE, ids=lambda name: ascii(name[:12]))
def test_names_that_cannot_be_users(pam: LoginHub, name: str) -> None:
    """The form refuses an invalid name and shows the rule; no user is made, and the log stays short."""
    before = len(pam.log)
    page = sign_in(pam.browser(), name, "x")
    assert page.status_code == 403
    assert "a letter a-z, then at most 31" in error_message(page)
    assert len(pam.log) - before < 3000


def test_incomplete_form_is_refused(pam: LoginHub) -> None:
    """An incomplete form gets status 400, not an internal error."""
    browser = pam.browser()
    token = re.search(r'name="_xsrf" value="([^"]+)"', browser.get("/hub/login").text)
    assert token is not None
    for data in ({"username": ADA}, {"password": "x"}):
        assert browser.post("/hub/login", data={"_xsrf": token[1], **data}).status_code == 400


@pytest.fixture(scope="module")
def first_use() -> Iterator[LoginHub]:
    with login_hub("ghfirst", '[users]\nlogin = "first-use"\nallowed = ["ada", "ben"]\nadmins = ["eve"]') as running:
        yield running
        assert "ada-chose-this" not in running.log
        assert "Traceback" not in running.log, running.log[running.log.index("Traceback") - 500 :]


def test_first_use_password(first_use: LoginHub) -> None:
    """The first password stays valid until the user changes it or an administrator deletes the user."""
    browser = first_use.browser()
    assert "will be yours" in browser.get("/hub/login").text
    assert error_message(sign_in(browser, "ada", "short")) == "A password of at least 8 characters is needed"
    assert "too long" in error_message(sign_in(browser, "ada", "x" * 73))
    assert sign_in(browser, "ada", "ada-chose-this").status_code == 200
    assert find_user(browser) == "ada"
    other = first_use.browser()
    assert error_message(sign_in(other, "ada", "ada-chose-that")) == WRONG
    assert sign_in(other, "ada", "ada-chose-this").status_code == 200

    page = other.get("/hub/auth/change-password")
    token = re.search(r'name="_xsrf" value="([^"]+)"', page.text)
    assert token is not None
    done = other.post("/hub/auth/change-password", data={"_xsrf": token[1], "password": "ada-chose-more"})
    assert "success" in done.text
    fresh = first_use.browser()
    assert error_message(sign_in(fresh, "ada", "ada-chose-this")) == WRONG
    assert sign_in(fresh, "ada", "ada-chose-more").status_code == 200

    chief = first_use.browser()
    assert sign_in(chief, "eve", "eve-chose-this").status_code == 200
    headers = {"X-XSRFToken": str(chief.cookies.get("_xsrf", path="/hub/"))}
    assert chief.delete("/hub/api/users/ada", headers=headers).status_code == 204
    assert sign_in(first_use.browser(), "ada", "ada-chose-again").status_code == 200


def test_only_allowed_users_choose_a_password(first_use: LoginHub) -> None:
    """A name that is not allowed gets no password, and therefore has none once it is allowed."""
    page = sign_in(first_use.browser(), "zoe", "zoe-chose-this")
    assert (page.status_code, error_message(page)) == (403, WRONG)
    kept = b"".join(file.read_bytes() for file in first_use.paths.secrets.glob("chosen-passwords*"))
    assert b"zoe" not in kept
    assert b"chose" not in kept
    assert all(file.stat().st_mode & 0o077 == 0 for file in first_use.paths.secrets.iterdir())
