"""User names, access rules, and checks of the login before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuhub.cli.main import main
from gpuhub.common.errors import InvalidRequest, NotAllowed, SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.login import accounts, kinds, oidc_discovery, rules
from gpuhub.login.accounts import AccountBindings
from tests.support.tls import make_certificate

ISSUER = "https://auth.example.org/o/gpuhub/"


def test_allowed_by_name_or_group_and_never_otherwise(cluster: Any) -> None:
    """Groups with limits alone allow no user; administrators of both kinds are allowed."""
    users = 'allowed = ["ada"]\nadmins = ["eve"]\nallowed_groups = ["lab"]\nadmin_groups = ["chiefs"]'
    rule = rules.build_rules(
        cluster("pam", users, "").model_copy(update={"groups": (SimpleNamespace(name="students"),)})
    )
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
    assert rule.filter_known(["lab", "students", "others"]) == {"lab", "students"}


def test_groups_of_nodes_and_profiles_are_known(cluster: Any) -> None:
    """The hub keeps them, although they let nobody in."""
    settings = cluster("pam", 'allowed = ["ada"]', "")
    profile = settings.profiles[0].model_copy(update={"groups": ("nlp",)})
    node = settings.nodes[0].model_copy(update={"groups": ("vision",)})
    rule = rules.build_rules(settings.model_copy(update={"profiles": (profile,), "nodes": (node,)}))
    assert rule.filter_known(["nlp", "vision", "others"]) == {"nlp", "vision"}
    assert not rule.decide("zoe", ("nlp", "vision")).allowed


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
def test_provider_names_become_user_names(value: str, domains: tuple[str, ...], name: str) -> None:
    """A provider's names become user names."""
    assert accounts.build_user_name(value, domains) == name


@pytest.mark.parametrize(
    "value",
    ["", None, 7, ["ada"], "../x", "$(id)", "ädä", "\N{KELVIN SIGN}ate", "1ada", "a" * 33, "a b", "ada\n", "@x"],
)
def test_invalid_names_are_refused(value: Any) -> None:
    """With the valid form; the name itself is shown shortened."""
    with pytest.raises(InvalidRequest) as error:
        accounts.build_user_name(value)
    assert len(str(error.value)) < 300
    assert str(error.value).isascii() or "…" in str(error.value)


#: What two different addresses and names of one provider look like.
_WORD = st.from_regex(r"[a-z][a-z0-9.-]{0,5}", fullmatch=True)
_DOMAIN = st.from_regex(r"[a-z][a-z0-9-]{0,4}\.[a-z]{2}", fullmatch=True)
_ADDRESS = st.builds("{}@{}".format, st.from_regex(r"[a-z][a-z0-9._-]{0,5}", fullmatch=True), _DOMAIN)


@settings(deadline=None)
@given(first=_ADDRESS, other=_ADDRESS)
def test_different_addresses_get_different_names(first: str, other: str) -> None:
    """Without a configured domain, the name keeps all of the address."""
    assert (accounts.build_user_name(first) == accounts.build_user_name(other)) == (first == other)


@settings(deadline=None)
@given(st.text(min_size=1), st.lists(_DOMAIN, max_size=2))
def test_any_provider_name_is_valid_or_refused(value: str, domains: list[str]) -> None:
    """For any text of a provider: a valid user name, or a refusal."""
    try:
        assert accounts.is_valid_name(accounts.build_user_name(value, domains))
    except InvalidRequest:
        assert not accounts.is_valid_name(value)


def test_user_name_belongs_to_one_account(tmp_path: Path) -> None:
    """The first account keeps the name until an administrator frees it, also when the hub gets another provider."""
    file = tmp_path / "accounts.json"
    here = AccountBindings(file, "github")
    here.bind("ada", "1")
    here.bind("ada", "1")
    with pytest.raises(NotAllowed, match="another account"):
        here.bind("ada", "2")
    here.bind("ada2", "1")
    with pytest.raises(NotAllowed, match="another account"):
        here.bind("ada", "2")  # who renames an account keeps what its old name has here
    there = AccountBindings(file, "oidc https://x")
    with pytest.raises(NotAllowed, match="the provider that this hub used before"):
        there.bind("ada", "2")
    assert AccountBindings.release(file, "ada")
    assert not AccountBindings.release(file, "nobody")
    there.bind("ada", "2")
    with pytest.raises(NotAllowed, match="used before"):
        here.bind("ada", "1")
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text()) == {"github": {"ada2": "1"}, "oidc https://x": {"ada": "2"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "no such file"),
        (lambda file: file.chmod(0o640), r"can be read by other users \(mode 0640\): chmod 600"),
        (lambda file: file.chmod(0o604), "can be read by other users"),
        (lambda file: file.write_text(" \n"), "is empty"),
        (lambda file: file.write_text("one\ntwo\n"), "one line"),
        (lambda file: file.write_text("x" * 5000), "one line"),
        (lambda file: file.write_bytes(b"\xff\x00"), "is not ASCII text"),
    ],
)
def test_unsafe_secret_files_are_refused(
    cluster: Any, secret: Path, change: Any, message: str, capsys: Any, tmp_path: Path
) -> None:
    """Refused by `gpuhub check` with the remedy, and without their content."""
    settings = cluster("github", keys="SECRET")
    assert kinds.read_client_secret(secret) == "s3cret"
    change(secret)
    with pytest.raises(SettingsError, match=message):
        kinds.check_files(settings)
    with pytest.raises(SystemExit):
        main(["check", "--cluster-file", str(tmp_path / "cluster.toml")])
    printed = capsys.readouterr().err
    assert "login.client_secret_file" in printed
    assert "s3cret" not in printed


def test_authority_file_must_contain_a_certificate(cluster: Any, tmp_path: Path) -> None:
    """A file without a certificate is refused, a file with one is accepted."""
    settings = cluster("gitlab", keys=f'SECRET\nca = "{tmp_path / "ca.pem"}"')
    with pytest.raises(SettingsError, match=r"login\.ca: .* no such file"):
        kinds.check_files(settings)
    (tmp_path / "ca.pem").write_text("none\n")
    with pytest.raises(SettingsError, match=r"login\.ca: .* the file has no certificate"):
        kinds.check_files(settings)
    make_certificate(tmp_path)[0].rename(tmp_path / "ca.pem")
    kinds.check_files(settings)
    before = kinds.build_fingerprint(settings)
    (tmp_path / "ca.pem").write_text("other\n")
    assert kinds.build_fingerprint(settings) != before


@pytest.mark.parametrize(
    ("login", "users", "keys", "message"),
    [
        ("pam", 'allowed = ["ada"]', 'issuer = "https://x"', r'login\.issuer has no meaning with users\.login = "pam"'),
        ("oidc", 'allowed = ["ada"]', "SECRET", r"login\.issuer is missing"),
        ("oidc", 'allowed = ["ada"]', f'SECRET\nissuer = "{ISSUER}.well-known/openid-configuration"', "leave out"),
        ("oidc", 'allowed = ["ada"]', 'SECRET\nissuer = "http://auth.example.org"', "an https:// address is needed"),
        ("ldap", 'allowed = ["ada"]', 'server = "ldaps://x"\nuser_dn = "uid=ada,dc=x"', r"put \{username\} in place"),
        ("ldap", 'allowed = ["ada"]', 'server = "ldaps://x"\nuser_dn = "uid={username},dc={x}"', "no other braces"),
        ("ldap", 'allowed = ["ada"]', 'server = "ldaps://x"\nuser_dn = "uid={username,dc=x"', "no other braces"),
        ("ldap", 'allowed = ["ada"]', 'server = "http://x"\nuser_dn = "uid={username}"', "is not an LDAP server"),
        (
            "ldap", 'allowed_groups = ["lab"]', 'server = "ldaps://x"\nuser_dn = "uid={username},dc=x"',
            r"login\.group_base is missing",
        ),
        ("github", 'allowed_groups = ["a/b"]', "SECRET", r"users\.allowed_groups: 'a/b' is not a group of GitHub"),
        ("google", 'admin_groups = ["chiefs@x.org"]', "SECRET", r"users\.admin_groups: 'chiefs@x\.org' is not a domain"),
        ("cilogon", 'allowed = ["ada"]', 'SECRET\nidps = ["uni.edu"]', "is not an entity id"),
        ("cilogon", 'allowed_groups = ["https://b"]', 'SECRET\nidps = ["https://a"]', r"is not in login\.idps"),
        ("first-use", 'allowed_groups = ["lab"]', "", "has no groups"),
        ("github", "", "SECRET", "no user could log in"),
    ],
)  # fmt: skip
def test_invalid_login_settings_are_refused(cluster: Any, login: str, users: str, keys: str, message: str) -> None:
    """Each error has its key and the remedy."""
    with pytest.raises(SettingsError, match=message):
        cluster(login, users, keys)


def test_groups_with_limits_may_have_provider_names(cluster: Any) -> None:
    """A group with limits may have the provider's name."""
    settings = cluster("github", 'allowed_groups = ["lab:gpu-people"]\n[[groups]]\nname = "lab:gpu-people"', "SECRET")
    assert rules.build_rules(settings).known_groups == {"lab:gpu-people"}


DOCUMENT = {
    "issuer": ISSUER,
    "authorization_endpoint": "https://auth.example.org/authorize",
    "token_endpoint": "https://auth.example.org/token",
    "userinfo_endpoint": "https://auth.example.org/userinfo",
}


def test_endpoints_are_parsed() -> None:
    """The provider's scopes, and its method for the secret."""
    endpoints = oidc_discovery.parse_endpoints(DOCUMENT, ISSUER)
    assert (endpoints.scopes, endpoints.basic_auth) == (("openid", "profile", "email"), True)
    additional = {
        "scopes_supported": ["groups", "openid", "x"],
        "token_endpoint_auth_methods_supported": ["client_secret_post"],
    }
    endpoints = oidc_discovery.parse_endpoints(DOCUMENT | additional, ISSUER.rstrip("/"))
    assert (endpoints.scopes, endpoints.basic_auth) == (("openid", "groups"), False)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a provider's description"),
        (DOCUMENT | {"issuer": "https://evil.example.org"}, "names itself 'https://evil"),
        ({key: value for key, value in DOCUMENT.items() if key != "token_endpoint"}, "names no token_endpoint"),
        (DOCUMENT | {"token_endpoint": "http://auth.example.org/token"}, "it must begin with https:"),
        (DOCUMENT | {"userinfo_endpoint": 7}, "names no userinfo_endpoint"),
    ],
)
def test_unusable_provider_is_refused_with_the_reason(document: Any, message: str) -> None:
    """Refused with the reason."""
    with pytest.raises(SetupError, match=message):
        oidc_discovery.parse_endpoints(document, ISSUER)


def test_cached_endpoints_are_used_while_the_provider_is_down(cluster: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The answer of an earlier start is used, and never that of another provider."""
    monkeypatch.setattr(Paths, "state", property(lambda _: tmp_path))
    away = "https://127.0.0.1:9/"
    settings = cluster("oidc", keys=f'SECRET\nissuer = "{away}"')
    kept = kinds.find_provider_cache(Paths("ghunit"))
    for text in ("{", json.dumps({"issuer": ISSUER, "document": DOCUMENT})):
        kept.write_text(text)
        with pytest.raises(SetupError, match=r"login\.issuer = .* cannot be used: https://127\.0\.0\.1:9/\.well-known"):
            kinds.check_login(settings, Paths("ghunit"))
    kept.write_text(json.dumps({"issuer": away, "document": DOCUMENT | {"issuer": away}}))
    assert "until the provider answers" in kinds.check_login(settings, Paths("ghunit"))[0]


@pytest.mark.parametrize(
    ("login", "keys", "expected"),
    [
        (
            "pam",
            "",
            ["Who can log in: ada, members of lab", "Password:       that of the user's account on this machine"],
        ),
        ("github", "SECRET", ["Who can log in: ada, members of lab", "https://hub.lan/hub/oauth_callback"]),
    ],
)
def test_description_of_the_login(cluster: Any, login: str, keys: str, expected: list[str]) -> None:
    """Names and groups, the kind of login, and the address to register."""
    settings = cluster(login, 'allowed = ["ada"]\nallowed_groups = ["lab"]', keys)
    text = "\n".join(kinds.describe_login(settings, Paths("ghunit"), "https://hub.lan"))
    assert all(line in text for line in expected), text
