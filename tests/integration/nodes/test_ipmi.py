"""Nodes are switched by IPMI: the real ipmitool, and a simulated management controller that speaks IPMI 2.0."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.config.machines.nodes import NodeSettings
from gpuhub.config.machines.power import PowerSettings
from gpuhub.nodes import power_switch
from gpuhub.nodes.power_switch import check_ipmi, switch_off, switch_on
from tests.support.docker import simulated_nodes
from tests.support.ipmi import PASSWORD, USER, ManagedMachine, managed_machine

pytestmark = pytest.mark.root

#: No other test's address of loopback.
ADDRESS = "127.0.0.62"
#: An `off` by IPMI reaches no Docker daemon.
NO_DAEMONS: Any = None


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[ManagedMachine]:
    with managed_machine(tmp_path, ADDRESS) as machine:
        yield machine


def build_node(address: str = ADDRESS) -> NodeSettings:
    return NodeSettings.model_validate(
        {"name": "rig2", "address": "127.0.0.12", "power": {"ipmi_address": address, "on": "ipmi", "off": "ipmi"}}
    )


def build_power(folder: Path, password: str = PASSWORD) -> PowerSettings:
    file = folder / "password"
    file.write_text(f"{password}\n")
    file.chmod(0o600)
    return PowerSettings.model_validate(
        {"on": "ipmi", "off": "ipmi", "ipmi_user": USER, "ipmi_password_file": str(file)}
    )


async def test_machine_is_switched_on_and_shut_down(machine: ManagedMachine, tmp_path: Path) -> None:
    """Its system is asked to shut down, so that it can save."""
    node, power = build_node(), build_power(tmp_path)
    await switch_on(node, power)
    assert machine.is_on
    await switch_off(NO_DAEMONS, node, power)
    assert not machine.is_on
    assert machine.calls == ["set power 1", "set shutdown 1"]


async def test_refused_login_and_silent_controller_are_errors(machine: ManagedMachine, tmp_path: Path) -> None:
    """The password is not in the text; ipmitool gives the same reason for both."""
    power = build_power(tmp_path, "xX-wrong")
    outcomes = await asyncio.gather(
        switch_on(build_node(), power), switch_on(build_node("127.0.0.63"), power), return_exceptions=True
    )
    for outcome in outcomes:
        assert isinstance(outcome, GpuhubError)
        assert str(outcome) == (
            "node rig2: ipmitool failed with exit code 1: Error: Unable to establish IPMI v2 / RMCP+ session"
        )
    assert not machine.is_on


def test_missing_ipmitool_is_an_error_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = simulated_nodes.build_cluster().model_copy(
        update={"nodes": (build_node(),), "power": build_power(tmp_path)}
    )
    check_ipmi(cluster)
    monkeypatch.setattr(power_switch, "_PATH", str(tmp_path))
    with pytest.raises(SetupError, match="needs ipmitool on the head node: `apt-get install ipmitool`"):
        check_ipmi(cluster)
