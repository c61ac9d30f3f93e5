"""The local authority and what it signs: certificates as values. Pure; `certificates` keeps them in files.

Browsers on other machines are told to trust the authority, so it can do little: name constraints keep it to private
networks, to names that mean nothing on the internet, and to what the hub was called when it was made. Whoever steals
its key cannot pass for a bank.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpuhub.errors import SetupError

AUTHORITY_LIFE = timedelta(days=3650)
#: Apple's limit for a server is 398 days, the day of `_EARLIER` among them.
SERVER_LIFE = timedelta(days=396)
#: A certificate with less than this left is renewed.
RENEW_BEFORE = timedelta(days=30)
#: Machines whose clocks are late accept a new certificate too.
_EARLIER = timedelta(days=1)

#: Top-level names that are nobody's on the internet.
PRIVATE_NAMES = ("localhost", "local", "lan", "home", "home.arpa", "internal", "localdomain", "test")
#: Addresses that are nobody's there: private, link-local, loopback, and those that carriers and Tailscale share.
PRIVATE_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8",
        "fc00::/7", "fe80::/10", "::1/128",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate that others are to trust, with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def key_pem(self) -> bytes:
        """The secret part as PEM."""
        return _key_pem(self.key)


def make_authority(names: Iterable[str], machine: str, now: datetime) -> Authority:
    """A new authority, for these names and addresses besides the private ones; `machine` is shown to people."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The date tells two authorities of one machine apart in a list of certificates.
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "gpuhub"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"gpuhub on {machine}, {now:%Y-%m-%d}"[:64]),
        ]
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.NameConstraints(_build_permitted(names), None), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def _build_permitted(names: Iterable[str]) -> list[x509.GeneralName]:
    domains, networks = list(PRIVATE_NAMES), list(PRIVATE_NETWORKS)
    for name in names:
        address = as_address(name)
        if address is None:
            domains.append(name.removeprefix("*."))
        else:
            networks.append(ipaddress.ip_network(address))
    return [*map(x509.DNSName, dict.fromkeys(domains)), *map(x509.IPAddress, dict.fromkeys(networks))]


def is_permitted(certificate: x509.Certificate, name: str) -> bool:
    """Whether this authority may sign for the name or address."""
    constraints = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    permitted = [general.value for general in constraints.permitted_subtrees or ()]
    address = as_address(name)
    if address is not None:
        return any(not isinstance(one, str) and address in one for one in permitted)
    return any(isinstance(one, str) and f".{name}".endswith(f".{one}") for one in permitted)


def issue(authority: Authority, names: Sequence[str], now: datetime) -> bytes:
    """A key and a server's certificate for these names and addresses, in this order, as one PEM text."""
    certificate, key = issue_pair(authority, names, now)
    return key + certificate


def issue_pair(
    authority: Authority,
    names: Sequence[str],
    now: datetime,
    *,
    purpose: x509.ObjectIdentifier = ExtendedKeyUsageOID.SERVER_AUTH,
    life: timedelta = SERVER_LIFE,
) -> tuple[bytes, bytes]:
    """A certificate for these names and addresses and one purpose, and its key, as PEM; ends with its authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        x509.CertificateBuilder()
        # Clients go by the alternative names alone; a common name has room for 64 characters only.
        .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "gpuhub")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(min(now + life, issuer.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return certificate_pem(certificate), _key_pem(key)


def why_renew(certificate: x509.Certificate, authority: Authority, names: Sequence[str], now: datetime) -> str | None:
    """Why a server's certificate is to be made anew; None while it will do."""
    try:
        certificate.verify_directly_issued_by(authority.certificate)
    except (ValueError, TypeError, InvalidSignature):
        return "it is of another authority"
    if certificate.not_valid_after_utc - now < RENEW_BEFORE:
        return f"it ends on {certificate.not_valid_after_utc:%Y-%m-%d}"
    if set(alternative_names(certificate)) != set(names):
        return "the hub's names or addresses have changed"
    return None


def is_ending(authority: Authority, now: datetime) -> bool:
    """Whether the authority itself has to be replaced."""
    return authority.certificate.not_valid_after_utc - now < RENEW_BEFORE


def alternative_names(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that a certificate is for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(one.value) for one in found if isinstance(one, x509.DNSName | x509.IPAddress)]


def covers(certificate: x509.Certificate, name: str) -> bool:
    """Whether clients accept the certificate for this name, `*.` names included, or address."""
    names = alternative_names(certificate)
    if name in names:
        return True
    _, dot, rest = name.partition(".")
    return bool(dot) and as_address(name) is None and f"*.{rest}" in names


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of it, as browsers and `openssl x509 -fingerprint` show it."""
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def load_authority(certificate: bytes, key: bytes) -> Authority:
    """An authority from PEM.

    Raises:
        SetupError: the two are not an authority's.
    """
    try:
        found = x509.load_pem_x509_certificate(certificate)
        secret = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise SetupError(f"not in PEM form: {error}") from None
    if not isinstance(secret, ec.EllipticCurvePrivateKey) or secret.public_key() != found.public_key():
        raise SetupError("the certificate and the key do not belong together")
    return Authority(found, secret)


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """As PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def as_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a name is; None for a real name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def utc_now() -> datetime:
    """The time, as certificates have it."""
    return datetime.now(UTC).replace(microsecond=0)


def _general_name(name: str) -> x509.GeneralName:
    address = as_address(name)
    return x509.DNSName(name) if address is None else x509.IPAddress(address)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
