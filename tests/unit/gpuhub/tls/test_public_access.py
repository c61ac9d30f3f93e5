"""The hub towards browsers: its address, cookies and headers, and the files of its certificate."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from pydantic import ValidationError

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.machines.network import HubSettings
from gpuhub.config.settings import ClusterSettings
from gpuhub.tls import authority, public_access
from gpuhub.tls.internal_certificates import CertificateFiles
from tests.support.paths import FolderPaths

HEAD = "192.168.1.20"
NOW = datetime.now(UTC).replace(microsecond=0)


def hub(**settings: Any) -> HubSettings:
    return HubSettings.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "url", "canonical"),
    [
        ({}, "http://127.0.0.1:8000", ""),
        ({"port": 80}, "http://127.0.0.1", ""),
        ({"bind": "0.0.0.0"}, f"https://{HEAD}:8000", ""),
        ({"bind": "::"}, f"https://{HEAD}:8000", ""),
        ({"bind": "fd00::20", "port": 443}, "https://[fd00::20]", ""),
        ({"bind": "10.0.0.7"}, "https://10.0.0.7:8000", ""),
        ({"bind": "0.0.0.0", "hostnames": ["gpuhub.lan", "rig1.lan"], "port": 443}, "https://gpuhub.lan", "same"),
        ({"bind": "0.0.0.0", "hostnames": ["gpuhub.lan"]}, "https://gpuhub.lan:8000", "same"),
        ({"https": "proxy", "url": "https://gpu.example.org/"}, "https://gpu.example.org", "same"),
        ({"https": "local", "hostnames": ["gpuhub.lan"]}, "https://gpuhub.lan:8000", "same"),
    ],
)
def test_public_and_canonical_urls(settings: dict[str, Any], url: str, canonical: str) -> None:
    """Default ports are left out. Browsers are led to it only where the settings name it: tunnels have other ports."""
    assert public_access.build_public_url(hub(**settings), HEAD) == url
    assert public_access.build_canonical_url(hub(**settings), HEAD) == (url if canonical else "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"subdomains": True}, "needs hostnames"),
        ({"subdomains": True, "hostnames": ["gpuhub"]}, "below a name without a dot"),
        ({"subdomains": True, "hostnames": ["192.168.1.20"]}, "below an address"),
        ({"https": "files", "certificate": "/c.pem", "key": "/k.pem"}, "needs hostnames: the names in the cert"),
        ({"url": "https://gpuhub.lan"}, 'does not go with https = "off": write https = "proxy"'),
        ({"https": "proxy", "url": "http://gpuhub.lan"}, 'does not go with https = "proxy"'),
        ({"bind": "0.0.0.0", "url": "http://gpuhub.lan"}, 'does not go with https = "local"'),
        ({"bind": "0.0.0.0", "subdomains": True, "hostnames": ["a.lan"], "url": "https://b.lan"}, "must be its name"),
    ],
)
def test_contradictory_https_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        hub(**settings)


def test_certificate_names() -> None:
    """Names in the settings come first, then all names and addresses of the machine."""
    found = hub(bind="0.0.0.0", hostnames=["gpuhub.lan"], subdomains=True, url="https://gpuhub.lan:8443")
    assert public_access.list_configured_names(found) == ["gpuhub.lan", "*.gpuhub.lan"]
    names = public_access.list_certificate_names(found, HEAD, "Rig1.example.org")
    assert names == [
        "gpuhub.lan", "*.gpuhub.lan", "rig1.example.org", "rig1.local", "localhost", "127.0.0.1", HEAD,
    ]  # fmt: skip
    bound = public_access.list_certificate_names(hub(bind="10.0.0.7"), HEAD, "bad_name")
    assert bound == ["localhost", "127.0.0.1", HEAD, "10.0.0.7"]
    assert public_access.list_configured_names(hub(https="proxy", url="https://gpu.example.org")) == ["gpu.example.org"]


def test_cookie_attributes() -> None:
    """`Secure` needs HTTPS, and `__Host-` needs a separate name for each notebook."""
    assert public_access.build_cookie_options(hub()) == {"samesite": "Lax"}
    assert public_access.build_cookie_options(hub(bind="0.0.0.0")) == {"samesite": "Lax", "secure": True}
    assert public_access.build_cookie_options(hub(https="proxy", url="https://g.lan")) == {
        "samesite": "Lax",
        "secure": True,
    }
    apart = {"hostnames": ["gpuhub.lan"], "subdomains": True}
    assert public_access.has_host_prefix(hub(bind="0.0.0.0", **apart))
    assert not public_access.has_host_prefix(hub(**apart)), "a __Host- cookie needs HTTPS"
    assert not public_access.has_host_prefix(hub(bind="0.0.0.0")), "it would be sent to every notebook that is visited"


@pytest.mark.parametrize(
    ("settings", "transport"),
    [
        ({}, None),
        ({"bind": "0.0.0.0", "hostnames": ["gpuhub.lan"], "port": 443}, None),
        ({"certificate": "/c", "key": "/k", "hostnames": ["gpu.example.org"]}, None),
        ({"certificate": "/c", "key": "/k", "hostnames": ["gpu.example.org"], "port": 443}, "max-age=31536000"),
        ({"https": "proxy", "url": "https://gpu.example.org"}, "max-age=31536000"),
        ({"https": "proxy", "url": "https://gpu.example.org:8443"}, None),
        (
            {"https": "proxy", "url": "https://g.org", "hostnames": ["g.org"], "subdomains": True},
            "max-age=31536000; includeSubDomains",
        ),
    ],
)
def test_strict_transport_security_header(settings: dict[str, Any], transport: str | None) -> None:
    """Strict transport holds for all ports of a name: only for a name of the hub's own that browsers know."""
    assert public_access.build_headers(hub(**settings)).get("Strict-Transport-Security") == transport


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return FolderPaths("ghunit", tmp_path)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head node of this name."""
    monkeypatch.setattr("socket.gethostname", lambda: "rig1")


def cluster(**hub: Any) -> ClusterSettings:
    return ClusterSettings.model_validate(
        {
            "nodes": [{"name": "rig1", "address": "127.0.0.1", "docker": "unix:///run/docker.sock"}],
            "profiles": [{"name": "cpu", "title": "No GPU", "gpu_count": 0}],
            "users": {"login": "password", "allowed": ["ada"]},
            "hub": hub,
        }
    )


LAN = {"bind": "0.0.0.0", "hostnames": ["gpuhub.lan"], "subdomains": True}


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_local_authority_is_created_once(paths: Paths) -> None:
    """All users may read the certificate, which goes to the Macs; only root may read the keys."""
    ready = public_access.ensure_certificate(cluster(**LAN), paths, HEAD)
    assert ready is not None and ready.authority is not None
    assert authority.list_alternative_names(ready.certificate) == [
        "gpuhub.lan", "*.gpuhub.lan", "rig1", "rig1.local", "localhost", "127.0.0.1", HEAD,
    ]  # fmt: skip
    assert mode(paths.authority) == 0o644
    assert mode(paths.secrets) == 0o700
    assert mode(paths.secrets / "authority.key") == mode(paths.secrets / "https.pem") == 0o600
    assert b"PRIVATE" not in paths.authority.read_bytes()
    assert len(ready.news) == 2

    before = {file: file.read_bytes() for file in (paths.authority, paths.secrets / "https.pem")}
    again = public_access.ensure_certificate(cluster(**LAN), paths, HEAD)
    assert again is not None
    assert again.news == ()
    assert {file: file.read_bytes() for file in before} == before
    assert sorted(file.name for file in paths.secrets.iterdir()) == ["authority.key", "https.pem"]


def test_certificate_is_renewed_before_it_expires(paths: Paths) -> None:
    """Less than 30 days before its end, or with other names, the same authority signs a new one."""
    first = public_access.ensure_certificate(cluster(**LAN), paths, HEAD, NOW)
    assert first is not None
    ends = first.certificate.not_valid_after_utc
    early = public_access.ensure_certificate(cluster(**LAN), paths, HEAD, ends - timedelta(days=31))
    assert early is not None and early.certificate == first.certificate
    renewed = public_access.ensure_certificate(cluster(**LAN), paths, HEAD, ends - timedelta(days=29))
    assert renewed is not None and renewed.authority == first.authority
    assert renewed.news == (f"a new certificate was created: it ends on {ends:%Y-%m-%d}",)
    assert mode(paths.secrets / "https.pem") == 0o600
    moved = public_access.ensure_certificate(cluster(**LAN), paths, "192.168.7.1", NOW)
    assert moved is not None
    assert moved.news == ("a new certificate was created: the hub's names or addresses have changed",)
    assert authority.is_valid_for(moved.certificate, "192.168.7.1")


def test_expiring_authority_is_replaced(paths: Paths) -> None:
    first = public_access.ensure_certificate(cluster(**LAN), paths, HEAD, NOW - timedelta(days=3625))
    now = public_access.ensure_certificate(cluster(**LAN), paths, HEAD, NOW)
    assert first is not None and now is not None
    assert first.authority != now.authority
    assert any("browsers must be told to trust it" in news for news in now.news)


def test_ends_of_certificates_are_read(paths: Paths) -> None:
    """By name; one that is missing or unreadable has none."""
    assert public_access.read_certificate_ends(cluster(**LAN), paths) == {}
    made = public_access.ensure_certificate(cluster(**LAN), paths, HEAD, NOW)
    assert made is not None
    assert made.authority is not None
    ends = public_access.read_certificate_ends(cluster(**LAN), paths)
    assert ends == {
        "https": made.certificate.not_valid_after_utc.timestamp(),
        "authority": made.authority.not_valid_after_utc.timestamp(),
    }
    paths.authority.write_text("no certificate")
    assert public_access.read_certificate_ends(cluster(**LAN), paths).keys() == {"https"}
    assert public_access.read_certificate_ends(cluster(), paths) == {}


def test_names_outside_the_authority_constraints(paths: Paths) -> None:
    """A name on the internet that was added later is refused with a remedy; one of the machine's own is omitted."""
    public_access.ensure_certificate(cluster(**LAN), paths, HEAD)
    with pytest.raises(SetupError, match=r"'gpu\.example\.org': the authority in .* was made for other names.*Remove"):
        public_access.ensure_certificate(cluster(bind="0.0.0.0", hostnames=["gpu.example.org"]), paths, HEAD)
    outside = public_access.ensure_certificate(cluster(**LAN), paths, "203.0.113.9")
    assert outside is not None
    assert not authority.is_valid_for(outside.certificate, "203.0.113.9")
    for file in (paths.authority, paths.secrets / "authority.key"):
        file.unlink()
    fresh = public_access.ensure_certificate(cluster(bind="0.0.0.0", hostnames=["gpu.example.org"]), paths, HEAD)
    assert fresh is not None and authority.is_valid_for(fresh.certificate, "gpu.example.org")


@pytest.mark.parametrize("gone", ["authority.pem", "secrets/authority.key"])
def test_incomplete_authority_is_refused(paths: Paths, gone: str) -> None:
    """A new one in silence would lock every browser out."""
    public_access.ensure_certificate(cluster(**LAN), paths, HEAD)
    (paths.state / gone).unlink()
    with pytest.raises(SetupError, match="exists: restore the other file, or remove"):
        public_access.ensure_certificate(cluster(**LAN), paths, HEAD)


def test_unreadable_authority_is_refused_and_certificate_recreated(paths: Paths) -> None:
    public_access.ensure_certificate(cluster(**LAN), paths, HEAD)
    (paths.secrets / "https.pem").write_text("spoilt")
    ready = public_access.ensure_certificate(cluster(**LAN), paths, HEAD)
    assert ready is not None and "could not be read" in ready.news[0]
    paths.authority.write_text("spoilt")
    with pytest.raises(SetupError, match="the local authority cannot be used"):
        public_access.ensure_certificate(cluster(**LAN), paths, HEAD)


def test_no_certificate_is_created_where_none_is_needed(paths: Paths) -> None:
    """On loopback, and behind a reverse proxy."""
    assert public_access.ensure_certificate(cluster(), paths, HEAD) is None
    assert public_access.ensure_certificate(cluster(https="proxy", url="https://g.lan"), paths, HEAD) is None
    assert list(paths.state.iterdir()) == []


# -- certificates that were given ---------------------------------------------------------------------------------------


@pytest.fixture
def write_certificate(tmp_path: Path) -> Callable[..., CertificateFiles]:
    """A certificate with its key as an administrator has them."""
    made = authority.create_authority(["gpu.example.org"], "ca", NOW)

    def write_pair(*names: str, at: datetime = NOW) -> CertificateFiles:
        pem = authority.issue_server_certificate(made, names or ("gpu.example.org", "*.gpu.example.org"), at)
        key, found, certificate = pem.partition(b"-----BEGIN CERTIFICATE-----")
        pair = CertificateFiles(tmp_path / "fullchain.pem", tmp_path / "key.pem")
        pair.certificate.write_bytes(found + certificate + authority.encode_certificate(made.certificate))
        pair.key.write_bytes(key)
        pair.key.chmod(0o600)
        return pair

    return write_pair


def files(pair: CertificateFiles, **more: Any) -> ClusterSettings:
    hub = {"bind": "0.0.0.0", "hostnames": ["gpu.example.org"], "subdomains": True}
    return cluster(certificate=str(pair.certificate), key=str(pair.key), **(hub | more))


def test_valid_given_certificate_is_used_unchanged(
    paths: Paths, write_certificate: Callable[..., CertificateFiles]
) -> None:
    pair = write_certificate()
    ready = public_access.ensure_certificate(files(pair), paths, HEAD)
    assert ready is not None
    assert (ready.files, ready.authority, ready.news) == (pair, None, ())
    assert not paths.authority.exists()


def keep_unchanged(_pair: CertificateFiles) -> None:
    """It is wrong as it was made."""


def encrypt_key(pair: CertificateFiles) -> None:
    key = serialization.load_pem_private_key(pair.key.read_bytes(), password=None)
    secret = serialization.BestAvailableEncryption(b"secret")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    pair.key.write_bytes(pem)


def make_client_certificate(pair: CertificateFiles) -> None:
    """The same names, for a client."""
    old = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
    key = serialization.load_pem_private_key(pair.key.read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    made = (
        x509.CertificateBuilder(old.issuer, old.subject, key.public_key(), old.serial_number)
        .not_valid_before(old.not_valid_before_utc)
        .not_valid_after(old.not_valid_after_utc)
        .add_extension(names, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pair.certificate.write_bytes(authority.encode_certificate(made))


def reverse_chain(pair: CertificateFiles) -> None:
    found = x509.load_pem_x509_certificates(pair.certificate.read_bytes())
    pair.certificate.write_bytes(b"".join(authority.encode_certificate(one) for one in reversed(found)))


@pytest.mark.parametrize(
    ("names", "at", "spoil", "message"),
    [
        ((), NOW, lambda pair: pair.certificate.unlink(), r"hub.certificate: .* cannot be read: No such file"),
        ((), NOW, lambda pair: pair.key.unlink(), r"hub.key: .* cannot be read: No such file"),
        ((), NOW, lambda pair: pair.certificate.write_text("x"), "holds no certificate in PEM form"),
        ((), NOW, lambda pair: pair.key.write_text("x"), "holds no private key in PEM form"),
        ((), NOW, lambda pair: pair.key.chmod(0o644), r"all users of this machine can read .*: sudo chmod o="),
        ((), NOW, encrypt_key, "has a passphrase"),
        ((), NOW, reverse_chain, "is not the key of .*, whose first certificate must be the hub's own"),
        ((), NOW, make_client_certificate, "is not a server's: its extended key usage lacks serverAuth"),
        ((), NOW - timedelta(days=500), keep_unchanged, "ended on .*: renew it"),
        ((), NOW + timedelta(days=30), keep_unchanged, "begins on .* check the clock"),
        (("gpu.example.org",), NOW, keep_unchanged, r"is not for \*\.gpu\.example\.org; it is for gpu\.example\.org"),
        (("a.lan",), NOW, keep_unchanged, r"is not for gpu\.example\.org, \*\.gpu\.example\.org; it is for a\.lan"),
    ],
)  # fmt: skip
def test_invalid_given_certificate_is_refused(
    paths: Paths,
    write_certificate: Callable[..., CertificateFiles],
    names: tuple[str, ...],
    at: datetime,
    spoil: Callable[[CertificateFiles], Any],
    message: str,
) -> None:
    """With the setting, the file, what is wrong and what would be right; the key's text is never shown."""
    pair = write_certificate(*names, at=at)
    spoil(pair)
    with pytest.raises(SetupError) as caught:
        public_access.ensure_certificate(files(pair), paths, HEAD)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "PRIVATE KEY-----\n" not in str(caught.value)


# -- texts for users ------------------------------------------------------------------------------------------------


def test_instructions_to_trust_the_local_authority(paths: Paths) -> None:
    """Two commands to copy, and the fingerprint to compare."""
    settings = cluster(**LAN)
    ready = public_access.ensure_certificate(settings, paths, HEAD)
    assert ready is not None and ready.authority is not None
    lines = public_access.describe_certificate(ready, settings.hub, paths, HEAD)
    assert lines[0] == f"Certificate:    good until {ready.certificate.not_valid_after_utc:%Y-%m-%d}"
    assert f"  scp gpuhub.lan:{paths.authority} gpuhub-authority.pem" in lines
    assert any("security add-trusted-cert -d -r trustRoot" in line for line in lines)
    assert lines[-1] == f"  SHA-256 {authority.format_fingerprint(ready.authority)}"


def test_no_trust_instructions_without_a_local_authority(
    paths: Paths, write_certificate: Callable[..., CertificateFiles]
) -> None:
    settings = files(write_certificate())
    assert (
        len(
            public_access.describe_certificate(
                public_access.ensure_certificate(settings, paths, HEAD), settings.hub, paths, HEAD
            )
        )
        == 1
    )
    assert public_access.describe_certificate(None, cluster().hub, paths, HEAD) == [
        "Certificate:    none: browsers on this machine only"
    ]
    proxied = cluster(https="proxy", url="https://g.lan").hub
    assert public_access.describe_certificate(None, proxied, paths, HEAD) == ["Certificate:    the reverse proxy's"]
