"""What is said before a start about names that are accounts of the head node as well."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from gpuhub.common.errors import SettingsError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.login import account_checks
from gpuhub.login.account_checks import check_accounts, find_ambiguous_accounts

#: The head node's accounts; ada's UID is that of new files.
ACCOUNTS = {"ada": os.getuid(), "labadmin": 1000, "Upper": 1001}
Cluster = Callable[[str, str, str], ClusterSettings]
GITHUB = "SECRET"


@pytest.fixture(autouse=True)
def _accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(names: Iterable[str] | None = None) -> dict[str, int]:
        return {name: uid for name, uid in ACCOUNTS.items() if names is None or name in set(names)}

    monkeypatch.setattr(account_checks, "find_ordinary_accounts", find)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setattr(Paths, "state", property(lambda _self: tmp_path))
    return Paths("ghtest")


def with_homes(cluster: ClusterSettings, home: str) -> ClusterSettings:
    return cluster.model_copy(update={"storage": cluster.storage.model_copy(update={"home": home})})


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        ('allowed = ["ada", "ben"]', ["ada"]),
        ('allowed = ["ben"]\nadmins = ["labadmin"]', ["labadmin"]),
        ('allowed_groups = ["lab"]', ["ada", "labadmin"]),
        ('allowed_groups = ["lab"]\naccounts = { ada = "ada", labadmin = false }', []),
    ],
)
def test_names_that_users_can_have(cluster: Cluster, users: str, expected: list[str]) -> None:
    """With groups of the provider, any member can take the name of any account."""
    assert list(find_ambiguous_accounts(cluster("github", users, GITHUB).users)) == expected


def test_logins_with_accounts_have_no_ambiguous_names(cluster: Cluster) -> None:
    assert find_ambiguous_accounts(cluster("pam", 'allowed_groups = ["lab"]', "").users) == {}


@pytest.mark.parametrize("known_by", ["allowed", "binding", "uids"])
def test_known_user_with_the_home_of_an_account_stops_the_start(
    cluster: Cluster, paths: Paths, tmp_path: Path, known_by: str
) -> None:
    """The line of cluster.toml that keeps UID and home is in the text, and either decision ends the refusal."""
    names = '"ada"' if known_by == "allowed" else '"ben"'
    users = f'allowed = [{names}]\nallowed_groups = ["lab"]\nuid_first = 20000'
    if known_by == "binding":
        (tmp_path / "login-accounts.json").write_text(
            json.dumps({"github": {"ada": "17"}, "gitlab": {"labadmin": "1"}})
        )
    if known_by == "uids":
        (tmp_path / "uids.json").write_text(json.dumps({"ada": 20000}))
    home = f"{tmp_path}/homes/{{username}}"
    settings = with_homes(cluster("github", users, GITHUB), home)
    assert "ada (UID" in check_accounts(settings, paths)[0], "without the home, a note is enough"
    (tmp_path / "homes/ada").mkdir(parents=True)
    with pytest.raises(SettingsError) as refusal:
        check_accounts(settings, paths)
    (line,) = str(refusal.value).splitlines()
    assert line.startswith(f"user ada: the home {tmp_path}/homes/ada is that account's")
    assert '`ada = "ada"` below [users.accounts]' in line
    decided = cluster("github", f"{users}\naccounts = {{ ada = false }}", GITHUB)
    check_accounts(with_homes(decided, home), paths)


def test_known_user_whose_home_is_not_seen_stops_the_start(cluster: Cluster, paths: Paths) -> None:
    settings = with_homes(
        cluster("github", 'allowed = ["ada"]\nuid_first = 20000', GITHUB), "nfs://nas/homes/{username}"
    )
    with pytest.raises(SettingsError, match="user ada: the head node does not see the home"):
        check_accounts(settings, paths)
    pam = with_homes(cluster("pam", 'allowed = ["ada"]', ""), "nfs://nas/homes/{username}")
    assert check_accounts(pam, paths) == []


def test_named_accounts_are_checked(cluster: Cluster, paths: Paths, tmp_path: Path) -> None:
    """An account that does not exist or is the system's stops the start; one that is still free at the provider is told."""
    wrong = cluster("github", 'allowed = ["ada"]\naccounts = { ada = "gpuhub-nobody-x", ben = "root" }', GITHUB)
    with pytest.raises(SettingsError) as refusal:
        check_accounts(wrong, paths)
    missing, system = str(refusal.value).splitlines()
    assert "gives ada the account gpuhub-nobody-x, which the head node does not have" in missing
    assert system.startswith("users.accounts.ben: user 'ben' has a system account")


def test_names_that_are_free_at_the_provider_are_told(
    cluster: Cluster, paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account_checks, "find_identity", lambda *_: None)
    settings = cluster("github", 'admins = ["eve"]\naccounts = { ada = "ada" }', GITHUB)
    note, admins = check_accounts(settings, paths)
    assert admins.startswith("Nobody has logged in yet as eve: ")
    assert note == "The account ada of this machine goes to the first account of the provider that logs in as ada"
    (tmp_path / "login-accounts.json").write_text(json.dumps({"github": {"ada": "17", "eve": "18"}}))
    assert check_accounts(settings, paths) == []
