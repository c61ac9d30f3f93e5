"""The local certificate authority and the certificates that it signs, as values; `public_access` stores them in files.

Browsers on other machines trust the authority, so name constraints limit it to private networks, to names that do not
exist on the internet, and to the hub's names at its creation. A thief of its key cannot impersonate a bank.
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

from gpuhub.common.errors import SetupError

AUTHORITY_LIFE = timedelta(days=3650)
#: Apple's limit for a server is 398 days, which include `_CLOCK_TOLERANCE`.
SERVER_LIFE = timedelta(days=396)
#: Remaining validity below which a certificate is renewed.
RENEW_BEFORE = timedelta(days=30)
#: A certificate is valid from this time before its creation, for machines whose clocks are late.
_CLOCK_TOLERANCE = timedelta(days=1)

#: Top-level names that do not exist on the internet.
PRIVATE_NAMES = ("localhost", "local", "lan", "home", "home.arpa", "internal", "localdomain", "test")
#: Networks that are not on the internet: private, link-local, loopback, and the shared one of carriers and Tailscale.
PRIVATE_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8",
        "fc00::/7", "fe80::/10", "::1/128",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CertificateAuthority:
    """An authority's certificate with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def key_pem(self) -> bytes:
        """Return the key as PEM."""
        return _encode_key(self.key)


def create_authority(names: Iterable[str], machine: str, now: datetime) -> CertificateAuthority:
    """Create an authority for private names and addresses and the given ones; users see `machine` in its name."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The date distinguishes two authorities of one machine in a list of certificates.
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
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_build_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.NameConstraints(_build_permitted_names(names), None), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return CertificateAuthority(certificate, key)


def _build_permitted_names(names: Iterable[str]) -> list[x509.GeneralName]:
    domains, networks = list(PRIVATE_NAMES), list(PRIVATE_NETWORKS)
    for name in names:
        address = parse_address(name)
        if address is None:
            domains.append(name.removeprefix("*."))
        else:
            networks.append(ipaddress.ip_network(address))
    return [*map(x509.DNSName, dict.fromkeys(domains)), *map(x509.IPAddress, dict.fromkeys(networks))]


def is_permitted(certificate: x509.Certificate, name: str) -> bool:
    """Return whether the authority may sign for the name or address."""
    constraints = certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    permitted = [general.value for general in constraints.permitted_subtrees or ()]
    address = parse_address(name)
    if address is not None:
        return any(not isinstance(subtree, str) and address in subtree for subtree in permitted)
    return any(isinstance(subtree, str) and f".{name}".endswith(f".{subtree}") for subtree in permitted)


def issue_server_certificate(authority: CertificateAuthority, names: Sequence[str], now: datetime) -> bytes:
    """Issue a server's certificate for names and addresses; return key and certificate as one PEM text."""
    certificate, key = issue_certificate(authority, names, now)
    return key + certificate


def issue_certificate(
    authority: CertificateAuthority,
    names: Sequence[str],
    now: datetime,
    *,
    purpose: x509.ObjectIdentifier = ExtendedKeyUsageOID.SERVER_AUTH,
    life: timedelta = SERVER_LIFE,
) -> tuple[bytes, bytes]:
    """Issue a certificate for names, addresses and one purpose; return it and its key as PEM.

    It expires with its authority at the latest.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        x509.CertificateBuilder()
        # Clients check only the alternative names, and a common name is limited to 64 characters.
        .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "gpuhub")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(min(now + life, issuer.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_build_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return encode_certificate(certificate), _encode_key(key)


def find_renewal_reason(
    certificate: x509.Certificate, authority: CertificateAuthority, names: Sequence[str], now: datetime
) -> str | None:
    """Return why a server's certificate must be renewed, or None."""
    try:
        certificate.verify_directly_issued_by(authority.certificate)
    except (ValueError, TypeError, InvalidSignature):
        return "it was signed by another authority"
    if certificate.not_valid_after_utc - now < RENEW_BEFORE:
        return f"it ends on {certificate.not_valid_after_utc:%Y-%m-%d}"
    if set(list_alternative_names(certificate)) != set(names):
        return "the hub's names or addresses have changed"
    return None


def is_expiring(authority: CertificateAuthority, now: datetime) -> bool:
    """Return whether the authority itself must be replaced."""
    return authority.certificate.not_valid_after_utc - now < RENEW_BEFORE


def list_alternative_names(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses of a certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def is_valid_for(certificate: x509.Certificate, name: str) -> bool:
    """Return whether clients accept the certificate for the name or address; `*.` names count."""
    names = list_alternative_names(certificate)
    if name in names:
        return True
    _, dot, rest = name.partition(".")
    return bool(dot) and parse_address(name) is None and f"*.{rest}" in names


def format_fingerprint(certificate: x509.Certificate) -> str:
    """Return its SHA-256 fingerprint in the form of browsers and `openssl x509 -fingerprint`."""
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def load_authority(certificate: bytes, key: bytes) -> CertificateAuthority:
    """Load an authority from PEM texts.

    Raises:
        SetupError: They are not the certificate and key of an authority.
    """
    try:
        loaded = x509.load_pem_x509_certificate(certificate)
        private_key = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise SetupError(f"not in PEM form: {error}") from None
    if not isinstance(private_key, ec.EllipticCurvePrivateKey) or private_key.public_key() != loaded.public_key():
        raise SetupError("the certificate and the key do not belong together")
    return CertificateAuthority(loaded, private_key)


def encode_certificate(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def parse_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that the text is, or None for a name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def utc_now() -> datetime:
    """Return the current time in whole seconds, as in certificates."""
    return datetime.now(UTC).replace(microsecond=0)


def _general_name(name: str) -> x509.GeneralName:
    address = parse_address(name)
    return x509.DNSName(name) if address is None else x509.IPAddress(address)


def _encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _build_key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
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
