"""Internal certificates: files, trust and renewal of mutual TLS between proxy, hub, broker and notebooks.

JupyterHub's own authorities sign all certificates. Each part trusts the parts that it has connections with:

- hub: trusts all of them (JupyterHub's own choice); tokens decide about rights.
- proxy: targets signed for the hub, the broker or a notebook.
- broker: clients signed for the hub, the proxy, a notebook or a worker.
- notebook: the hub and the proxy as clients, the hub and the broker as servers, but no other notebook.

Workers connect to their notebook and to each other. Where services set variables in them, they connect to the broker as
well, with a certificate of a client, signed as a notebook's.

JupyterHub creates the certificates with certipy, for five years. Certificates alone can be renewed at any time, because
running notebooks trust the authorities, which stay the same. They do not trust new authorities.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import shutil
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from cryptography import x509

from gpuhub.common.errors import SetupError

HUB_AUTHORITY = "hub-ca"
NOTEBOOKS_AUTHORITY = "notebooks-ca"
SERVICES_AUTHORITY = "services-ca"
PROXY_API_AUTHORITY = "proxy-api-ca"
PROXY_CLIENT_AUTHORITY = "proxy-client-ca"
AUTHORITIES = (
    HUB_AUTHORITY,
    NOTEBOOKS_AUTHORITY,
    PROXY_API_AUTHORITY,
    PROXY_CLIENT_AUTHORITY,
    SERVICES_AUTHORITY,
)
HUB = "hub-internal"
PROXY_API = "proxy-api"
PROXY_CLIENT = "proxy-client"
BROKER = "broker"
CERTIFICATES = (HUB, PROXY_API, PROXY_CLIENT, BROKER)
#: A notebook's own files in its container.
NOTEBOOK_FOLDER = "/etc/gpuhub/tls"
NOTEBOOK_KEY = f"{NOTEBOOK_FOLDER}/key.pem"
NOTEBOOK_CERTIFICATE = f"{NOTEBOOK_FOLDER}/certificate.pem"
#: Certificates that a notebook trusts: the hub's as server, and those of hub and proxy as clients.
NOTEBOOK_TRUST = f"{NOTEBOOK_FOLDER}/trust.pem"
#: Certificates that a notebook trusts the broker by.
NOTEBOOK_BROKER_TRUST = f"{NOTEBOOK_FOLDER}/broker.pem"
#: Bundles in addition to JupyterHub's own, whose proxy trusts only hub and notebooks and not the broker.
BUNDLES = {
    "proxy-targets": (HUB_AUTHORITY, NOTEBOOKS_AUTHORITY, SERVICES_AUTHORITY),
    "broker-clients": (HUB_AUTHORITY, NOTEBOOKS_AUTHORITY, PROXY_CLIENT_AUTHORITY),
}
#: Remaining validity below which `gpuhub up` renews a certificate.
RENEW_BEFORE = timedelta(days=30)
#: certipy's index of a store.
_INDEX = "certipy.json"


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class CertificateStore:
    """The folder in which JupyterHub (with certipy) keeps authorities and certificates."""

    folder: Path

    def files(self, name: str) -> CertificateFiles:
        """Return the files of one of `CERTIFICATES` or `AUTHORITIES`."""
        return CertificateFiles(self.folder / name / f"{name}.crt", self.folder / name / f"{name}.key")

    def bundle(self, name: str) -> Path:
        """Return the file of one of `BUNDLES`, or JupyterHub's own bundle of an authority."""
        return self.folder / f"{name}_trust.crt"

    def proxy_flags(self) -> list[str]:
        """Return the proxy's options, which equal those of a proxy that JupyterHub starts itself."""
        api, client = self.files(PROXY_API), self.files(PROXY_CLIENT)
        return [
            "--api-ssl-key", str(api.key),
            "--api-ssl-cert", str(api.certificate),
            "--api-ssl-ca", str(self.bundle(PROXY_API_AUTHORITY)),
            "--api-ssl-request-cert",
            "--api-ssl-reject-unauthorized",
            "--client-ssl-key", str(client.key),
            "--client-ssl-cert", str(client.certificate),
            "--client-ssl-ca", str(self.bundle("proxy-targets")),
            "--client-ssl-request-cert",
            "--client-ssl-reject-unauthorized",
        ]  # fmt: skip

    def broker_options(self) -> dict[str, Any]:
        """Return Uvicorn's options, which refuse clients without a certificate of hub, proxy or notebook."""
        own = self.files(BROKER)
        return {
            "ssl_certfile": own.certificate,
            "ssl_keyfile": own.key,
            "ssl_ca_certs": str(self.bundle("broker-clients")),
            "ssl_cert_reqs": ssl.CERT_REQUIRED,
        }

    def build_hub_context(self) -> ssl.SSLContext:
        """Build the context with which the broker connects to the hub."""
        return _build_client_context(self.files(HUB_AUTHORITY).certificate, self.files(BROKER))

    def build_broker_context(self) -> ssl.SSLContext:
        """Build the context with which the hub, and root's commands on the head node, connect to the broker."""
        return _build_client_context(self.files(SERVICES_AUTHORITY).certificate, self.files(HUB))

    def build_notebook_context(self) -> ssl.SSLContext:
        """Build the context with which the hub connects to notebooks."""
        return _build_client_context(self.files(NOTEBOOKS_AUTHORITY).certificate, self.files(HUB))


def _build_client_context(trusted: Path, own: CertificateFiles) -> ssl.SSLContext:
    """Build a context that trusts `trusted` alone, checks the address, and presents `own`.

    Raises:
        SetupError: The certificates do not exist or cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=str(trusted))
        context.load_cert_chain(own.certificate, own.key)
    except OSError as error:  # `ssl.SSLError` among them
        raise SetupError(
            f"the certificates in {own.certificate.parent.parent} cannot be used ({error}): "
            "`sudo gpuhub up` creates them"
        ) from error
    return context


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
