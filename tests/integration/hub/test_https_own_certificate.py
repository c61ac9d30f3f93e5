"""HTTPS with an administrator's own certificate: one name for hub and notebooks, and a laptop's gpu-launch."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cryptography import x509

from gpu_launch.cli import main
from gpuhub.tls import authority
from tests.support.hub.served_hub import ServedHub
from tests.support.product import wait_for


class Campus:
    """A site's certificate authority, whose certificates are links to the newest ones as certbot's are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = authority.create_authority([], "campus", authority.utc_now())
        self._count = 0
        self.ca = folder / "campus.pem"
        self.ca.write_bytes(authority.encode_certificate(self._made.certificate))
        self.certificate, self.key = folder / "fullchain.pem", folder / "privkey.pem"
        self.issue()

    def issue(self) -> None:
        """Issue a new certificate, one file after the other."""
        self._count += 1
        pem = authority.issue_server_certificate(self._made, ["localhost"], authority.utc_now())
        key, begin, certificate = pem.partition(b"-----BEGIN CERTIFICATE-----")
        for link, content in ((self.certificate, begin + certificate), (self.key, key)):
            file = self._folder / f"{link.stem}{self._count}.pem"
            file.write_bytes(content)
            file.chmod(0o600)
            new = link.with_suffix(".new")
            new.symlink_to(file)
            new.replace(link)


@pytest.fixture(scope="module")
def campus(tmp_path_factory: pytest.TempPathFactory) -> Campus:
    return Campus(tmp_path_factory.mktemp("campus"))


@pytest.fixture(scope="module")
def hub(campus: Campus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A running hub with its proxy and broker."""
    files = f'certificate = "{campus.certificate}"\nkey = "{campus.key}"'
    # With internal TLS too: the proxy then has three certificates, and reloads the one for browsers.
    lines = f'hostnames = ["localhost"]\ninternal_tls = true\n{files}'
    served = ServedHub("ghgiven", tmp_path_factory.mktemp("hub"), lines, 18410)
    try:
        served.start()
        yield served
    finally:
        served.stop()


@dataclass(frozen=True)
class LoggedInUser:
    """A logged-in user."""

    client: httpx.Client
    #: Cookie name → the attributes of each of its `Set-Cookie` headers.
    given: dict[str, list[str]]


@pytest.fixture
def ada(hub: ServedHub, campus: Campus) -> Iterator[LoggedInUser]:
    """Ada, logged in through the form."""
    tls = ssl.create_default_context(cafile=str(campus.ca))
    with httpx.Client(base_url=f"https://localhost:{hub.port}", verify=tls, trust_env=False) as client:
        page = client.get("/hub/login")
        token = client.cookies["_xsrf"]
        assert page.status_code == 200
        done = client.post("/hub/login", data={"username": "ada", "password": hub.password, "_xsrf": token})
        assert done.status_code == 302, done.text
        lines = [line.split("; ") for line in done.headers.get_list("set-cookie")]
        yield LoggedInUser(client, {first.split("=")[0]: rest for first, *rest in lines})


def test_hub_cookie_is_sent_to_the_hub_only(ada: LoggedInUser) -> None:
    """The hub's cookie is not sent to notebooks, which are below /user/ of the same name."""
    assert {"Path=/hub/", "Secure", "HttpOnly", "SameSite=Lax"} <= set(ada.given["jupyterhub-hub-login"])
    assert {"Path=/", "Secure", "HttpOnly", "SameSite=Lax"} <= set(ada.given["jupyterhub-session-id"])
    assert {"Path=/hub/", "Secure", "SameSite=Lax"} <= set(ada.given["_xsrf"])
    assert not any(name.startswith("__Host-") for name in ada.given)


def test_a_laptop_logs_in(
    hub: ServedHub, campus: Campus, ada: LoggedInUser, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """gpu-launch trusts and remembers the authority's file that it is given, and without it names what is missing."""
    for name in ("GPUHUB_URL", "GPUHUB_TOKEN", "JUPYTERHUB_API_TOKEN", "GPUHUB_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    header = {"X-XSRFToken": ada.client.cookies["_xsrf"]}
    created = ada.client.post("/hub/api/users/ada/tokens", headers=header, json={"note": "laptop"})
    assert created.status_code == 201, created.text
    token = tmp_path / "token"
    token.write_text(created.json()["token"])
    words = ["login", f"https://localhost:{hub.port}", "--token-file", str(token)]
    assert main.run_command(words) == 1
    assert "give it with --ca FILE" in capsys.readouterr().err
    assert main.run_command([*words, "--ca", str(campus.ca)]) == 0
    assert "as ada." in capsys.readouterr().out
    assert main.run_command(["ps"]) == 0


def test_certificate_renewed_by_another_program(hub: ServedHub, campus: Campus) -> None:
    """The proxy uses a certificate that was renewed by replacing the links."""
    tls = ssl.create_default_context(cafile=str(campus.ca))

    def shown() -> x509.Certificate:
        with (
            socket.create_connection(("localhost", hub.port), timeout=10) as plain,
            tls.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            certificate = connection.getpeercert(binary_form=True)
            assert certificate is not None
            return x509.load_der_x509_certificate(certificate)

    old, pid = shown(), hub.pid("proxy")
    campus.issue()
    wait_for(lambda: shown() != old, "the new certificate")
    assert hub.pid("proxy") == pid
