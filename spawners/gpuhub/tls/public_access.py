"""The hub towards browsers: its address, cookies and headers, and its HTTPS certificate, local or configured."""

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
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpuhub.common.errors import SetupError
from gpuhub.common.files import replace_file
from gpuhub.common.paths import Paths
from gpuhub.config.head_address import format_host
from gpuhub.config.machines.network import HubSettings
from gpuhub.config.settings import ClusterSettings
from gpuhub.tls import authority
from gpuhub.tls.authority import CertificateAuthority, format_fingerprint, parse_address
from gpuhub.tls.internal_certificates import CertificateFiles, CertificateStore, read_certificates

_DEFAULT_PORTS = {"http": 80, "https": 443}
AUTHORITY_KEY_FILE = "authority.key"
#: Key and certificate are in one file, so that a reader never gets an old one and a new one.
SERVER_FILE = "https.pem"


def build_public_url(hub: HubSettings, head_address: str) -> str:
    """Return the address that users open, without a final slash, such as `https://gpuhub.lan`.

    It is `hub.url`, or has the first of `hub.hostnames`, or the address to which the hub is bound. A hub that is bound
    to all addresses has the head node's.
    """
    if hub.url is not None:
        return hub.url
    address = parse_address(hub.bind)
    bound = head_address if address is not None and address.is_unspecified else hub.bind
    scheme = "http" if hub.tls == "off" else "https"
    host = hub.hostnames[0] if hub.hostnames else bound
    port = "" if hub.port == _DEFAULT_PORTS[scheme] else f":{hub.port}"
    return f"{scheme}://{format_host(host)}{port}"


def build_canonical_url(hub: HubSettings, head_address: str) -> str:
    """Return the public URL if the settings name one address for all users, else an empty text.

    JupyterHub redirects browsers to a canonical URL. Without one, browsers stay at the address that they used, for
    example a tunnel's port.
    """
    return build_public_url(hub, head_address) if hub.url is not None or hub.hostnames else ""


def list_certificate_names(hub: HubSettings, head_address: str, machine: str) -> list[str]:
    """Return names and addresses for the hub's own certificate; `machine` is the head node's host name.

    Those of the settings come first (see `list_configured_names`).
    """
    names = list_configured_names(hub)
    host = machine.lower().rstrip(".")
    if host and parse_address(host) is None and _is_host_name(host):
        names += [host, f"{host.split('.')[0]}.local"]
    names += ["localhost", "127.0.0.1", head_address]
    bound = parse_address(hub.bind)
    if bound is not None and not bound.is_unspecified:
        names.append(str(bound))
    return list(dict.fromkeys(names))


def list_configured_names(hub: HubSettings) -> list[str]:
    """Return the names that every certificate of the hub must have, because browsers are sent there."""
    names = list(hub.hostnames)
    if hub.subdomains:
        names.append(f"*.{hub.hostnames[0]}")
    if hub.url is not None:
        names.append(urlsplit(hub.url).hostname or "")
    return list(dict.fromkeys(names))


def _is_host_name(text: str) -> bool:
    return all(label and len(label) < 64 and label.replace("-", "a").isalnum() for label in text.split("."))


def has_https(hub: HubSettings) -> bool:
    """Return whether browsers use HTTPS, to the hub or to a reverse proxy in front of it."""
    return hub.tls != "off"


def build_cookie_options(hub: HubSettings) -> dict[str, Any]:
    """Return the options of all cookies of the hub and of notebooks.

    `SameSite` is `Lax`: with `Strict`, users who come from an OpenID Connect provider or a link would not be logged in.
    """
    return {"samesite": "Lax", "secure": True} if has_https(hub) else {"samesite": "Lax"}


def build_headers(hub: HubSettings) -> dict[str, str]:
    """Return headers for every response of the hub, in addition to JupyterHub's own `Content-Security-Policy`."""
    headers = {
        # Pages show tokens, names and users' work, which proxies and later users of a browser must not get.
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
    }
    if hub.tls in {"files", "proxy"} and _has_default_port(hub):
        # It applies to all ports of a name, and users cannot dismiss a warning. Hence it is set only if the name is the
        # hub's alone and browsers know the authority of its certificate.
        headers["Strict-Transport-Security"] = "max-age=31536000" + "; includeSubDomains" * hub.subdomains
    return headers


def _has_default_port(hub: HubSettings) -> bool:
    return urlsplit(build_public_url(hub, hub.bind)).port is None


def build_subdomain_host(hub: HubSettings, head_address: str) -> str:
    """Return the host below which each user's notebooks have a separate name; empty without subdomains."""
    return build_public_url(hub, head_address) if hub.subdomains else ""


def has_host_prefix(hub: HubSettings) -> bool:
    """Return whether cookies are named `__Host-…`, which prevents other names of the domain from setting them.

    Such cookies belong to the path `/`. If notebooks shared the hub's name, every visited notebook would get the hub's
    cookies, so JupyterHub's guide recommends them only with subdomains.
    """
    return hub.subdomains and has_https(hub)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyCertificate:
    """The certificate with which the proxy can be started."""

    files: CertificateFiles
    certificate: x509.Certificate
    #: Authority that browsers must be told to trust; None if they know the certificate's authority.
    authority: x509.Certificate | None = None
    #: Texts for users about new certificates, with the reasons; empty if nothing was created.
    news: tuple[str, ...] = ()


def find_certificate_files(cluster: ClusterSettings, paths: Paths) -> CertificateFiles | None:
    """Return the files of the proxy's certificate and key, or None for plain HTTP."""
    if cluster.hub.tls == "local":
        return CertificateFiles(paths.secrets / SERVER_FILE, paths.secrets / SERVER_FILE)
    if cluster.hub.certificate is not None and cluster.hub.key is not None:
        return CertificateFiles(cluster.hub.certificate, cluster.hub.key)
    return None


def ensure_certificate(
    cluster: ClusterSettings, paths: Paths, head_address: str, now: datetime | None = None
) -> ProxyCertificate | None:
    """Create or renew gpuhub's own certificate, or check the configured one; return None for plain HTTP.

    Safe to call at any time and from several processes: the proxy loads changed files.

    Raises:
        SetupError: A file is wrong; the text names it, the problem and the remedy.
    """
    files, now = find_certificate_files(cluster, paths), now or authority.utc_now()
    if files is None:
        return None
    if cluster.hub.tls == "files":
        return ProxyCertificate(
            files=files, certificate=check_certificate(files, list_configured_names(cluster.hub), now)
        )
    with _exclusive_lock(paths):
        return _ensure_local(cluster, paths, files, head_address, now)


def _ensure_local(
    cluster: ClusterSettings, paths: Paths, files: CertificateFiles, head_address: str, now: datetime
) -> ProxyCertificate:
    names = list_certificate_names(cluster.hub, head_address, socket.gethostname())
    news = []
    current = _read_authority(paths)
    if current is not None and authority.is_expiring(current, now):
        news.append(f"its authority ended on {current.certificate.not_valid_after_utc:%Y-%m-%d}")
        current = None
    if current is None:
        current = authority.create_authority(names, socket.gethostname(), now)
        replace_file(paths.secrets / AUTHORITY_KEY_FILE, current.key_pem(), mode=0o600)
        replace_file(paths.authority, authority.encode_certificate(current.certificate), mode=0o644)
        news.append("a new authority was created: browsers must be told to trust it")
    outside = [name for name in names if not authority.is_permitted(current.certificate, name)]
    for name in outside:
        if name in list_configured_names(cluster.hub):
            raise SetupError(
                f"hub: {name!r}: the authority in {paths.authority} was made for other names, and browsers would not "
                f"accept it. Remove {paths.authority} and {paths.secrets / AUTHORITY_KEY_FILE}: `sudo make up` then "
                "creates a new one, which must be trusted again on every machine with a browser"
            )
    names = [name for name in names if name not in outside]
    reason = _find_renewal_reason(files.certificate, current, names, now)
    if reason is not None:
        replace_file(files.certificate, authority.issue_server_certificate(current, names, now), mode=0o600)
        news.append(f"a new certificate was created: {reason}")
    certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    return ProxyCertificate(files=files, certificate=certificate, authority=current.certificate, news=tuple(news))


def _read_authority(paths: Paths) -> CertificateAuthority | None:
    files = [file for file in (paths.authority, paths.secrets / AUTHORITY_KEY_FILE) if file.exists()]
    if not files:
        return None
    again = (
        f"remove {' and '.join(map(str, files))}, and a new authority is created, which every browser must trust again"
    )
    if len(files) == 1:
        raise SetupError(f"of the local authority only {files[0]} exists: restore the other file, or {again}")
    try:
        return authority.load_authority(*(file.read_bytes() for file in files))
    except (SetupError, OSError) as error:
        raise SetupError(f"the local authority cannot be used ({error}): {again}") from None


def _find_renewal_reason(file: Path, current: CertificateAuthority, names: Sequence[str], now: datetime) -> str | None:
    if not file.exists():
        return "there was none"
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError:
        return f"{file} could not be read"
    return authority.find_renewal_reason(certificate, current, names, now)


def check_certificate(files: CertificateFiles, names: Sequence[str], now: datetime) -> x509.Certificate:
    """Return the configured certificate if browsers will accept it for these names.

    Raises:
        SetupError: They will not; the text names the file and the problem.
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
        raise SetupError(f"hub.certificate: {files.certificate} begins on {begins:%Y-%m-%d %H:%M} UTC: check the clock")
    _check_purpose(files.certificate, certificate)
    missing = [name for name in names if not authority.is_valid_for(certificate, name)]
    if missing:
        raise SetupError(
            f"hub.certificate: {files.certificate} is not for {', '.join(missing)}; it is for "
            f"{', '.join(authority.list_alternative_names(certificate)) or 'no name at all'}"
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
        raise SetupError(f"hub.key: all users of this machine can read or change {file}: sudo chmod o= {file}")
    try:
        return serialization.load_pem_private_key(text, password=None)
    except TypeError:
        raise SetupError(
            f"hub.key: {file} has a passphrase, which a service cannot enter; remove it: openssl pkey -in … -out …"
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


def read_certificate_ends(cluster: ClusterSettings, paths: Paths) -> dict[str, float]:
    """Return when each readable certificate ends, by its name, in seconds since 1970.

    `https` is the one for browsers, `authority` the local authority's; the others are the internal ones.
    """
    files = {"authority": paths.authority} if cluster.hub.tls == "local" else {}
    public = find_certificate_files(cluster, paths)
    if public is not None:
        files["https"] = public.certificate
    ends = {}
    for name, file in files.items():
        with contextlib.suppress(SetupError):
            ends[name] = _read_certificate(file).not_valid_after_utc.timestamp()
    if cluster.has_internal_tls:
        internal = read_certificates(CertificateStore(paths.internal_certificates))
        ends |= {name: found.ends.timestamp() for name, found in internal.items() if found is not None}
    return ends


def build_pinned_context(file: Path) -> ssl.SSLContext:
    """Build a context that trusts the server with the first certificate of `file`, under any name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    first = x509.load_pem_x509_certificates(file.read_bytes())[0]
    context.load_verify_locations(cadata=authority.encode_certificate(first).decode("ascii"))
    return context


@contextlib.contextmanager
def _exclusive_lock(paths: Paths) -> Iterator[None]:
    """Let one process at a time continue."""
    paths.secrets.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(paths.secrets, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def describe_certificate(
    ready: ProxyCertificate | None, hub: HubSettings, paths: Paths, head_address: str
) -> list[str]:
    """Return lines about the certificate for the administrator; commands are on separate lines."""
    if ready is None:
        where = "the reverse proxy's" if hub.tls == "proxy" else "none: browsers on this machine only"
        return [f"Certificate:    {where}"]
    lines = [f"Certificate:    good until {ready.certificate.not_valid_after_utc:%Y-%m-%d}"]
    lines += [f"  {news}" for news in ready.news]
    if ready.authority is None:
        return lines
    host = urlsplit(build_public_url(hub, head_address)).hostname
    return [
        *lines,
        "Trust it:       once on each Mac whose browsers come here (other systems: docs/https.md)",
        f"  scp {host}:{paths.authority} gpuhub-authority.pem",
        "  sudo security add-trusted-cert -d -r trustRoot -k /Library/Keychains/System.keychain gpuhub-authority.pem",
        f"  SHA-256 {format_fingerprint(ready.authority)}",
    ]
