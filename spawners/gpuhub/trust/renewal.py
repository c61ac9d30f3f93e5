"""Making the internal certificates with JupyterHub's own code, and anew when they no longer fit.

certipy, which JupyterHub makes them with, gives authorities and certificates five years. Certificates alone can be
made anew at any time: running notebooks know the authorities, which stay. With new authorities they know nobody.
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

from gpuhub.trust.internal import AUTHORITIES, BROKER, BUNDLES, CERTIFICATES, SERVICES_AUTHORITY, Store

#: What has less left than this is made anew by `gpuhub up`.
LEAST_LEFT = timedelta(days=30)
#: certipy's index of a store.
_INDEX = "certipy.json"


class Renewal(StrEnum):
    """What has to be made."""

    NOTHING = "nothing"
    #: All of it, for the first time.
    FIRST = "first"
    #: Everything that the authorities have signed for the head node's parts.
    CERTIFICATES = "certificates"
    #: The authorities too.
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a certificate says."""

    ends: datetime
    #: Such as `IP:10.77.0.1`; none for an authority.
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What has to be made, and why, for a person."""

    renewal: Renewal
    reason: str = ""


def alt_names(head_address: str) -> tuple[str, ...]:
    """The names by which the head node's parts are reached, besides the loopback that JupyterHub adds."""
    return (f"IP:{ipaddress.ip_address(head_address)}",)


def decide(found: Mapping[str, Found | None], head_address: str, now: datetime) -> Decision:
    """What to make, given what each of `AUTHORITIES` and `CERTIFICATES` says; None for one that is missing. Pure."""
    if all(found[name] is None for name in AUTHORITIES):
        return Decision(renewal=Renewal.FIRST, reason="there are none yet")
    for name in (*AUTHORITIES, *CERTIFICATES):
        kind = Renewal.EVERYTHING if name in AUTHORITIES else Renewal.CERTIFICATES
        one = found[name]
        if one is None:
            return Decision(renewal=kind, reason=f"{name} is missing")
        if one.ends - now < LEAST_LEFT:
            return Decision(renewal=kind, reason=f"{name} ends on {one.ends:%Y-%m-%d}")
        if name in CERTIFICATES and not one.names.issuperset(alt_names(head_address)):
            return Decision(renewal=kind, reason=f"the head node's address is {head_address} now")
    return Decision(renewal=Renewal.NOTHING)


def ensure(folder: Path, head_address: str) -> Decision:
    """Make in `folder` what is missing, ends soon or has other names; what was done. Blocks, for seconds at most."""
    store = Store(folder)
    decision = decide(look(store), head_address, datetime.now(UTC))
    if decision.renewal in {Renewal.FIRST, Renewal.EVERYTHING} and folder.exists():
        shutil.rmtree(folder)
    if decision.renewal is Renewal.CERTIFICATES:
        _forget(store)
    if decision.renewal is not Renewal.NOTHING:
        asyncio.run(_make(store, head_address))
    return decision


def look(store: Store) -> dict[str, Found | None]:
    """What each authority and certificate says; None for one that is missing or cannot be read."""
    try:
        index = json.loads((store.folder / _INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        index = {}
    return {name: _read(store, name) if name in index else None for name in (*AUTHORITIES, *CERTIFICATES)}


def fingerprint(folder: Path) -> str:
    """Changes with any certificate in `folder`; the same for every folder without one."""
    files = sorted(store_file for name in (*AUTHORITIES, *CERTIFICATES) for store_file in (folder / name).glob("*.crt"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _read(store: Store, name: str) -> Found | None:
    pair = store.pair(name)
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
    except (OSError, ValueError):
        return None
    if not pair.key.exists():
        return None
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return Found(ends=certificate.not_valid_after_utc)
    addresses = names.get_values_for_type(x509.IPAddress)
    return Found(ends=certificate.not_valid_after_utc, names=frozenset(f"IP:{address}" for address in addresses))


def _forget(store: Store) -> None:
    """Drop the head node's certificates from certipy's store: JupyterHub makes what is not there."""
    from certipy import Certipy
    from certipy.certipy import CertNotFoundError

    known = Certipy(store_dir=str(store.folder)).store
    for name in CERTIFICATES:
        with contextlib.suppress(CertNotFoundError):  # the one that is missing
            known.remove_record(name)
        shutil.rmtree(store.folder / name, ignore_errors=True)


async def _make(store: Store, head_address: str) -> None:
    """What JupyterHub needs, by its own code; the broker's certificate; and the bundles for proxy and broker."""
    from certipy import Certipy
    from jupyterhub.app import JupyterHub
    from jupyterhub.httpclient import JupyterHubHTTPClient

    store.folder.mkdir(parents=True, exist_ok=True)
    names = alt_names(head_address)
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
