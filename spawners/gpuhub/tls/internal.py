"""Files and trust of mutual TLS between proxy, hub, broker and notebooks.

JupyterHub's own authorities sign all certificates. Each part trusts the parts that it has connections with:

- hub: trusts all of them (JupyterHub's own choice); tokens decide about rights.
- proxy: targets signed for the hub, the broker or a notebook.
- broker: clients signed for the hub, the proxy or a notebook.
- notebook: the hub and the proxy as clients, the hub and the broker as servers, but no other notebook.

Workers connect only to their notebook and to each other, and get no certificate.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
#: Its trust in the hub as server, and in hub and proxy as clients.
NOTEBOOK_TRUST = f"{NOTEBOOK_FOLDER}/trust.pem"
#: Its trust in the broker.
NOTEBOOK_BROKER_TRUST = f"{NOTEBOOK_FOLDER}/broker.pem"

#: Bundles in addition to JupyterHub's own, whose proxy trusts only hub and notebooks and not the broker.
BUNDLES = {
    "proxy-targets": (HUB_AUTHORITY, NOTEBOOKS_AUTHORITY, SERVICES_AUTHORITY),
    "broker-clients": (HUB_AUTHORITY, NOTEBOOKS_AUTHORITY, PROXY_CLIENT_AUTHORITY),
}


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
