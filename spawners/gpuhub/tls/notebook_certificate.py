"""Issues the certificate of a notebook or worker, which is put into its container and stored nowhere else."""

from __future__ import annotations

import functools
import io
import ipaddress
import ssl
import tarfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpuhub.common.errors import SetupError
from gpuhub.tls import internal_certificates
from gpuhub.tls.internal_certificates import NOTEBOOKS_AUTHORITY, SERVICES_AUTHORITY, CertificateStore

#: Time by which nodes' clocks may be behind the head node's.
_CLOCK_TOLERANCE = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookCertificate:
    """Key, certificate and trust of one notebook or worker as PEM texts."""

    key: bytes
    certificate: bytes
    trust: bytes
    broker_trust: bytes

    def build_archive(self, uid: int, gid: int, onto: bytes = b"") -> bytes:
        """Build a tar archive for `put_archive` at `/`, with files that only this user can read.

        Args:
            onto: A tar archive whose content comes first.
        """
        texts = {
            internal_certificates.NOTEBOOK_KEY: self.key,
            internal_certificates.NOTEBOOK_CERTIFICATE: self.certificate,
            internal_certificates.NOTEBOOK_TRUST: self.trust,
            internal_certificates.NOTEBOOK_BROKER_TRUST: self.broker_trust,
        }
        own = internal_certificates.NOTEBOOK_FOLDER
        buffer = io.BytesIO(onto)
        with tarfile.open(fileobj=buffer, mode="a" if onto else "w") as archive:
            for name, owner, mode in ((str(Path(own).parent), (0, 0), 0o755), (own, (uid, gid), 0o500)):
                folder = tarfile.TarInfo(name.lstrip("/"))
                folder.type, folder.mode = tarfile.DIRTYPE, mode
                folder.uid, folder.gid = owner
                archive.addfile(folder)
            for path, text in texts.items():
                file = tarfile.TarInfo(path.lstrip("/"))
                file.size, file.mode, file.uid, file.gid = len(text), 0o400, uid, gid
                archive.addfile(file, io.BytesIO(text))
        return buffer.getvalue()


def issue_certificate(folder: Path, user: str, *addresses: str) -> NotebookCertificate:
    """Issue a certificate for a notebook or worker of `user`, which expires with its authority.

    The key is of an elliptic curve, because creating an RSA key takes a quarter of a second. Blocks for some
    milliseconds.

    Args:
        addresses: For a notebook the node's IP address, or those of all possible nodes if it is not known yet. A worker
            has none: its certificate is that of a client alone.

    Raises:
        SetupError: The authority does not exist or cannot be read.
    """
    issuer = _load_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [*([ExtendedKeyUsageOID.SERVER_AUTH] if addresses else []), ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"user-{user}")]))
        .issuer_name(issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCK_TOLERANCE)
        .not_valid_after(issuer.certificate.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key()), critical=False)
    )
    if addresses:
        names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(issuer.key, hashes.SHA256())
    return NotebookCertificate(
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        trust=issuer.trust,
        broker_trust=issuer.broker_trust,
    )


@functools.lru_cache(maxsize=1)
def load_client_context(folder: Path) -> ssl.SSLContext:
    """Load the context with which the hub connects to notebooks, once: new certificates come with a restart."""
    return CertificateStore(folder).build_notebook_context()


@dataclass(frozen=True, slots=True, kw_only=True)
class _NotebookAuthority:
    key: rsa.RSAPrivateKey
    certificate: x509.Certificate
    trust: bytes
    broker_trust: bytes


@functools.lru_cache(maxsize=1)
def _load_authority(folder: Path) -> _NotebookAuthority:
    """Load the authority, once: checking an RSA key takes longer than signing with it."""
    store = CertificateStore(folder)
    pair = store.files(NOTEBOOKS_AUTHORITY)
    try:
        key = serialization.load_pem_private_key(pair.key.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
        trust = store.bundle(NOTEBOOKS_AUTHORITY).read_bytes()
        broker_trust = store.files(SERVICES_AUTHORITY).certificate.read_bytes()
    except (OSError, ValueError) as error:
        raise SetupError(
            f"the certificates in {folder} cannot be used ({error}): `sudo gpuhub up` creates them"
        ) from error
    if not isinstance(key, rsa.RSAPrivateKey):
        raise SetupError(f"{pair.key} is not JupyterHub's: remove {folder}, and `sudo gpuhub up` creates it again")
    return _NotebookAuthority(key=key, certificate=certificate, trust=trust, broker_trust=broker_trust)
