"""Certificates of the connection to a node's Docker: authority, server and client."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority that signs both sides."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, name: str) -> Authority:
        """Make a new authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, name, key.public_key(), -1, 1)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        return cls(key, builder.sign(key, hashes.SHA256()))

    def write(self, file: Path) -> None:
        """Write the certificate that the other side trusts."""
        file.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, stem: Path, address: str | None = None, *, begins: int = -1, ends: int = 1) -> None:
        """Write `stem`.pem and `stem`.key.

        Args:
            address: The address of a server; None for a client.
            begins: Start of the validity in days from now.
            ends: End of the validity in days from now.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        builder = _builder(stem.name, str(issuer), key.public_key(), begins, ends)
        if address is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            builder = builder.add_extension(names, critical=False)
        stem.with_suffix(".pem").write_bytes(
            builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        stem.with_suffix(".key").write_bytes(private)


def _builder(name: str, issuer: str, key: ec.EllipticCurvePublicKey, begins: int, ends: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins * _DAY)
        .not_valid_after(now + ends * _DAY)
    )
