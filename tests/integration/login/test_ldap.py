"""Login with the accounts of a real LDAP server, over TLS, with a real hub behind its real proxy."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tornado.web import HTTPError
from traitlets.config import Config

from gpuhub.common.paths import Paths
from gpuhub.config.settings import load
from gpuhub.login import kinds
from tests.support.hub.login_hub import SETTINGS, LoginHub, find_user, free_ports, login_hub, sign_in
from tests.support.product import wait_for
from tests.support.tls import make_certificate

#: ldap3 uses deprecated names of pyasn1 and ssl.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ldap3.*")

INSTANCE = "ghldap"
SERVER = """
include /etc/ldap/schema/core.schema
include /etc/ldap/schema/cosine.schema
include /etc/ldap/schema/inetorgperson.schema
include /etc/ldap/schema/nis.schema
modulepath /usr/lib/ldap
moduleload back_mdb
pidfile {folder}/pid
TLSCACertificateFile {certificate}
TLSCertificateFile {certificate}
TLSCertificateKeyFile {key}
# No password without TLS.
security simple_bind=64
database mdb
directory {folder}/data
suffix "dc=closet"
rootdn "cn=root,dc=closet"
access to attrs=userPassword by anonymous auth by * none
access to * by users read by * none
"""
PEOPLE = """
dn: dc=closet
objectClass: dcObject
objectClass: organization
o: closet
dc: closet

dn: ou=people,dc=closet
objectClass: organizationalUnit
ou: people

dn: ou=groups,dc=closet
objectClass: organizationalUnit
ou: groups
"""
PERSON = """
dn: uid={name},ou=people,dc=closet
objectClass: inetOrgPerson
uid: {name}
cn: {name}
sn: {name}
userPassword: {name}-password
"""
GROUPS = """
dn: cn=GPU people,ou=groups,dc=closet
objectClass: groupOfNames
cn: GPU people
member: uid=ben,ou=people,dc=closet

dn: cn=chiefs,ou=groups,dc=closet
objectClass: posixGroup
cn: chiefs
gidNumber: 2001
memberUid: cleo
"""
USERS = """
[users]
login = "ldap"
allowed = ["ada"]
allowed_groups = ["GPU people"]
admin_groups = ["chiefs"]
[login]
server = "{server}"
user_dn = "uid={{username}},ou=people,dc=closet"
group_base = "ou=groups,dc=closet"
ca = "{ca}"
"""


@dataclass(frozen=True)
class Directory:
    """A running LDAP server."""

    plain: str
    tls: str
    authority: Path

    def settings(self, server: str, authority: Path | None = None) -> str:
        """Return the tables of cluster.toml for this server."""
        return USERS.format(server=server, ca=authority or self.authority)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    folder = tmp_path_factory.mktemp("ldap")
    certificate, key = make_certificate(folder)
    (folder / "data").mkdir()
    configuration, people = folder / "slapd.conf", folder / "people.ldif"
    configuration.write_text(SERVER.format(folder=folder, certificate=certificate, key=key))
    names = ("ada", "ben", "cleo", "zoe")
    people.write_text(PEOPLE + "".join(PERSON.format(name=name) for name in names) + GROUPS)
    subprocess.run(["slapadd", "-f", str(configuration), "-l", str(people)], check=True, capture_output=True)
    ports = free_ports(2)
    server = Directory(f"ldap://127.0.0.1:{ports[0]}", f"ldaps://127.0.0.1:{ports[1]}", certificate)
    process = subprocess.Popen(
        ["slapd", "-d", "0", "-f", str(configuration), "-h", f"{server.plain} {server.tls}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ask = ["ldapwhoami", "-x", "-H", server.plain]
        wait_for(lambda: subprocess.run(ask, check=False, capture_output=True).returncode == 0 or None, "slapd")
        yield server
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def hub(directory: Directory) -> Iterator[LoginHub]:
    with login_hub(INSTANCE, directory.settings(directory.plain)) as running:
        yield running
        assert "-password" not in running.log
        assert "Traceback" not in running.log, running.log[running.log.index("Traceback") - 500 :]


def authenticator(directory: Directory, folder: Path, settings: str) -> Any:
    """Return an authenticator as the hub would configure it."""
    from gpuhub.login.ldap import LdapAuthenticator  # not while tests are collected: see `pytestmark`

    file = folder / "cluster.toml"
    file.write_text(SETTINGS.format(top=settings, ports=free_ports(4)))
    traits = kinds.build_authenticator_settings(load(file), Paths(INSTANCE), "http://127.0.0.1:8000")
    return LdapAuthenticator(config=Config(traits))


def ask(login: Any, name: str, password: str) -> Any:
    """Authenticate as the login form does."""
    return asyncio.run(login.authenticate(SimpleNamespace(), {"username": name, "password": password}))


@pytest.mark.parametrize(("name", "admin"), [("ada", False), ("ben", False), ("cleo", True), ("Ada", False)])
def test_correct_password(hub: LoginHub, name: str, admin: bool) -> None:
    """A user logs in by name, by group and as an administrator by group; capitals make no other user."""
    browser = hub.browser()
    page = sign_in(browser, name, f"{name.lower()}-password")
    assert page.status_code == 200, page.text
    assert find_user(browser) == name.lower()
    assert browser.get("/hub/admin").status_code == (200 if admin else 403)


@pytest.mark.parametrize(
    ("name", "password"),
    [
        ("ada", "ben-password"),
        ("ada", ""),
        ("nobody", "nobody-password"),
        ("*", "ada-password"),
        ("ada,ou=people,dc=closet", "ada-password"),
        ("ada", "x" * 5000),
        ("ada", "ada-password\0"),
    ],
)
def test_wrong_password(hub: LoginHub, name: str, password: str) -> None:
    """A wrong password gets the same message whether or not the account exists."""
    browser = hub.browser()
    page = sign_in(browser, name, password)
    assert page.status_code == 403
    assert "Wrong user name or password" in page.text or "cannot be a user" in page.text
    assert find_user(browser) is None


def test_correct_password_without_access(hub: LoginHub) -> None:
    """An account of the directory that no setting allows is refused with that reason."""
    page = sign_in(hub.browser(), "zoe", "zoe-password")
    assert page.status_code == 403
    assert "zoe may not use this hub" in page.text
    assert hub.user("zoe") is None


def test_ldaps_login(directory: Directory, tmp_path: Path) -> None:
    """`ldaps://` works as StartTLS does."""
    login = authenticator(directory, tmp_path, directory.settings(directory.tls))
    assert ask(login, "ben", "ben-password") == {"name": "ben", "groups": ["GPU people"]}
    assert ask(login, "ben", "wrong") is None


@pytest.mark.parametrize("way", ["plain", "tls"])
def test_ldap_server_of_an_unknown_authority_is_refused(directory: Directory, tmp_path: Path, way: str) -> None:
    """No password is sent to a server whose certificate cannot be verified."""
    (tmp_path / "other").mkdir()
    other, _ = make_certificate(tmp_path / "other")
    login = authenticator(directory, tmp_path, directory.settings(getattr(directory, way), other))
    with pytest.raises(HTTPError) as error:
        ask(login, "ben", "ben-password")
    assert error.value.status_code == 503


def test_unresponsive_ldap_server_is_reported(directory: Directory, tmp_path: Path) -> None:
    """The page reports quickly that the server does not answer."""
    login = authenticator(directory, tmp_path, directory.settings("ldap://127.0.0.1:9"))
    with pytest.raises(HTTPError) as error:
        ask(login, "ben", "ben-password")
    assert error.value.status_code == 503
