"""The parts of the running product speak to each other alone."""

from __future__ import annotations

import ssl

import httpx
import pytest

from gpuhub import urls
from gpuhub.trust import internal
from gpuhub.trust.internal import Store

from .conftest import Product


@pytest.mark.parametrize("part", ["hub", "broker", "proxy"])
def test_who_has_no_certificate_is_not_listened_to(product: Product, part: str) -> None:
    """At the ports that nodes reach, and at the proxy's API: neither plain HTTP nor TLS without one gets an answer."""
    hub, store = product.cluster.hub, Store(product.paths.internal_certificates)
    assert product.cluster.has_internal_tls
    assert hub.address is not None
    place, authority, path = {
        "hub": (f"{hub.address}:{hub.api_port}", internal.HUB_AUTHORITY, "/hub/health"),
        "broker": (f"{hub.address}:{hub.broker_port}", internal.SERVICES_AUTHORITY, f"{urls.BROKER_PREFIX}/health"),
        "proxy": (f"127.0.0.1:{hub.proxy_api_port}", internal.PROXY_API_AUTHORITY, "/api/routes"),
    }[part]
    tls = ssl.create_default_context(cafile=str(store.pair(authority).certificate))
    with httpx.Client(verify=tls, trust_env=False, timeout=10) as client:
        for scheme in ("http", "https"):
            with pytest.raises(httpx.TransportError):
                client.get(f"{scheme}://{place}{path}")
    own = store.pair(internal.HUB)
    tls.load_cert_chain(own.certificate, own.key)
    with httpx.Client(verify=tls, trust_env=False, timeout=10) as client:
        # The proxy then wants the hub's token too.
        assert client.get(f"https://{place}{path}").status_code == (403 if part == "proxy" else 200)


def test_the_hub_found_its_services(product: Product) -> None:
    """JupyterHub itself looks for them in a way that cannot work with TLS."""
    log = (product.paths.log / "hub.log").read_text(encoding="utf-8")
    last_start = log.rpartition("Running JupyterHub version")[2]
    assert f"Adding external service broker at https://{product.cluster.hub.address}:" in last_start
    assert "Cannot connect to external service" not in last_start
