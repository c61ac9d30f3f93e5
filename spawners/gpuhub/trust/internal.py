"""TLS with certificates on both sides between proxy, hub, broker and notebooks: which files, and who trusts whom.

JupyterHub's own authorities sign everything; who is trusted follows from who connects to whom:

- hub: trusts all of them (JupyterHub's own choice); tokens say who may what.
- proxy: targets signed for the hub, the broker or a notebook.
- broker: clients signed for the hub, the proxy or a notebook.
- notebook: the hub and the proxy as clients, the hub and the broker as servers; never another notebook.

Workers talk to their notebook and to each other only, and get no certificate.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuhub.errors import SetupError

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

#: A notebook's own files, in its container.
NOTEBOOK_FOLDER = "/etc/gpuhub/tls"
NOTEBOOK_KEY = f"{NOTEBOOK_FOLDER}/key.pem"
NOTEBOOK_CERTIFICATE = f"{NOTEBOOK_FOLDER}/certificate.pem"
#: Whom it trusts: the hub, and hub and proxy as its clients.
NOTEBOOK_TRUST = f"{NOTEBOOK_FOLDER}/trust.pem"
#: Whom it trusts as the broker.
NOTEBOOK_BROKER_TRUST = f"{NOTEBOOK_FOLDER}/broker.pem"

#: Besides JupyterHub's own bundles, in which the proxy trusts the hub and notebooks only: the broker is its target too.
BUNDLES = {
    "proxy-targets": (HUB_AUTHORITY, NOTEBOOKS_AUTHORITY, SERVICES_AUTHORITY),
    "broker-clients": (HUB_AUTHORITY, NOTEBOOKS_AUTHORITY, PROXY_CLIENT_AUTHORITY),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Store:
    """The folder in which JupyterHub (with certipy) keeps authorities and certificates."""

    folder: Path

    def pair(self, name: str) -> Pair:
        """One of `CERTIFICATES` or `AUTHORITIES`."""
        return Pair(self.folder / name / f"{name}.crt", self.folder / name / f"{name}.key")

    def bundle(self, name: str) -> Path:
        """One of `BUNDLES`, or JupyterHub's own of an authority: whom its components trust."""
        return self.folder / f"{name}_trust.crt"

    def proxy_flags(self) -> list[str]:
        """The proxy's options, as JupyterHub gives them to a proxy that it starts itself."""
        api, client = self.pair(PROXY_API), self.pair(PROXY_CLIENT)
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
        """Uvicorn's options: who has no certificate of the hub, the proxy or a notebook is not listened to."""
        own = self.pair(BROKER)
        return {
            "ssl_certfile": own.certificate,
            "ssl_keyfile": own.key,
            "ssl_ca_certs": str(self.bundle("broker-clients")),
            "ssl_cert_reqs": ssl.CERT_REQUIRED,
        }

    def to_hub(self) -> ssl.SSLContext:
        """How the broker connects to the hub."""
        return _client_context(self.pair(HUB_AUTHORITY).certificate, self.pair(BROKER))

    def to_broker(self) -> ssl.SSLContext:
        """How the hub, and root's commands on the head node, connect to the broker."""
        return _client_context(self.pair(SERVICES_AUTHORITY).certificate, self.pair(HUB))

    def to_notebooks(self) -> ssl.SSLContext:
        """How the hub connects to notebooks."""
        return _client_context(self.pair(NOTEBOOKS_AUTHORITY).certificate, self.pair(HUB))


def _client_context(trusted: Path, own: Pair) -> ssl.SSLContext:
    """Trusts `trusted` alone, checks the address, and shows `own`.

    Raises:
        SetupError: the certificates have not been made, or cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=str(trusted))
        context.load_cert_chain(own.certificate, own.key)
    except OSError as error:  # `ssl.SSLError` among them
        raise SetupError(
            f"the certificates in {own.certificate.parent.parent} cannot be used ({error}): `sudo gpuhub up` makes them"
        ) from error
    return context
