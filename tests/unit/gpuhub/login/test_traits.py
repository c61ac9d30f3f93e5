"""Traits of authenticators that an administrator may set, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from jupyterhub.app import JupyterHub

from gpuhub.common.secrets import ensure_secrets
from gpuhub.config.settings import ClusterSettings
from gpuhub.config.users.users import LoginKind
from gpuhub.login import kinds, traits
from tests.support.paths import FolderPaths

#: ldap3 uses deprecated names of pyasn1.
pytestmark = pytest.mark.filterwarnings("ignore:(tag|type)Map is deprecated:DeprecationWarning")

DOCS = Path(__file__).parents[4] / "docs/jupyterhub.md"
LDAP = 'server = "ldaps://ldap.example.org"\nuser_dn = "uid={username},dc=example,dc=org"'
#: The keys that each login needs, without `oidc`, whose provider would be asked.
KEYS = {
    "password": "",
    "first-use": "",
    "pam": "",
    "ldap": LDAP,
    "github": "SECRET",
    "gitlab": "SECRET",
    "google": "SECRET",
    "cilogon": 'SECRET\nidps = ["https://idp.uni.edu/idp/shibboleth"]',
}


def _list_traits(cluster: Callable[..., ClusterSettings]) -> dict[str, set[str]]:
    """Return the configurable traits of each login's class."""
    keys: dict[str, str] = {**KEYS, "oidc": 'SECRET\nissuer = "https://auth.example.org"'}
    return {
        kind: set(kinds.load_authenticator_class(cluster(kind, keys=keys[kind])).class_traits(config=True))
        for kind in get_args(LoginKind)
    }


def test_each_trait_has_effect_or_is_refused(cluster: Callable[..., ClusterSettings]) -> None:
    """A new version of JupyterHub or of an authenticator may bring more of them."""
    existing = set().union(*_list_traits(cluster).values())
    assert existing == traits.EFFECTIVE | traits.REFUSED.keys()
    assert traits.EFFECTIVE & traits.REFUSED.keys() == set()


def test_only_an_older_name_is_refused_below_jupyterhub() -> None:
    """Of the traits of JupyterHub itself, which have effect."""
    assert traits.REFUSED.keys() & JupyterHub.class_traits(config=True).keys() == {"admin_users"}


@pytest.mark.parametrize("login", KEYS)
def test_a_value_that_gpuhubs_own_would_override_is_reported(
    cluster: Callable[..., ClusterSettings], tmp_path: Path, login: str
) -> None:
    """traitlets takes the value below the most special class, which is gpuhub's."""
    settings, paths = cluster(login, keys=KEYS[login]), FolderPaths(folder=tmp_path)
    ensure_secrets(paths)
    authenticator = kinds.load_authenticator_class(settings)
    config = kinds.build_authenticator_settings(settings, paths, "https://hub.lan")
    for name in config[authenticator.__name__]:
        mistakes = list(traits.list_mistakes(authenticator, {"Authenticator": {name: "x"}}, config))
        assert len(mistakes) == 1
        assert mistakes[0].startswith(f"c.Authenticator.{name} ")


def test_the_page_names_each_trait() -> None:
    """An administrator looks there first."""
    text = DOCS.read_text(encoding="utf-8")
    assert sorted(name for name in traits.EFFECTIVE | traits.REFUSED.keys() if f"`{name}`" not in text) == []
