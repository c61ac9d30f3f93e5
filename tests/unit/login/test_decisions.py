"""Who may log in under which name, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuhub.cli import main
from gpuhub.errors import InvalidRequest, NotAllowed, SettingsError, SetupError
from gpuhub.login import account_names, discovery, files, rules, start, values
from gpuhub.login.accounts import Accounts
from gpuhub.paths import Paths
from tests.support.tls import make_certificate

ISSUER = "https://auth.example.org/o/gpuhub/"


def test_allowed_by_name_or_group_and_never_otherwise(cluster: Any) -> None:
    """Groups that only have limits allow nobody; administrators of either kind are allowed."""
    users = 'allowed = ["ada"]\nadmins = ["eve"]\nallowed_groups = ["lab"]\nadmin_groups = ["chiefs"]'
    rule = rules.rules_of(cluster("pam", users, "").model_copy(update={"groups": (SimpleNamespace(name="students"),)}))
    decided = {
        (name, groups): (rule.decide(name, groups).allowed, rule.decide(name, groups).admin)
        for name in ("ada", "eve", "zoe")
        for groups in ((), ("lab",), ("chiefs",), ("students", "others"))
    }
    assert {key for key, (allowed, _) in decided.items() if not allowed} == {
        ("zoe", ()),
        ("zoe", ("students", "others")),
    }
    assert {key for key, (_, admin) in decided.items() if admin} == {
        *(("eve", groups) for groups in ((), ("lab",), ("chiefs",), ("students", "others"))),
        ("ada", ("chiefs",)),
        ("zoe", ("chiefs",)),
    }
    assert rule.known(["lab", "students", "others"]) == {"lab", "students"}


@pytest.mark.parametrize(
    ("value", "domains", "name"),
    [
        ("ada", (), "ada"),
        ("Ada-B.C", (), "ada-b.c"),
        ("ada@uni.edu", (), "ada_uni.edu"),
        ("Ada@Uni.edu", ("uni.edu",), "ada"),
        ("ada@other.edu", ("uni.edu",), "ada_other.edu"),
        ("ada@uni.edu", ("uni.edu", "other.edu"), "ada_uni.edu"),
    ],
)
def test_names(value: str, domains: tuple[str, ...], name: str) -> None:
    """What becomes of a provider's names."""
    assert account_names.name_here(value, domains) == name


@pytest.mark.parametrize(
    "value",
    ["", None, 7, ["ada"], "../x", "$(id)", "ädä", "\N{KELVIN SIGN}ate", "1ada", "a" * 33, "a b", "ada\n", "@x"],
)
def test_names_that_cannot_be(value: Any) -> None:
    """Refused with what would be right; what was there is shown, but not at length."""
    with pytest.raises(InvalidRequest) as error:
        account_names.name_here(value)
    assert len(str(error.value)) < 300
    assert str(error.value).isascii() or "…" in str(error.value)


#: What two different addresses and names of one provider look like.
_WORD = st.from_regex(r"[a-z][a-z0-9.-]{0,5}", fullmatch=True)
_DOMAIN = st.from_regex(r"[a-z][a-z0-9-]{0,4}\.[a-z]{2}", fullmatch=True)
_ADDRESS = st.builds("{}@{}".format, st.from_regex(r"[a-z][a-z0-9._-]{0,5}", fullmatch=True), _DOMAIN)


@settings(deadline=None)
@given(one=_ADDRESS, other=_ADDRESS)
def test_two_addresses_are_two_names(one: str, other: str) -> None:
    """Without a domain of its own, nothing is lost on the way to the name."""
    assert (account_names.name_here(one) == account_names.name_here(other)) == (one == other)


@settings(deadline=None)
@given(st.text(min_size=1), st.lists(_DOMAIN, max_size=2))
def test_every_name_is_valid(value: str, domains: list[str]) -> None:
    """Whatever a provider sends: a user's name, or a refusal."""
    try:
        assert account_names.is_valid(account_names.name_here(value, domains))
    except InvalidRequest:
        assert not account_names.is_valid(value)


def test_one_account_a_name(tmp_path: Path) -> None:
    """The first account keeps the name; another gets it once the user is deleted; providers have nothing in common."""
    file = tmp_path / "accounts.json"
    here = Accounts(file, "github")
    here.claim("ada", "1")
    here.claim("ada", "1")
    with pytest.raises(NotAllowed, match="another account"):
        here.claim("ada", "2")
    here.claim("ada2", "1")
    with pytest.raises(NotAllowed, match="another account"):
        here.claim("ada", "2")  # who renames an account keeps what its old name has here
    Accounts(file, "oidc https://x").claim("ada", "2")
    here.forget("ada")
    here.forget("nobody")
    here.claim("ada", "2")
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text()) == {"github": {"ada": "2", "ada2": "1"}, "oidc https://x": {"ada": "2"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "no such file"),
        (lambda file: file.chmod(0o640), r"can be read by others \(mode 0640\): chmod 600"),
        (lambda file: file.chmod(0o604), "can be read by others"),
        (lambda file: file.write_text(" \n"), "is empty"),
        (lambda file: file.write_text("one\ntwo\n"), "one line"),
        (lambda file: file.write_text("x" * 5000), "one line"),
        (lambda file: file.write_bytes(b"\xff\x00"), "no plain ASCII text"),
    ],
)
def test_secret_files(cluster: Any, secret: Path, change: Any, message: str, capsys: Any, tmp_path: Path) -> None:
    """Refused by `gpuhub check` with what would be right, and without what is in them."""
    settings = cluster("github", keys="SECRET")
    assert files.read_client_secret(secret) == "s3cret"
    change(secret)
    with pytest.raises(SettingsError, match=message):
        files.check_files(settings)
    with pytest.raises(SystemExit):
        main(["check", "--cluster-file", str(tmp_path / "cluster.toml")])
    printed = capsys.readouterr().err
    assert "login.client_secret_file" in printed
    assert "s3cret" not in printed


def test_authority_files(cluster: Any, tmp_path: Path) -> None:
    """A file without a certificate is refused, one with passes."""
    settings = cluster("gitlab", keys=f'SECRET\nca = "{tmp_path / "ca.pem"}"')
    with pytest.raises(SettingsError, match=r"login\.ca: .* no such file"):
        files.check_files(settings)
    (tmp_path / "ca.pem").write_text("none\n")
    with pytest.raises(SettingsError, match=r"login\.ca: .* no certificate in there"):
        files.check_files(settings)
    make_certificate(tmp_path)[0].rename(tmp_path / "ca.pem")
    files.check_files(settings)
    before = start.fingerprint(settings)
    (tmp_path / "ca.pem").write_text("other\n")
    assert start.fingerprint(settings) != before


@pytest.mark.parametrize(
    ("login", "users", "keys", "message"),
    [
        ("pam", 'allowed = ["ada"]', 'issuer = "https://x"', r'login\.issuer means nothing with users\.login = "pam"'),
        ("oidc", 'allowed = ["ada"]', "SECRET", r"login\.issuer is missing"),
        ("oidc", 'allowed = ["ada"]', f'SECRET\nissuer = "{ISSUER}.well-known/openid-configuration"', "leave out"),
        ("oidc", 'allowed = ["ada"]', 'SECRET\nissuer = "http://auth.example.org"', "an https:// address is needed"),
        ("ldap", 'allowed = ["ada"]', 'server = "ldaps://x"\nuser_dn = "uid=ada,dc=x"', r"put \{username\} where"),
        ("ldap", 'allowed = ["ada"]', 'server = "ldaps://x"\nuser_dn = "uid={username},dc={x}"', "no other braces"),
        ("ldap", 'allowed = ["ada"]', 'server = "ldaps://x"\nuser_dn = "uid={username,dc=x"', "no other braces"),
        ("ldap", 'allowed = ["ada"]', 'server = "http://x"\nuser_dn = "uid={username}"', "is no LDAP server"),
        (
            "ldap", 'allowed_groups = ["lab"]', 'server = "ldaps://x"\nuser_dn = "uid={username},dc=x"',
            r"login\.group_base is missing",
        ),
        ("github", 'allowed_groups = ["a/b"]', "SECRET", r"users\.allowed_groups: 'a/b' is no group of GitHub"),
        ("google", 'admin_groups = ["chiefs@x.org"]', "SECRET", r"users\.admin_groups: 'chiefs@x\.org' is no domain"),
        ("cilogon", 'allowed = ["ada"]', 'SECRET\nidps = ["uni.edu"]', "is no entity id"),
        ("cilogon", 'allowed_groups = ["https://b"]', 'SECRET\nidps = ["https://a"]', r"is not in login\.idps"),
        ("first-use", 'allowed_groups = ["lab"]', "", "knows no groups"),
        ("github", "", "SECRET", "nobody could log in"),
    ],
)  # fmt: skip
def test_mistakes(cluster: Any, login: str, users: str, keys: str, message: str) -> None:
    """Each is named with its key and what would be right."""
    with pytest.raises(SettingsError, match=message):
        cluster(login, users, keys)


def test_groups_have_the_providers_names(cluster: Any) -> None:
    """A group with limits may be called as the provider calls it."""
    settings = cluster("github", 'allowed_groups = ["lab:gpu-people"]\n[[groups]]\nname = "lab:gpu-people"', "SECRET")
    assert rules.rules_of(settings).known_groups == {"lab:gpu-people"}


DOCUMENT = {
    "issuer": ISSUER,
    "authorization_endpoint": "https://auth.example.org/authorize",
    "token_endpoint": "https://auth.example.org/token",
    "userinfo_endpoint": "https://auth.example.org/userinfo",
}


def test_what_a_provider_says() -> None:
    """Scopes that it has, and the way of the secret that it knows."""
    found = discovery.parse(DOCUMENT, ISSUER)
    assert (found.scopes, found.basic_auth) == (("openid", "profile", "email"), True)
    more = {
        "scopes_supported": ["groups", "openid", "x"],
        "token_endpoint_auth_methods_supported": ["client_secret_post"],
    }
    found = discovery.parse(DOCUMENT | more, ISSUER.rstrip("/"))
    assert (found.scopes, found.basic_auth) == (("openid", "groups"), False)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "something else"),
        (DOCUMENT | {"issuer": "https://evil.example.org"}, "calls itself 'https://evil"),
        ({key: value for key, value in DOCUMENT.items() if key != "token_endpoint"}, "names no token_endpoint"),
        (DOCUMENT | {"token_endpoint": "http://auth.example.org/token"}, "where https:// is needed"),
        (DOCUMENT | {"userinfo_endpoint": 7}, "names no userinfo_endpoint"),
    ],
)
def test_a_provider_that_cannot_be_used(document: Any, message: str) -> None:
    """Refused with what is wrong with it."""
    with pytest.raises(SetupError, match=message):
        discovery.parse(document, ISSUER)


def test_a_provider_that_is_down(cluster: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """What it said before is used, once it has said something; what another one said never is."""
    monkeypatch.setattr(Paths, "state", property(lambda _: tmp_path))
    away = "https://127.0.0.1:9/"
    settings = cluster("oidc", keys=f'SECRET\nissuer = "{away}"')
    kept = values.provider_cache(Paths("ghunit"))
    for text in ("{", json.dumps({"issuer": ISSUER, "document": DOCUMENT})):
        kept.write_text(text)
        with pytest.raises(SetupError, match=r"login\.issuer = .* cannot be used: https://127\.0\.0\.1:9/\.well-known"):
            start.check(settings, Paths("ghunit"))
    kept.write_text(json.dumps({"issuer": away, "document": DOCUMENT | {"issuer": away}}))
    assert "before the provider answers" in start.check(settings, Paths("ghunit"))[0]


@pytest.mark.parametrize(
    ("login", "keys", "told"),
    [
        ("pam", "", ["Who can log in: ada, members of lab", "Password:       that of their account on this machine"]),
        ("github", "SECRET", ["Who can log in: ada, members of lab", "https://hub.lan/hub/oauth_callback"]),
    ],
)
def test_farewell(cluster: Any, login: str, keys: str, told: list[str]) -> None:
    """Who can log in and how, and what is to be registered."""
    settings = cluster(login, 'allowed = ["ada"]\nallowed_groups = ["lab"]', keys)
    text = "\n".join(start.describe(settings, Paths("ghunit"), "https://hub.lan"))
    assert all(line in text for line in told), text
