"""The files that HTTPS needs: the local authority's, the hub's own certificate, and those that were given."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import ssl
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpuhub.errors import SetupError
from gpuhub.paths import Paths
from gpuhub.settings import Cluster
from gpuhub.trust import authority, public
from gpuhub.trust.authority import Authority
from gpuhub.trust.internal import Pair

AUTHORITY_KEY = "authority.key"
#: Key and certificate in one file, so that whoever reads it never sees one of the old and one of the new.
SERVER = "https.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the proxy can be started with."""

    files: Pair
    certificate: x509.Certificate
    #: What browsers have to be told to trust; None where they know the certificate's authority.
    authority: x509.Certificate | None = None
    #: What was made and why, for people; empty when everything was there.
    news: tuple[str, ...] = ()


def find_files(cluster: Cluster, paths: Paths) -> Pair | None:
    """Where the proxy finds certificate and key; None where it speaks plain HTTP."""
    if cluster.hub.tls == "local":
        return Pair(paths.secrets / SERVER, paths.secrets / SERVER)
    if cluster.hub.certificate is not None and cluster.hub.key is not None:
        return Pair(cluster.hub.certificate, cluster.hub.key)
    return None


def ensure(cluster: Cluster, paths: Paths, head_address: str, now: datetime | None = None) -> Ready | None:
    """Make or renew what is gpuhub's own, or check what was given; None where the proxy speaks plain HTTP.

    Safe to call at any time and from several processes: the proxy takes up what has changed.

    Raises:
        SetupError: with the file, what is wrong with it, and what would be right.
    """
    files, now = find_files(cluster, paths), now or authority.utc_now()
    if files is None:
        return None
    if cluster.hub.tls == "files":
        return Ready(files=files, certificate=check(files, public.named(cluster.hub), now))
    with _alone(paths):
        return _ensure_local(cluster, paths, files, head_address, now)


def _ensure_local(cluster: Cluster, paths: Paths, files: Pair, head_address: str, now: datetime) -> Ready:
    wanted = public.certificate_names(cluster.hub, head_address, socket.gethostname())
    news = []
    found = _read_authority(paths)
    if found is not None and authority.is_ending(found, now):
        news.append(f"its authority ended on {found.certificate.not_valid_after_utc:%Y-%m-%d}")
        found = None
    if found is None:
        found = authority.make_authority(wanted, socket.gethostname(), now)
        _write(paths.secrets / AUTHORITY_KEY, found.key_pem(), 0o600)
        _write(paths.authority, authority.certificate_pem(found.certificate), 0o644)
        news.append("a new authority was made: browsers have to be told to trust it")
    outside = [name for name in wanted if not authority.is_permitted(found.certificate, name)]
    for name in outside:
        if name in public.named(cluster.hub):
            raise SetupError(
                f"hub: {name!r}: the authority in {paths.authority} was made for other names, and browsers would not "
                f"believe it. Remove {paths.authority} and {paths.secrets / AUTHORITY_KEY}: `sudo make up` then makes "
                "a new one, which has to be trusted anew on every machine with a browser"
            )
    wanted = [name for name in wanted if name not in outside]
    reason = _why_renew(files.certificate, found, wanted, now)
    if reason is not None:
        _write(files.certificate, authority.issue(found, wanted, now), 0o600)
        news.append(f"a new certificate was made: {reason}")
    certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    return Ready(files=files, certificate=certificate, authority=found.certificate, news=tuple(news))


def _read_authority(paths: Paths) -> Authority | None:
    files = [file for file in (paths.authority, paths.secrets / AUTHORITY_KEY) if file.exists()]
    if not files:
        return None
    again = f"remove {' and '.join(map(str, files))}, and a new authority is made, to be trusted anew by every browser"
    if len(files) == 1:
        raise SetupError(f"of the local authority only {files[0]} is left: bring the other file back, or {again}")
    try:
        return authority.load_authority(*(file.read_bytes() for file in files))
    except (SetupError, OSError) as error:
        raise SetupError(f"the local authority cannot be used ({error}): {again}") from None


def _why_renew(file: Path, found: Authority, wanted: Sequence[str], now: datetime) -> str | None:
    if not file.exists():
        return "there was none"
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError:
        return f"{file} could not be read"
    return authority.why_renew(certificate, found, wanted, now)


def check(files: Pair, names: Sequence[str], now: datetime) -> x509.Certificate:
    """The certificate that was given, when browsers will accept it for these names.

    Raises:
        SetupError: with the file and what is wrong.
    """
    certificate = _read_certificate(files.certificate)
    key = _read_key(files.key)
    if key.public_key() != certificate.public_key():
        raise SetupError(
            f"hub.key: {files.key} is not the key of {files.certificate}, whose first certificate must be the hub's own"
        )
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if ends <= now:
        raise SetupError(f"hub.certificate: {files.certificate} ended on {ends:%Y-%m-%d}: renew it")
    if begins > now:
        raise SetupError(
            f"hub.certificate: {files.certificate} begins on {begins:%Y-%m-%d %H:%M} UTC only: look at the clock"
        )
    _check_purpose(files.certificate, certificate)
    missing = [name for name in names if not authority.covers(certificate, name)]
    if missing:
        raise SetupError(
            f"hub.certificate: {files.certificate} is not for {', '.join(missing)}; it is for "
            f"{', '.join(authority.alternative_names(certificate)) or 'no name at all'}"
        )
    return certificate


def _read_certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificates(file.read_bytes())[0]
    except OSError as error:
        raise SetupError(f"hub.certificate: {file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise SetupError(
            f"hub.certificate: {file} holds no certificate in PEM form, which begins with -----BEGIN CERTIFICATE-----"
        ) from None


def _read_key(file: Path) -> Any:
    try:
        mode = file.stat().st_mode
        text = file.read_bytes()
    except OSError as error:
        raise SetupError(f"hub.key: {file} cannot be read: {error.strerror}") from None
    if mode & stat.S_IRWXO:
        raise SetupError(f"hub.key: everybody on this machine can read or change {file}: sudo chmod o= {file}")
    try:
        return serialization.load_pem_private_key(text, password=None)
    except TypeError:
        raise SetupError(
            f"hub.key: {file} is locked with a passphrase, and nobody is there to type it: openssl pkey -in … -out …"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise SetupError(
            f"hub.key: {file} holds no private key in PEM form, which begins with -----BEGIN PRIVATE KEY-----"
        ) from None


def _check_purpose(file: Path, certificate: x509.Certificate) -> None:
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if ExtendedKeyUsageOID.SERVER_AUTH not in usage and ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in usage:
        raise SetupError(f"hub.certificate: {file} is not a server's: its extended key usage lacks serverAuth")


def build_pinned_context(file: Path) -> ssl.SSLContext:
    """Trusts the server that shows the first certificate of `file`, under whatever name it is asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    first = x509.load_pem_x509_certificates(file.read_bytes())[0]
    context.load_verify_locations(cadata=authority.certificate_pem(first).decode("ascii"))
    return context


@contextlib.contextmanager
def _alone(paths: Paths) -> Iterator[None]:
    """One process at a time."""
    paths.secrets.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(paths.secrets, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(file: Path, content: bytes, mode: int) -> None:
    """Replace a file at once, so that nobody reads half of it."""
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)
        os.fchmod(out.fileno(), mode)
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)
