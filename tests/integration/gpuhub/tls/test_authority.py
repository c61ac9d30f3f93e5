"""The local authority and its certificates, as browsers, Python and OpenSSL verify them."""

from __future__ import annotations

import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpuhub.common.errors import SetupError
from gpuhub.tls import authority

NOW = datetime.now(UTC).replace(microsecond=0)
NAMES = ["gpuhub.example.org", "*.gpuhub.example.org", "rig1", "192.168.1.20", "203.0.113.7", "fd00::20"]


@pytest.fixture(scope="module")
def made() -> authority.CertificateAuthority:
    return authority.create_authority(NAMES, "rig1", NOW)


def read(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def verify(made: authority.CertificateAuthority, pem: bytes, folder: Path, *names: str) -> str:
    """Return OpenSSL's errors with all its checks; empty for a valid certificate."""
    (folder / "ca.pem").write_bytes(authority.encode_certificate(made.certificate))
    (folder / "server.pem").write_bytes(pem)
    words = [word for name in names for word in name_option(name)]
    done = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", "ca.pem", *words, "server.pem"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr


def name_option(name: str) -> list[str]:
    return ["-verify_hostname" if authority.parse_address(name) is None else "-verify_ip", name]


@pytest.mark.parametrize("name", ["gpuhub.example.org", "ada.gpuhub.example.org", "rig1", "192.168.1.20", "fd00::20"])
def test_openssl_verifies_the_chain(made: authority.CertificateAuthority, tmp_path: Path, name: str) -> None:
    """Chain and name are valid with only the authority's file."""
    assert verify(made, authority.issue_server_certificate(made, NAMES, NOW), tmp_path, name) == ""


@pytest.mark.parametrize("name", ["bank.example", "example.org", "1.1.1.1", "2606:4700::1", "othergpuhub.example.org"])
def test_name_constraints_limit_the_authority(made: authority.CertificateAuthority, tmp_path: Path, name: str) -> None:
    """Someone who has stolen the key can sign other names, but clients refuse them."""
    assert not authority.is_permitted(made.certificate, name)
    assert "permitted subtree violation" in verify(
        made, authority.issue_server_certificate(made, [name], NOW), tmp_path, name
    )


@pytest.mark.parametrize("name", [*NAMES, "other.lan", "mac.local", "localhost", "10.1.2.3", "100.100.1.1", "fe80::1"])
def test_private_names_are_always_permitted(made: authority.CertificateAuthority, tmp_path: Path, name: str) -> None:
    """The machine may move within private networks without a new authority."""
    assert authority.is_permitted(made.certificate, name)
    plain = name.replace("*", "x")
    assert verify(made, authority.issue_server_certificate(made, [name], NOW), tmp_path, plain) == ""


def test_certificate_meets_apples_requirements(made: authority.CertificateAuthority) -> None:
    """A certificate is valid for less than 398 days, has alternative names, is for servers, uses SHA-256, and is not an
    authority.
    """
    certificate = read(authority.issue_server_certificate(made, NAMES, NOW))
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert life <= timedelta(days=398)
    assert set(authority.list_alternative_names(certificate)) == set(NAMES)
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert certificate.signature_hash_algorithm is not None
    assert certificate.signature_hash_algorithm.name == "sha256"
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert made.certificate.not_valid_after_utc - NOW == timedelta(days=3650)
    constraints = made.certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (True, True, 0)


def test_certificate_expires_with_its_authority_at_the_latest(made: authority.CertificateAuthority) -> None:
    late = made.certificate.not_valid_after_utc - timedelta(days=100)
    certificate = read(authority.issue_server_certificate(made, NAMES, late))
    assert certificate.not_valid_after_utc == made.certificate.not_valid_after_utc


def test_conditions_for_renewal(made: authority.CertificateAuthority) -> None:
    """It is renewed close to its end, for other names and for another authority, but not for another order of names."""
    certificate = read(authority.issue_server_certificate(made, NAMES, NOW))
    assert authority.find_renewal_reason(certificate, made, NAMES[::-1], NOW) is None
    ends = certificate.not_valid_after_utc
    assert authority.find_renewal_reason(certificate, made, NAMES, ends - timedelta(days=30)) is None
    assert (
        authority.find_renewal_reason(certificate, made, NAMES, ends - timedelta(days=29))
        == f"it ends on {ends:%Y-%m-%d}"
    )
    changed = authority.find_renewal_reason(certificate, made, [*NAMES, "new.lan"], NOW)
    assert changed == "the hub's names or addresses have changed"
    other = authority.create_authority(NAMES, "rig1", NOW)
    assert authority.find_renewal_reason(certificate, other, NAMES, NOW) == "it was signed by another authority"
    assert not authority.is_expiring(made, NOW + timedelta(days=3600))
    assert authority.is_expiring(made, NOW + timedelta(days=3630))


def test_host_names_that_a_certificate_covers(made: authority.CertificateAuthority) -> None:
    """A wildcard matches one label, and no IP address."""
    certificate = read(authority.issue_server_certificate(made, NAMES, NOW))
    assert authority.is_valid_for(certificate, "ada.gpuhub.example.org")
    assert authority.is_valid_for(certificate, "*.gpuhub.example.org")
    assert authority.is_valid_for(certificate, "fd00::20")
    assert not authority.is_valid_for(certificate, "a.b.gpuhub.example.org")
    assert not authority.is_valid_for(certificate, "example.org")
    assert not authority.is_valid_for(certificate, "192.168.1.21")


def test_fingerprint_matches_openssl(made: authority.CertificateAuthority, tmp_path: Path) -> None:
    """Users compare the fingerprint before they trust the authority."""
    (tmp_path / "ca.pem").write_bytes(authority.encode_certificate(made.certificate))
    command = ["openssl", "x509", "-in", "ca.pem", "-noout", "-fingerprint", "-sha256"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.strip().lower() == f"sha256 fingerprint={authority.format_fingerprint(made.certificate)}".lower()


def test_python_loads_the_authority(made: authority.CertificateAuthority) -> None:
    """It can be the only authority of a TLS context."""
    context = ssl.create_default_context(cadata=authority.encode_certificate(made.certificate).decode())
    subject = [dict(part[0] for part in found["subject"]) for found in context.get_ca_certs()]
    assert subject == [{"organizationName": "gpuhub", "commonName": f"gpuhub on rig1, {NOW:%Y-%m-%d}"}]


def test_mismatched_certificate_and_key_are_refused(made: authority.CertificateAuthority) -> None:
    other = authority.create_authority(NAMES, "rig1", NOW)
    pem = authority.encode_certificate(made.certificate)
    assert authority.load_authority(pem, made.key_pem()).certificate == made.certificate
    with pytest.raises(SetupError, match="do not belong together"):
        authority.load_authority(pem, other.key_pem())
    with pytest.raises(SetupError, match="not in PEM form"):
        authority.load_authority(pem, b"nothing")
