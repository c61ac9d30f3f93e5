"""The machines, the driver and the texts of `gpuhub node prepare`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpuhub.cli.console import AdminConsole
from gpuhub.common.errors import InvalidRequest
from gpuhub.common.paths import Paths
from gpuhub.ops.doctor.node_facts import GpuFacts
from gpuhub.ops.provision import node_access
from gpuhub.ops.provision.driver_packages import WantedDriver
from gpuhub.ops.provision.machine_state import MachineState
from gpuhub.ops.provision.node_preparation import (
    PreparationRequest,
    choose_driver,
    collect_targets,
    find_newest_branch,
    format_plan,
    format_target,
    parse_hosts,
    prepare_nodes,
)
from gpuhub.ops.provision.preparation_plan import PreparationPlan, PreparationStep
from gpuhub.ops.provision.ssh_session import parse_target
from tests.support.docker.simulated_nodes import build_cluster

STATE = MachineState(os="Debian GNU/Linux 12 (bookworm)", kernel="6.1.0-41-amd64", architecture="x86_64")


def test_hosts_come_from_the_command_line_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the rigs\nssh://me@rig3   # new\n\nssh://me@rig2\n")
    targets = collect_targets(["ssh://me@rig2"], file)
    assert [format_target(target) for target in targets] == ["ssh://me@rig2", "ssh://me@rig3"]


def test_wrong_hosts_are_named_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="hosts, line 2: 'rig3' is not an SSH address"):
        parse_hosts("ssh://me@rig2\nrig3\n", "hosts")
    with pytest.raises(InvalidRequest, match="no machine is named"):
        collect_targets([], None)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        collect_targets([], tmp_path / "nothing")


@pytest.mark.parametrize(
    "url", ["ssh://me@rig2", "ssh://rig2.lan", "ssh://me@192.168.1.22:2222", "ssh://me@[fd00::2]:22"]
)
def test_targets_are_written_as_they_are_read(url: str) -> None:
    assert format_target(parse_target(url)) == url


@pytest.mark.parametrize(
    ("drivers", "branch"),
    [([], None), (["", "unknown"], None), (["570.195.03"], "570"), (["99.1", "570.195.03", "535.261.03", ""], "570")],
)
def test_newest_branch(drivers: list[str], branch: str | None) -> None:
    assert find_newest_branch(drivers) == branch


@pytest.mark.parametrize(
    ("option", "drivers", "wanted"),
    [
        (None, ["535.261.03", "580.95.05"], WantedDriver(branch="580", source="the newest of the cluster's nodes")),
        (None, [], None),
        ("570", ["580.95.05"], WantedDriver(branch="570", source="--driver")),
    ],
)
def test_driver_is_that_of_the_clusters_nodes(
    monkeypatch: pytest.MonkeyPatch, option: str | None, drivers: list[str], wanted: WantedDriver | None
) -> None:
    """The GPU agents of the nodes name the driver, unless the administrator does."""
    gpus = tuple(GpuFacts(uuid=driver, model="RTX 5090", memory_mib=32607, driver=driver) for driver in drivers)

    async def query(*_: object, **__: object) -> tuple[dict[str, tuple[GpuFacts, ...]], dict[str, str], None]:
        return {"rig1": gpus, "rig2": ()}, {}, None

    monkeypatch.setattr(node_access, "query_other_nodes", query)
    request = PreparationRequest(targets=(parse_target("ssh://me@rig2"),), driver=option)
    assert choose_driver(request, build_cluster(), Paths("ghnone")) == wanted
    assert choose_driver(replace(request, driver=None), None, Paths("ghnone")) is None


def test_driver_must_be_a_branch() -> None:
    request = PreparationRequest(targets=(parse_target("ssh://me@rig2"),), driver="570.195")
    with pytest.raises(
        InvalidRequest, match=r"--driver 570\.195 is not a branch of NVIDIA's driver: write such as 570"
    ):
        prepare_nodes(request, Paths("ghnone"), AdminConsole())


def test_plans_are_shown_with_what_is_missing() -> None:
    step = PreparationStep(key="clock", title="install chrony (from Debian)", commands="true")
    text = format_plan(STATE, PreparationPlan(steps=(step,), notes=("no NVIDIA GPU",), needs_reboot=True))
    assert "\n  + install chrony (from Debian)\n  ! no NVIDIA GPU\n  ! it must be started again afterwards" in text
    assert "There is nothing to do" not in text
    assert format_plan(STATE, PreparationPlan()).endswith("\n  There is nothing to do.")
    refused = format_plan(replace(STATE, os=""), PreparationPlan(problems=("this system is not known",)))
    assert refused.endswith("\n  ✗ this system is not known")
    assert "system   unknown, kernel" in refused


def test_programs_cannot_read_the_rest_of_the_script() -> None:
    step = PreparationStep(key="x", title="x", commands="first\nsecond")
    assert step.build_script() == "set -eu\napply() {\nfirst\nsecond\n}\napply </dev/null\n"
