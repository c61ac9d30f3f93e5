"""oauthenticator's classes with gpuhub's settings, on real providers' answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tornado.web import HTTPError
from traitlets.config import Config
from traitlets.utils.importstring import import_item

from gpuhub.common.errors import SettingsError
from gpuhub.common.paths import Paths
from gpuhub.login import kinds
from gpuhub.login.base import LoginRefused

IDP, OTHER_IDP = "https://idp.uni.edu/idp/shibboleth", "https://github.com/login/oauth/authorize"


@pytest.fixture
def build(cluster: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    """The authenticator as the hub has it; its provider answers with `answers`: path → (status, JSON)."""
    monkeypatch.setattr(Paths, "state", property(lambda _: tmp_path))

    def make(login: str, users: str, keys: str, answers: dict[str, tuple[int, Any]]) -> Any:
        settings = cluster(login, users, keys)
        traits = kinds.build_authenticator_settings(settings, Paths("ghunit"), "https://hub.lan")
        made = import_item(kinds.find_authenticator_class(settings))(config=Config(traits))
        made.asked = []

        async def fetch(request: Any, label: str = "", parse_json: bool = True, **_: Any) -> Any:
            made.asked.append(request.url)
            path = request.url.partition("://")[2].partition("/")[2].partition("?")[0]
            status, body = answers.get(path, (404, {"message": "Not Found"}))
            return body if parse_json else SimpleNamespace(code=status, body=json.dumps(body).encode())

        made.fetch = fetch
        return made

    return make


def log_in(authenticator: Any) -> dict[str, Any]:
    """Run JupyterHub's steps of a login after the provider accepted it."""

    async def run() -> dict[str, Any]:
        token = {"access_token": "t0ken", "token_type": "bearer", "scope": ""}
        model = await authenticator._token_to_auth_model(token)
        authenticator.authenticate = lambda *_: model
        model = await authenticator.get_authenticated_user(None, None)
        assert model is not None
        return model

    model = asyncio.run(run())
    assert "t0ken" not in (model["name"], *model["groups"])
    return {key: model[key] for key in ("name", "admin", "groups")}


def get_refusal(authenticator: Any) -> str:
    """Return the reason of a refused login."""
    with pytest.raises(LoginRefused) as error:
        log_in(authenticator)
    return str(error.value.jupyterhub_message)


GITHUB = {"login": "Ada-L", "id": 583231, "email": None, "type": "User"}


def test_github_by_name_and_by_organisation(build: Any) -> None:
    """Members count, invited users do not; only groups in the settings are requested."""
    users = 'allowed_groups = ["lab"]\nadmin_groups = ["lab:chiefs"]'
    answers = {
        "user": (200, GITHUB),
        "user/memberships/orgs/lab": (200, {"state": "active", "role": "member"}),
        "orgs/lab/teams/chiefs/memberships/Ada-L": (200, {"state": "active", "role": "member"}),
    }
    made = build("github", users, "SECRET", answers)
    assert log_in(made) == {"name": "ada-l", "admin": True, "groups": ["lab", "lab:chiefs"]}
    assert made.asked == [
        "https://api.github.com/user",
        "https://api.github.com/user/memberships/orgs/lab",
        "https://api.github.com/orgs/lab/teams/chiefs/memberships/Ada-L",
    ]
    answers["orgs/lab/teams/chiefs/memberships/Ada-L"] = (404, {})
    assert log_in(build("github", users, "SECRET", answers))["admin"] is False
    answers["user/memberships/orgs/lab"] = (200, {"state": "pending", "role": "member"})
    assert "ada-l may not use this hub" in get_refusal(build("github", users, "SECRET", answers))
    answers["user/memberships/orgs/lab"] = (502, {})
    with pytest.raises(HTTPError, match="503"):
        log_in(build("github", users, "SECRET", answers))


def test_github_name_that_changed_hands(build: Any) -> None:
    """The new owner of a GitHub name does not get the old owner's user."""
    answers = {"user": (200, GITHUB)}
    assert log_in(build("github", 'allowed = ["ada-l"]', "SECRET", answers))["name"] == "ada-l"
    answers["user"] = (200, GITHUB | {"id": 7})
    assert "belongs to another account" in get_refusal(build("github", 'allowed = ["ada-l"]', "SECRET", answers))


@pytest.mark.parametrize("issuer", ["", 'issuer = "https://git.example.org/"'])
def test_gitlab(build: Any, issuer: str) -> None:
    """Groups with their subgroups, from OpenID Connect's claims, which need no right to read anything else."""
    person = {"sub": "42", "nickname": "ada", "name": "Ada", "groups": ["lab", "lab/gpu", "private"]}
    made = build("gitlab", 'allowed_groups = ["lab/gpu"]', f"SECRET\n{issuer}", {"oauth/userinfo": (200, person)})
    assert log_in(made) == {"name": "ada", "admin": False, "groups": ["lab/gpu"]}
    host = "git.example.org" if issuer else "gitlab.com"
    assert made.asked == [f"https://{host}/oauth/userinfo"]
    assert made.authorize_url == f"https://{host}/oauth/authorize"
    assert made.scope == ["openid", "profile"]


GOOGLE = {"id": "1080", "email": "Ada@example.org", "verified_email": True, "hd": "example.org"}


@pytest.mark.parametrize(
    ("person", "keys", "users", "name"),
    [
        (GOOGLE, 'domains = ["example.org"]', 'allowed = ["ada"]', "ada"),
        (GOOGLE, 'domains = ["example.org"]', 'allowed_groups = ["example.org"]', "ada"),
        (GOOGLE, 'domains = ["example.org", "b.org"]', 'allowed = ["ada_example.org"]', "ada_example.org"),
        (GOOGLE, "", 'allowed = ["ada_example.org"]', "ada_example.org"),
        (GOOGLE | {"email": "ada@b.org"}, 'domains = ["example.org"]', 'allowed_groups = ["example.org"]', "ada_b.org"),
    ],
)
def test_google(build: Any, person: Any, keys: str, users: str, name: str) -> None:
    """With one domain the name is the part before the @; else it contains the domain."""
    made = build("google", users, f"SECRET\n{keys}", {"oauth2/v1/userinfo": (200, person)})
    assert log_in(made)["name"] == name


@pytest.mark.parametrize(
    ("person", "message"),
    [
        (GOOGLE | {"verified_email": False}, "has not verified"),
        ({key: value for key, value in GOOGLE.items() if key != "hd"}, "Only accounts of example.org"),
        (GOOGLE | {"hd": "evil.org", "email": "ada@evil.org"}, "Only accounts of example.org"),
        ({"verified_email": True}, "sent no email"),
        (GOOGLE | {"email": "a+b@example.org"}, "cannot be a user's name here"),
    ],
)
def test_google_refuses(build: Any, person: Any, message: str) -> None:
    """Accounts of other domains, and accounts without a verified domain."""
    keys = 'SECRET\ndomains = ["example.org"]'
    assert message in get_refusal(build("google", 'allowed = ["ada"]', keys, {"oauth2/v1/userinfo": (200, person)}))


CILOGON = {"sub": "http://cilogon.org/serverA/users/1", "idp": IDP, "eppn": "ada@uni.edu"}


def cilogon(build: Any, person: Any, keys: str, users: str) -> Any:
    return build("cilogon", users, f"SECRET\n{keys}", {"oauth2/userinfo": (200, person)})


def test_cilogon(build: Any) -> None:
    """By the identity provider; the name has no domain if there is only one provider."""
    single = f'idps = ["{IDP}"]'
    made = cilogon(build, CILOGON, f'{single}\ndomains = ["uni.edu"]', f'allowed_groups = ["{IDP}"]')
    assert log_in(made) == {"name": "ada", "admin": False, "groups": [IDP]}
    assert log_in(cilogon(build, CILOGON, single, 'allowed = ["ada_uni.edu"]'))["name"] == "ada_uni.edu"


@pytest.mark.parametrize(
    ("person", "keys", "message"),
    [
        (CILOGON | {"eppn": "ada@other.edu"}, f'idps = ["{IDP}"]\ndomains = ["uni.edu"]', "Only accounts of uni.edu"),
        ({"sub": "1", "idp": IDP, "email": "x"}, f'idps = ["{IDP}"]', "CILogon sent no eppn: it sent email, idp, sub"),
        (
            CILOGON | {"preferred_username": "ada"},
            f'idps = ["{IDP}", "{OTHER_IDP}"]\nusername_claim = "preferred_username"',
            "several identity providers may have such a name",
        ),
    ],
)
def test_cilogon_refuses(build: Any, person: Any, keys: str, message: str) -> None:
    """Names that accounts of several providers may have."""
    assert message in get_refusal(cilogon(build, person, keys, 'allowed = ["ada"]'))


def test_cilogon_of_another_identity_provider(build: Any) -> None:
    """The library's refusal."""
    with pytest.raises(HTTPError, match="403"):
        log_in(cilogon(build, CILOGON | {"idp": OTHER_IDP}, f'idps = ["{IDP}"]', 'allowed = ["ada"]'))


@pytest.mark.parametrize("login", ["github", "gitlab", "google", "cilogon"])
def test_environment_variables_do_not_change_the_settings(build: Any, monkeypatch: Any, login: str) -> None:
    """oauthenticator reads much from the environment; gpuhub's values come from cluster.toml."""
    for name in ("OAUTH_CLIENT_SECRET", "OAUTH_CALLBACK_URL", "OAUTH_CLIENT_ID", f"{login.upper()}_CLIENT_SECRET"):
        monkeypatch.setenv(name, "from-the-environment")
    monkeypatch.setenv("OAUTH_TLS_VERIFY", "0")
    made = build(login, 'allowed = ["ada"]', "SECRET" + (f'\nidps = ["{IDP}"]' if login == "cilogon" else ""), {})
    assert (made.client_id, made.client_secret) == ("gpuhub", "s3cret")
    assert made.oauth_callback_url == "https://hub.lan/hub/oauth_callback"
    assert made.validate_server_cert is True
    assert made.enable_pkce is True
    assert (made.allow_all, made.allow_existing_users, made.enable_auth_state) == (False, False, False)


def test_a_readable_secret_is_refused(build: Any, secret: Path) -> None:
    """A file may have changed between `gpuhub up` and the hub's start."""
    secret.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        build("github", 'allowed = ["ada"]', "SECRET", {})


@pytest.mark.parametrize("person", [{"email_verified": False}, {}, {"email_verified": "true"}])
def test_unverified_addresses_are_refused(person: Any) -> None:
    """An e-mail address is a name only if the provider has verified it."""
    from gpuhub.login.oauth import OidcAuthenticator

    made = OidcAuthenticator(username_claim="email", login_service="auth.example.org")
    with pytest.raises(LoginRefused, match="has not verified"):
        made.user_info_to_username({"sub": "1", "email": "ada@uni.edu", **person})
    assert made.user_info_to_username({"sub": "1", "email": "ada@uni.edu", "email_verified": True}) == "ada_uni.edu"
