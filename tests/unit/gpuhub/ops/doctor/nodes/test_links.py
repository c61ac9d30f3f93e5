"""What the doctor reads of network ports, and what it says about them."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpuhub.common.errors import GpuhubError
from gpuhub.ops.doctor.findings import Severity
from gpuhub.ops.doctor.node_facts import LinkFacts, build_script_arguments, parse_probe
from gpuhub.ops.doctor.nodes import link_modes
from gpuhub.ops.doctor.nodes.link_checks import check_data_link, check_link, describe_data_network
from tests.support.machine_probe import probe_this_machine

#: What Linux 6.18 answered for a virtio port without a speed, and for one end of a veth pair: four words a mask, no mode.
VIRTIO = bytes.fromhex("4c000000ffffffffffff000000000004" + "00" * 80)
VETH = bytes.fromhex("4c000000102700000100000000000004" + "00" * 80)
PORT = LinkFacts(interface="eth0", is_wireless=False, speed=1000, duplex="full", max_speed=1000)


def with_modes(*bits: int) -> bytes:
    """Return the veth's answer with these bits of `linux/ethtool.h` in the mask of supported modes, and all in others."""
    mask = sum(1 << bit for bit in bits)
    supported = struct.pack("=4I", *((mask >> 32 * word) & 0xFFFFFFFF for word in range(4)))
    return VETH[:48] + supported + b"\xff" * 32


@pytest.mark.parametrize(
    ("settings", "speed"),
    [
        (VIRTIO, None),
        (VETH, None),
        # 10 to 1000 Mb/s over twisted pair, then with 2500baseT and 10000baseT as well.
        (with_modes(0, 1, 2, 3, 5, 6, 7, 9, 13), 1000),
        (with_modes(0, 1, 2, 3, 5, 6, 7, 9, 13, 47), 2500),
        (with_modes(3, 5, 6, 7, 12, 13, 47, 48), 10_000),
        # 25000baseCR, 100000baseKR4 and 400000baseCR4; a pause frame, FEC and bits after 92 are no speeds.
        (with_modes(31), 25_000),
        (with_modes(36), 100_000),
        (with_modes(89), 400_000),
        (with_modes(13, 50, 74, 93, 120), None),
    ],
)
def test_highest_supported_speed_is_parsed(settings: bytes, speed: int | None) -> None:
    assert link_modes.parse_max_speed(settings) == speed


@pytest.mark.process
def test_interfaces_of_this_machine_are_read() -> None:
    """The loopback has no such settings in any kernel; the script gives a line for each port with known modes."""
    with pytest.raises(OSError, match="not supported"):
        link_modes.read_link_settings("lo")
    with pytest.raises(OSError, match="No such device"):
        link_modes.read_link_settings("none-such0")
    done = subprocess.run(
        [sys.executable, "-c", Path(link_modes.__file__).read_text(encoding="utf-8")],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [f"port={name} {speed}" for name, speed in link_modes.list_max_speeds()]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_speed": 2500}, "eth0 runs at 1000 Mb/s; it supports 2500"),
        ({"max_speed": 10_000}, "eth0 runs at 1000 Mb/s; it supports 10000"),
        ({"speed": 100}, "eth0 runs at 100 Mb/s; it supports 1000"),
        ({"speed": 100, "max_speed": None}, "eth0 runs at 100 Mb/s"),
        ({"duplex": "half"}, "eth0 runs at 1000 Mb/s, half duplex: it loses packets under load"),
        ({"is_wireless": True, "speed": None}, "eth0 is Wi-Fi: images, homes"),
    ],
)
def test_each_problem_of_a_port_is_a_warning(changes: dict[str, object], text: str) -> None:
    [finding] = check_link(replace(PORT, **changes))  # type: ignore[arg-type]
    assert (finding.check, finding.severity) == ("link", Severity.WARNING)
    assert finding.value.startswith(text)
    assert finding.advice


@pytest.mark.parametrize(
    "changes", [{}, {"speed": 2500, "max_speed": 10_000}, {"max_speed": None}, {"speed": 10_000, "duplex": "unknown"}]
)
def test_a_good_port_has_no_problem(changes: dict[str, object]) -> None:
    [finding] = check_link(replace(PORT, **changes))  # type: ignore[arg-type]
    assert finding.severity is Severity.OK


def test_an_interface_without_a_speed_gives_no_finding() -> None:
    assert list(check_link(replace(PORT, speed=None))) == []
    assert list(check_link(None)) == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("port=eth1 10000\nport=eth0 2500\nlink=eth0 1000 full wired\n", replace(PORT, max_speed=2500)),
        ("link=eth0 1000 full wired\n", replace(PORT, max_speed=None)),
        ("link=eth0 -1 unknown wired\n", replace(PORT, speed=None, duplex="unknown", max_speed=None)),
        ("link=eth0 0 half wired\n", replace(PORT, speed=None, duplex="half", max_speed=None)),
        ("link=eth0 -1 unknown wireless\n", LinkFacts(interface="eth0", is_wireless=True, speed=None, duplex="unknown", max_speed=None)),
        ("", None),
        ("port=eth0 2500\n", None),
        ("link=eth0\n", None),
    ],
)  # fmt: skip
def test_port_is_parsed(lines: str, expected: LinkFacts | None) -> None:
    assert parse_probe(f"{lines}end=\n").link == expected


@pytest.mark.process
def test_the_probe_leaves_out_virtual_interfaces() -> None:
    """127.0.0.1 is on the loopback, which has no device; no interface has an address of the documentation's network."""
    for address in ("127.0.0.1", "203.0.113.77"):
        words = build_script_arguments(
            docker_root="/", head="127.0.0.1", addresses=[], accounts=[], own_address=address
        )
        assert f"link:{address}" in words
        assert probe_this_machine(words).link is None


@pytest.mark.process
def test_the_probe_says_whether_the_machine_has_its_data_address() -> None:
    """The loopback's address is there, that of the documentation's network is not."""
    for address, has_it in (("127.0.0.1", True), ("203.0.113.77", False)):
        words = build_script_arguments(
            docker_root="/", head="127.0.0.1", addresses=[], accounts=[], data_address=address
        )
        facts = probe_this_machine(words)
        assert (facts.has_data_address, facts.data_link) == (has_it, None)
    with pytest.raises(GpuhubError, match="have a meaning to a shell"):
        build_script_arguments(docker_root="/", head="::1", addresses=[], accounts=[], data_address="$(id)")


def test_port_of_the_data_address_is_checked_too() -> None:
    """Its own speed, and whether the machine has it at all; not twice where both addresses are on one port."""
    fast = LinkFacts(interface="eth1", is_wireless=False, speed=10_000, duplex="full", max_speed=10_000)
    host = parse_probe(
        "port=eth1 10000\nlink=eth0 1000 full wired\nhas_data=yes\ndata_link=eth1 10000 full wired\nend=\n"
    )
    assert host.data_link == fast
    [finding] = check_data_link(host, "10.10.0.21")
    assert finding.value == "eth1 runs at 10000 Mb/s, full duplex"
    [finding] = check_data_link(replace(host, data_link=replace(fast, speed=1000)), "10.10.0.21")
    assert "it supports 10000" in finding.value
    [finding] = check_data_link(replace(host, data_link=None, has_data_address=False), "10.10.0.21")
    assert finding.value == "no network port of the machine has 10.10.0.21"
    assert list(check_data_link(replace(host, data_link=host.link), "10.10.0.21")) == []
    assert list(check_data_link(host, "")) == []


def test_data_network_is_named_with_what_it_gives_up() -> None:
    """Only where the node has one."""
    assert list(describe_data_network("")) == []
    [finding] = describe_data_network("eth1")
    assert "eth1" in finding.value
    assert "forge" in finding.value
