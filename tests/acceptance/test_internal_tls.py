"""The product's programs accept only each other's connections."""

from __future__ import annotations

import ssl

import httpx
import pytest

from gpuhub.config import head_address
from gpuhub.tls import internal_certificates
from gpuhub.tls.internal_certificates import CertificateStore
from tests.support.hub.browser import Product


@pytest.mark.parametrize("part", ["hub", "broker", "proxy"])
def test_clients_without_certificate_are_refused(product: Product, part: str) -> None:
    """The ports for nodes and the proxy's API answer neither plain HTTP nor TLS without a client certificate."""
    hub, store = product.cluster.hub, CertificateStore(product.paths.internal_certificates)
    assert product.cluster.has_internal_tls
    assert hub.address is not None
    address, authority, path = {
        "hub": (f"{hub.address}:{hub.api_port}", internal_certificates.HUB_AUTHORITY, "/hub/health"),
        "broker": (
            f"{hub.address}:{hub.broker_port}",
            internal_certificates.SERVICES_AUTHORITY,
            f"{head_address.BROKER_PREFIX}/health",
        ),
        "proxy": (f"127.0.0.1:{hub.proxy_api_port}", internal_certificates.PROXY_API_AUTHORITY, "/api/routes"),
    }[part]
    tls = ssl.create_default_context(cafile=str(store.files(authority).certificate))
    with httpx.Client(verify=tls, trust_env=False, timeout=10) as client:
        for scheme in ("http", "https"):
            with pytest.raises(httpx.TransportError):
                client.get(f"{scheme}://{address}{path}")
    own = store.files(internal_certificates.HUB)
    tls.load_cert_chain(own.certificate, own.key)
    with httpx.Client(verify=tls, trust_env=False, timeout=10) as client:
        # The proxy also requires the hub's token.
        assert client.get(f"https://{address}{path}").status_code == (403 if part == "proxy" else 200)


def test_hub_finds_its_services(product: Product) -> None:
    """The hub's own check of its services cannot work with TLS and is replaced."""
    log = (product.paths.log / "hub.log").read_text(encoding="utf-8")
    last_start = log.rpartition("Running JupyterHub version")[2]
    assert f"Adding external service broker at https://{product.cluster.hub.address}:" in last_start
    assert "Cannot connect to external service" not in last_start
