"""Creates the internal certificates with JupyterHub's own code, and renews them.

JupyterHub uses certipy, whose authorities and certificates are valid for five years. Certificates alone can be renewed
at any time, because running notebooks trust the authorities, which stay the same. They do not trust new authorities.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path

from cryptography import x509

from gpuhub.tls.internal import AUTHORITIES, BROKER, BUNDLES, CERTIFICATES, SERVICES_AUTHORITY, CertificateStore

#: Remaining validity below which `gpuhub up` renews a certificate.
RENEW_BEFORE = timedelta(days=30)
#: certipy's index of a store.
_INDEX = "certipy.json"


class RenewalScope(StrEnum):
    """The certificates to be created."""

    NOTHING = "nothing"
    #: All of them, for the first time.
    FIRST = "first"
    #: The certificates of the head node's parts, but not the authorities.
    CERTIFICATES = "certificates"
    #: All of them, with new authorities.
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateInfo:
    """End and names of a certificate."""

    ends: datetime
    #: Such as `IP:10.77.0.1`; empty for an authority.
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalDecision:
    """The certificates to be created, and the reason, for users."""

    scope: RenewalScope
    reason: str = ""


def build_alt_names(head_address: str) -> tuple[str, ...]:
    """Return the alternative names of the head node's parts, without the loopback, which JupyterHub adds."""
    return (f"IP:{ipaddress.ip_address(head_address)}",)


def decide_renewal(found: Mapping[str, CertificateInfo | None], head_address: str, now: datetime) -> RenewalDecision:
    """Decide which certificates to create.

    Args:
        found: All of `AUTHORITIES` and `CERTIFICATES`; None for a missing one.
    """
    if all(found[name] is None for name in AUTHORITIES):
        return RenewalDecision(scope=RenewalScope.FIRST, reason="there are none yet")
    for name in (*AUTHORITIES, *CERTIFICATES):
        kind = RenewalScope.EVERYTHING if name in AUTHORITIES else RenewalScope.CERTIFICATES
        certificate = found[name]
        if certificate is None:
            return RenewalDecision(scope=kind, reason=f"{name} is missing")
        if certificate.ends - now < RENEW_BEFORE:
            return RenewalDecision(scope=kind, reason=f"{name} ends on {certificate.ends:%Y-%m-%d}")
        if name in CERTIFICATES and not certificate.names.issuperset(build_alt_names(head_address)):
            return RenewalDecision(scope=kind, reason=f"the head node's address is {head_address} now")
    return RenewalDecision(scope=RenewalScope.NOTHING)


def ensure_internal_certificates(folder: Path, head_address: str) -> RenewalDecision:
    """Create certificates in `folder` that are missing, expire soon or have other names. Blocks for some seconds."""
    store = CertificateStore(folder)
    decision = decide_renewal(read_certificates(store), head_address, datetime.now(UTC))
    if decision.scope in {RenewalScope.FIRST, RenewalScope.EVERYTHING} and folder.exists():
        shutil.rmtree(folder)
    if decision.scope is RenewalScope.CERTIFICATES:
        _remove_certificates(store)
    if decision.scope is not RenewalScope.NOTHING:
        asyncio.run(_create_certificates(store, head_address))
    return decision


def read_certificates(store: CertificateStore) -> dict[str, CertificateInfo | None]:
    """Read all authorities and certificates; a missing or unreadable one is None."""
    try:
        index = json.loads((store.folder / _INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        index = {}
    return {name: _read_certificate(store, name) if name in index else None for name in (*AUTHORITIES, *CERTIFICATES)}


def hash_certificates(folder: Path) -> str:
    """Return a hash of all certificates in `folder`; it is the same for every folder without certificates."""
    files = sorted(store_file for name in (*AUTHORITIES, *CERTIFICATES) for store_file in (folder / name).glob("*.crt"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read_certificate(store: CertificateStore, name: str) -> CertificateInfo | None:
    pair = store.files(name)
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
    except (OSError, ValueError):
        return None
    if not pair.key.exists():
        return None
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return CertificateInfo(ends=certificate.not_valid_after_utc)
    addresses = names.get_values_for_type(x509.IPAddress)
    return CertificateInfo(
        ends=certificate.not_valid_after_utc, names=frozenset(f"IP:{address}" for address in addresses)
    )


def _remove_certificates(store: CertificateStore) -> None:
    """Remove the head node's certificates from certipy's store, so that JupyterHub creates them again."""
    from certipy import Certipy
    from certipy.certipy import CertNotFoundError

    records = Certipy(store_dir=str(store.folder)).store
    for name in CERTIFICATES:
        with contextlib.suppress(CertNotFoundError):  # it was missing before
            records.remove_record(name)
        shutil.rmtree(store.folder / name, ignore_errors=True)


async def _create_certificates(store: CertificateStore, head_address: str) -> None:
    """Create JupyterHub's certificates with its own code, the broker's certificate, and the bundles."""
    from certipy import Certipy
    from jupyterhub.app import JupyterHub
    from jupyterhub.httpclient import JupyterHubHTTPClient

    store.folder.mkdir(parents=True, exist_ok=True)
    names = build_alt_names(head_address)
    hub = JupyterHub(
        internal_ssl=True,
        internal_certs_location=str(store.folder),
        trusted_alt_names=list(names),
        log_level="WARN",
    )
    hub.init_internal_ssl()
    await JupyterHubHTTPClient.instance().close()
    certipy = Certipy(store_dir=str(store.folder))
    certipy.create_signed_pair(BROKER, SERVICES_AUTHORITY, alt_names=[*names, "IP:127.0.0.1", "DNS:localhost"])
    for bundle, trusted in BUNDLES.items():
        certipy.create_bundle(store.bundle(bundle).name, names=list(trusted), ca_only=False)
