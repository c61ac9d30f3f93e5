"""Which addresses a user's notification may be sent to."""

from __future__ import annotations

import ipaddress

import pytest

from gpuhub.config.notifications import parse_allowed
from gpuhub.notifications.addresses import explain_forbidden

FORBIDDEN = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.10", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "fd12::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:db8::1",
]  # fmt: skip


@pytest.mark.parametrize("address", FORBIDDEN)
def test_addresses_that_are_not_of_the_internet_are_forbidden(address: str) -> None:
    """Also in the forms in which IPv6 carries IPv4 addresses."""
    assert explain_forbidden(ipaddress.ip_address(address), 443, ()) is not None


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "64:ff9b::101:101"])
def test_addresses_of_the_internet_are_permitted(address: str) -> None:
    """Nothing more is needed."""
    assert explain_forbidden(ipaddress.ip_address(address), 443, ()) is None


@pytest.mark.parametrize(
    ("allowed", "address", "port", "is_permitted"),
    [
        ("192.168.1.10:2586", "192.168.1.10", 2586, True),
        ("192.168.1.10:2586", "192.168.1.10", 22, False),
        ("192.168.1.10:2586", "192.168.1.11", 2586, False),
        ("10.0.0.0/24", "10.0.0.7", 80, True),
        ("10.0.0.0/24", "10.0.1.7", 80, False),
        ("10.0.0.0/24", "::ffff:10.0.0.7", 80, True),
        ("[fd00::1]:443", "fd00::1", 443, True),
        ("[fd00::/64]", "fd00::9", 80, True),
    ],
)
def test_an_administrator_permits_addresses(allowed: str, address: str, port: int, *, is_permitted: bool) -> None:
    """One address or a network, with one port or all."""
    reason = explain_forbidden(ipaddress.ip_address(address), port, [parse_allowed(allowed)])
    assert (reason is None) == is_permitted


@pytest.mark.parametrize(
    "text", ["", "ntfy.lan", "192.168.1.300", "192.168.1.10:0x1", "10.0.0.1/24", "1.2.3.4:99999", "fd00::1"]
)
def test_other_texts_are_refused(text: str) -> None:
    """With an example."""
    with pytest.raises(ValueError, match="is not an address: write"):
        parse_allowed(text)
