"""Which addresses a user's notification may be sent to."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from gpuhub.config.notifications import parse_allowed
from gpuhub.notifications import addresses
from gpuhub.notifications.addresses import explain_forbidden, read_connected_networks

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


def test_networks_of_the_head_node_are_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours may have addresses of the internet; the files are those of a machine with one network card."""
    routes, routes6 = tmp_path / "route", tmp_path / "ipv6_route"
    routes.write_text(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t01640E5D\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t00640E5D\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    zeros = "0" * 32
    routes6.write_text(
        f"2a020001000000000000000000000000 40 {zeros} 00 {zeros} 00000100 00000001 00000000 00000001     eth0\n"
        f"{zeros} 00 {zeros} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0\n"
        f"{zeros} 00 {zeros} 00 {zeros} ffffffff 00000001 00000000 00200200       lo\n"
    )
    monkeypatch.setattr(addresses, "_ROUTES", routes)
    monkeypatch.setattr(addresses, "_ROUTES6", routes6)
    connected = read_connected_networks()
    assert [str(network) for network in connected] == ["93.14.100.0/24", "2a02:1::/64"]
    for address, is_permitted in {
        "93.14.100.7": False,
        "::ffff:93.14.100.7": False,
        "2a02:1::7": False,
        "93.14.101.7": True,
        "2a02:1:0:1::7": True,
    }.items():
        reason = explain_forbidden(ipaddress.ip_address(address), 443, (), connected)
        assert (reason is None) == is_permitted
    allowed = [parse_allowed("93.14.100.7:443")]
    assert explain_forbidden(ipaddress.ip_address("93.14.100.7"), 443, allowed, connected) is None


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
