"""The hub's address, the names of its certificate, and cookies and headers for browsers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gpuhub.config.network import HubSettings
from gpuhub.tls import public_access

HEAD = "192.168.1.20"


def hub(**settings: Any) -> HubSettings:
    return HubSettings.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "url", "canonical"),
    [
        ({}, "http://127.0.0.1:8000", ""),
        ({"port": 80}, "http://127.0.0.1", ""),
        ({"bind": "0.0.0.0"}, f"https://{HEAD}:8000", ""),
        ({"bind": "::"}, f"https://{HEAD}:8000", ""),
        ({"bind": "fd00::20", "port": 443}, "https://[fd00::20]", ""),
        ({"bind": "10.0.0.7"}, "https://10.0.0.7:8000", ""),
        ({"bind": "0.0.0.0", "hostnames": ["gpuhub.lan", "rig1.lan"], "port": 443}, "https://gpuhub.lan", "same"),
        ({"bind": "0.0.0.0", "hostnames": ["gpuhub.lan"]}, "https://gpuhub.lan:8000", "same"),
        ({"https": "proxy", "url": "https://gpu.example.org/"}, "https://gpu.example.org", "same"),
        ({"https": "local", "hostnames": ["gpuhub.lan"]}, "https://gpuhub.lan:8000", "same"),
    ],
)
def test_the_address_that_people_open(settings: dict[str, Any], url: str, canonical: str) -> None:
    """Default ports are left out. Browsers are led to it only where the settings name it: tunnels have other ports."""
    assert public_access.build_public_url(hub(**settings), HEAD) == url
    assert public_access.build_canonical_url(hub(**settings), HEAD) == (url if canonical else "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"subdomains": True}, "needs hostnames"),
        ({"subdomains": True, "hostnames": ["gpuhub"]}, "below a name without a dot"),
        ({"subdomains": True, "hostnames": ["192.168.1.20"]}, "below an address"),
        ({"https": "files", "certificate": "/c.pem", "key": "/k.pem"}, "needs hostnames: the names in the cert"),
        ({"url": "https://gpuhub.lan"}, 'does not go with https = "off": write https = "proxy"'),
        ({"https": "proxy", "url": "http://gpuhub.lan"}, 'does not go with https = "proxy"'),
        ({"bind": "0.0.0.0", "url": "http://gpuhub.lan"}, 'does not go with https = "local"'),
        ({"bind": "0.0.0.0", "subdomains": True, "hostnames": ["a.lan"], "url": "https://b.lan"}, "must be its name"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        hub(**settings)


def test_what_the_certificate_is_for() -> None:
    """Names in the settings come first, then all names and addresses of the machine."""
    found = hub(bind="0.0.0.0", hostnames=["gpuhub.lan"], subdomains=True, url="https://gpuhub.lan:8443")
    assert public_access.list_configured_names(found) == ["gpuhub.lan", "*.gpuhub.lan"]
    names = public_access.list_certificate_names(found, HEAD, "Rig1.example.org")
    assert names == [
        "gpuhub.lan", "*.gpuhub.lan", "rig1.example.org", "rig1.local", "localhost", "127.0.0.1", HEAD,
    ]  # fmt: skip
    bound = public_access.list_certificate_names(hub(bind="10.0.0.7"), HEAD, "bad_name")
    assert bound == ["localhost", "127.0.0.1", HEAD, "10.0.0.7"]
    assert public_access.list_configured_names(hub(https="proxy", url="https://gpu.example.org")) == ["gpu.example.org"]


def test_cookies() -> None:
    """`Secure` needs HTTPS, and `__Host-` needs a separate name for each notebook."""
    assert public_access.build_cookie_options(hub()) == {"samesite": "Lax"}
    assert public_access.build_cookie_options(hub(bind="0.0.0.0")) == {"samesite": "Lax", "secure": True}
    assert public_access.build_cookie_options(hub(https="proxy", url="https://g.lan")) == {
        "samesite": "Lax",
        "secure": True,
    }
    apart = {"hostnames": ["gpuhub.lan"], "subdomains": True}
    assert public_access.has_host_prefix(hub(bind="0.0.0.0", **apart))
    assert not public_access.has_host_prefix(hub(**apart)), "a __Host- cookie needs HTTPS"
    assert not public_access.has_host_prefix(hub(bind="0.0.0.0")), "it would be sent to every notebook that is visited"


@pytest.mark.parametrize(
    ("settings", "transport"),
    [
        ({}, None),
        ({"bind": "0.0.0.0", "hostnames": ["gpuhub.lan"], "port": 443}, None),
        ({"certificate": "/c", "key": "/k", "hostnames": ["gpu.example.org"]}, None),
        ({"certificate": "/c", "key": "/k", "hostnames": ["gpu.example.org"], "port": 443}, "max-age=31536000"),
        ({"https": "proxy", "url": "https://gpu.example.org"}, "max-age=31536000"),
        ({"https": "proxy", "url": "https://gpu.example.org:8443"}, None),
        (
            {"https": "proxy", "url": "https://g.org", "hostnames": ["g.org"], "subdomains": True},
            "max-age=31536000; includeSubDomains",
        ),
    ],
)
def test_https_for_good(settings: dict[str, Any], transport: str | None) -> None:
    """Strict transport holds for all ports of a name: only for a name of the hub's own that browsers know."""
    assert public_access.build_headers(hub(**settings)).get("Strict-Transport-Security") == transport
