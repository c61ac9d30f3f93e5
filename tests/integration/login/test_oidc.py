"""Login at a real OpenID Connect provider, with a real hub behind its real proxy."""

from __future__ import annotations

import asyncio
import html
import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuhub.common.errors import NotAllowed, SetupError
from gpuhub.config import settings
from gpuhub.config.users.identity import allocate_uid, find_identity
from gpuhub.ops import former_users
from gpuhub.ops.deploy.programs import Supervisor
from gpuhub.storage.homes import prepare_user
from tests.support.hub.login_hub import ROOT, LoginHub, find_user, free_ports, login_hub
from tests.support.product import wait_for

INSTANCE = "ghoidc"
SECRET = "a-client-secret-that-no-log-may-hold"
SETTINGS = """
[users]
login = "oidc"
allowed = ["ada"]
admins = ["eve"]
allowed_groups = ["lab people"]
admin_groups = {admin_groups}
[login]
issuer = "{issuer}"
client_id = "gpuhub"
client_secret_file = "{secret}"
[[groups]]
name = "students"
each = {{ max_gpus = 1 }}
"""
#: A local account's name, which is free at the provider.
LOCAL = "ghtestadmin"
UID_FIRST = 1_900_000_000
STRANGE = ["../x", "$(id)", "ädä", "\N{KELVIN SIGN}ate", "a" * 5000, "-rf", "", "ada\n", "root:x"]


class Provider:
    """A provider and its users' accounts."""

    def __init__(self, port: int) -> None:
        self.issuer = f"http://localhost:{port}"

    def is_up(self) -> bool:
        """Return whether the provider answers."""
        try:
            return httpx.get(self.issuer, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def has(self, number: str, name: Any, **claims: Any) -> str:
        """Add an account with its number, name and further claims, and return its number."""
        body = {"preferred_username": name, **claims}
        httpx.put(f"{self.issuer}/users/{number}", json=body, trust_env=False).raise_for_status()
        return number


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    port = free_ports(1)[0]
    process = subprocess.Popen(
        [sys.executable, "-m", "oidc_provider_mock", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    started = Provider(port)
    try:
        wait_for(lambda: started.is_up() or None, "the provider")
        yield started
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def hub(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoginHub]:
    secret = tmp_path_factory.mktemp("login") / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    text = SETTINGS.format(issuer=provider.issuer, secret=secret, admin_groups='["chiefs"]')
    with login_hub(INSTANCE, text) as running:
        yield running
        assert SECRET not in running.log
        assert "Traceback" not in running.log, running.log[running.log.index("Traceback") - 500 :]


def sign_in(hub: LoginHub, number: str, browser: httpx.Client | None = None) -> tuple[httpx.Client, httpx.Response]:
    """Press the button, consent at the provider, and follow the redirects."""
    browser = browser or hub.browser()
    page = browser.get("/hub/login")
    button = re.search(r"href='([^']*oauth_login[^']*)'", page.text)
    assert button is not None, page.text[-3000:]
    ask = browser.get(html.unescape(button[1]))
    assert ask.url.path == "/oauth2/authorize"
    return browser, browser.post(ask.url, data={"sub": number})


def model(browser: httpx.Client) -> dict[str, Any]:
    """Return the hub's model of the logged-in user."""
    token = browser.cookies.get("_xsrf", path="/hub/")
    answer = browser.get("/hub/api/user", headers={"X-XSRFToken": str(token)})
    assert answer.status_code == 200, answer.text
    fields: dict[str, Any] = answer.json()
    return fields


def test_login_by_allowed_name(hub: LoginHub, provider: Provider) -> None:
    """An account logs in under a name that cluster.toml allows, and no other account gets that name."""
    provider.has("1001", "Ada", groups=["nobody knows"])
    browser, page = sign_in(hub, "1001")
    assert (page.status_code, page.url.path, find_user(browser)) == (200, "/hub/spawn", "ada")
    assert model(browser)["groups"] == [], "a group that no setting names is not stored"
    provider.has("1002", "ada")
    second, page = sign_in(hub, "1002")
    assert page.status_code == 403
    assert "the name ada belongs to another account of the same provider" in page.text
    assert find_user(second) is None


def test_login_by_group_with_its_limits(hub: LoginHub, provider: Provider) -> None:
    """Members of an allowed group log in, and the hub knows groups with limits so that the broker gets them."""
    provider.has("2001", "ben", groups=["lab people", "students", "others"])
    browser, page = sign_in(hub, "2001")
    assert page.status_code == 200
    assert sorted(model(browser)["groups"]) == ["lab people", "students"]
    provider.has("2001", "ben", groups=["lab people"])
    browser, _ = sign_in(hub, "2001")
    assert model(browser)["groups"] == ["lab people"]


def test_account_without_access(hub: LoginHub, provider: Provider) -> None:
    """The refusal of an account that no setting allows names it, and the hub stores nothing."""
    provider.has("3001", "zoe", groups=["students", "lab"])
    browser, page = sign_in(hub, "3001")
    assert page.status_code == 403
    assert "You are zoe at localhost, and zoe may not use this hub." in html.unescape(page.text)
    assert find_user(browser) is None
    assert hub.user("zoe") is None


def test_user_who_left_the_group_is_refused(hub: LoginHub, provider: Provider) -> None:
    """A user who left the group is refused at the next login."""
    provider.has("3002", "yan", groups=["lab people"])
    _, page = sign_in(hub, "3002")
    assert page.status_code == 200
    provider.has("3002", "yan", groups=[])
    _, page = sign_in(hub, "3002")
    assert page.status_code == 403


def test_administrator_by_group_until_they_leave_it(hub: LoginHub, provider: Provider) -> None:
    """Administrator rights come with the group at a login and end without it at the next."""
    provider.has("4001", "cleo", groups=["chiefs", "lab people"])
    browser, _ = sign_in(hub, "4001")
    assert model(browser)["admin"] is True
    assert browser.get("/hub/admin").status_code == 200
    provider.has("4001", "cleo", groups=["lab people"])
    other, _ = sign_in(hub, "4001")
    assert model(other)["admin"] is False
    assert other.get("/hub/admin").status_code == 403
    assert browser.get("/hub/admin").status_code == 403, "an older session has no more than the account"


@pytest.mark.parametrize("name", STRANGE, ids=lambda name: ascii(name[:12]))
def test_names_that_cannot_be_users(hub: LoginHub, provider: Provider, name: str) -> None:
    """The page refuses an invalid name with the reason; no user is made, and the log stays short."""
    provider.has("5001", name, groups=["lab people", "chiefs"])
    before, accounts = len(hub.log), hub.paths.state / "login-accounts.json"
    known = accounts.read_text() if accounts.exists() else ""
    browser, page = sign_in(hub, "5001")
    assert page.status_code == 403
    text = html.unescape(page.text)
    assert ("cannot be a user's name here: a letter a-z, then" if name else "sent no preferred_username") in text
    assert len(page.text) < 20_000
    assert find_user(browser) is None
    wait_for(lambda: "/hub/oauth_callback" in hub.log[before:] or None, "the request in the log")
    assert len(hub.log) - before < 6000
    assert (accounts.read_text() if accounts.exists() else "") == known


@pytest.mark.parametrize("name", [["ada"], {"a": 1}, 7])
def test_name_claim_of_the_wrong_type_is_refused(hub: LoginHub, provider: Provider, name: Any) -> None:
    """A claim that is not a text is not a name."""
    provider.has("5002", name, groups="lab people")
    _, page = sign_in(hub, "5002")
    assert page.status_code == 403


def test_groups_claim_of_the_wrong_type_is_refused(hub: LoginHub, provider: Provider) -> None:
    """A text instead of a list of groups allows no login."""
    for number, groups in (("5003", "lab people"), ("5004", {"lab people": True}), ("5005", [["lab people"]])):
        provider.has(number, "kim", groups=groups)
        _, page = sign_in(hub, number)
        assert page.status_code == 403, groups


def test_error_of_the_provider_is_shown(hub: LoginHub) -> None:
    """The provider's error is shown, shortened; a callback without a login of this browser is refused."""
    browser = hub.browser()
    text = "x" * 3000
    page = browser.get("/hub/oauth_callback", params={"error": "access_denied", "error_description": text})
    assert page.status_code == 403
    assert "localhost refused this login:" in page.text
    assert text[:300] not in page.text
    page = browser.get("/hub/oauth_callback", params={"code": "stolen", "state": "e30="})
    assert page.status_code == 400
    assert "sign in again" in page.text
    assert find_user(browser) is None


def test_name_of_a_deleted_user_stays_with_the_account(hub: LoginHub, provider: Provider, tmp_path: Path) -> None:
    """Another account gets the name after `gpuhub user free`, and then neither home nor UID of the first."""
    provider.has("6001", "noa", groups=["lab people"])
    sign_in(hub, "6001")
    provider.has("6002", "noa", groups=["lab people"])
    assert sign_in(hub, "6002")[1].status_code == 403
    provider.has("6003", "eve")
    chief, _ = sign_in(hub, "6003")
    uid = allocate_uid(hub.paths.state, UID_FIRST, "noa")
    homes = tmp_path / "homes"
    (homes / "noa").mkdir(parents=True)
    os.chown(homes / "noa", uid, uid)
    file = tmp_path / "cluster.toml"
    file.write_text(f'{hub.file.read_text()}\n[storage]\nhome = "{homes}/{{username}}"\n')
    free_name = partial(former_users.free_name, settings.load(file).model_copy(update={"nodes": ()}), hub.paths)
    with pytest.raises(NotAllowed, match="noa is still a user of the hub"):
        free_name("noa")
    token = chief.cookies.get("_xsrf", path="/hub/")
    assert chief.delete("/hub/api/users/noa", headers={"X-XSRFToken": str(token)}).status_code == 204
    page = sign_in(hub, "6002")[1]
    assert page.status_code == 403
    assert "`gpuhub user free noa`" in html.unescape(page.text)
    assert sign_in(hub, "6001")[1].status_code == 200, "the same account comes back to its files"
    chief.delete("/hub/api/users/noa", headers={"X-XSRFToken": str(token)})
    assert f"The home is {homes}/noa~{uid} now." in free_name("noa")
    assert [home.name for home in homes.iterdir()] == [f"noa~{uid}"]
    assert sign_in(hub, "6002")[1].status_code == 200
    assert sign_in(hub, "6001")[1].status_code == 403
    assert allocate_uid(hub.paths.state, UID_FIRST, "noa") != uid
    stored = json.loads((hub.paths.state / "login-accounts.json").read_text())
    assert stored[f"oidc {provider.issuer}"]["noa"] == "6002"
    assert (hub.paths.state / "login-accounts.json").stat().st_mode & 0o077 == 0


@pytest.fixture
def account() -> Iterator[pwd.struct_passwd]:
    """An account of this machine with a home and a group that a stranger would like to have."""
    subprocess.run(["useradd", "--create-home", LOCAL], check=True)
    try:
        yield pwd.getpwnam(LOCAL)
    finally:
        subprocess.run(["userdel", "--remove", LOCAL], check=False, capture_output=True)


def test_name_at_the_provider_is_not_the_account_of_that_name(
    hub: LoginHub, provider: Provider, account: pwd.struct_passwd
) -> None:
    """A member of the group takes the free name of a local account, logs in, and gets neither its UID nor its home."""
    provider.has("8001", LOCAL, groups=["lab people"])
    browser, page = sign_in(hub, "8001")
    assert (page.status_code, find_user(browser)) == (200, LOCAL)
    hub.file.write_text(hub.file.read_text().replace("[login]", f"uid_first = {UID_FIRST}\n[login]", 1))
    cluster = settings.load(hub.file)
    assert cluster.storage.home == "/home/{username}"
    identity = find_identity(cluster.users, hub.paths.state, LOCAL)
    assert (identity.uid >= UID_FIRST, identity.groups) == (True, ())
    with pytest.raises(SetupError, match="belongs to the head node's account"):
        asyncio.run(prepare_user(cluster.users, cluster.storage, hub.paths.state, LOCAL))
    assert Path(account.pw_dir).stat().st_uid == account.pw_uid
    line = f'`{LOCAL} = "{LOCAL}"` below [users.accounts]'
    assert line in run_failing_up(hub)
    assert not Supervisor(hub.paths).is_running()
    hub.file.write_text(hub.file.read_text().replace("[login]", f'[users.accounts]\n{LOCAL} = "{LOCAL}"\n[login]', 1))
    cluster = settings.load(hub.file)
    named = asyncio.run(prepare_user(cluster.users, cluster.storage, hub.paths.state, LOCAL))
    assert (named.uid, named.gid) == (account.pw_uid, account.pw_gid)


def test_hub_restarts_with_new_settings_and_unreachable_provider(
    hub: LoginHub, provider: Provider, tmp_path: Path
) -> None:
    """The hub restarts without the provider and uses its last configuration; revoked rights are gone."""
    provider.has("1001", "Ada")
    ada, _ = sign_in(hub, "1001")
    headers = {"X-XSRFToken": str(ada.cookies.get("_xsrf", path="/hub/"))}
    token = ada.post("/hub/api/users/ada/tokens", headers=headers, json={}).json()["token"]
    script = {"url": f"{hub.url}/hub/api/user", "headers": {"Authorization": f"Bearer {token}"}, "trust_env": False}
    assert httpx.get(**script).json()["name"] == "ada"
    provider.has("7001", "uma", groups=["chiefs", "lab people"])
    browser, _ = sign_in(hub, "7001")
    assert model(browser)["admin"] is True
    was = hub.settings
    hub.stop()
    cache = hub.paths.state / "login-provider.json"
    away = provider.issuer.replace("localhost", "127.0.0.1").rpartition(":")[0] + ":9"
    cache.write_text(cache.read_text().replace(provider.issuer, away))
    hub.write(was.replace(provider.issuer, away).replace('["chiefs"]', "[]").replace('"ada"', '"ida"'))
    hub.start()
    assert find_user(ada) is None, "ada's browser, which was logged in"
    assert httpx.get(**script).status_code == 403
    assert model(browser)["admin"] is False
    assert browser.get("/hub/admin").status_code == 403
    page = hub.browser().get("/hub/login")
    assert "Sign in with 127.0.0.1" in page.text


def test_up_refuses_invalid_oidc_settings_before_start(provider: Provider, tmp_path: Path) -> None:
    """`gpuhub up` refuses a secret that others can read and a provider that never answered, and starts nothing."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    text = SETTINGS.format(issuer=provider.issuer, secret=secret, admin_groups="[]")
    with login_hub("ghoiup", text, start=False) as hub:
        assert "can be read by other users (mode 0644): chmod 600" in run_failing_up(hub)
        secret.chmod(0o600)
        away = "https://127.0.0.1:9"
        hub.write(text.replace(provider.issuer, away))
        assert f"login.issuer = '{away}' cannot be used: {away}/.well-known/openid-configuration" in run_failing_up(hub)
        assert not Supervisor(hub.paths).is_running()


def run_failing_up(hub: LoginHub) -> str:
    """Return the error of a failing `gpuhub up`."""
    command = [str(Path(sys.executable).with_name("gpuhub")), "up"]
    options = ["--instance", hub.paths.instance, "--cluster-file", str(hub.file)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done.stderr
