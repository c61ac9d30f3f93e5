"""A machine that is told to sleep, on a real Docker daemon; what stands for its systemctl notes the call."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuhub.common.errors import GpuhubError
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers import probe_container
from gpuhub.docker.containers.sleep_container import send_to_sleep
from gpuhub_closet import docker_daemons
from tests.support.closet.head_node import HeadNode
from tests.support.closet.practice_closet import Closet

SYSTEMCTL = """#!/bin/sh
echo "$@" >>{folder}/calls
[ ! -e {folder}/refuse ] || {{ echo "User mia is logged in on tty2." >&2; exit 1; }}
"""


@dataclass(frozen=True)
class Sleeper:
    """rig3, and the folder with the calls of its systemctl."""

    daemons: DockerClients
    folder: Path

    def read_calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(scope="module")
def systemctl(closet: Closet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another systemctl in the mounts of the closet's third node, which end with it; return the folder with its calls."""
    folder = tmp_path_factory.mktemp("systemctl")
    program = folder / "systemctl"
    program.write_text(SYSTEMCTL.format(folder=folder))
    program.chmod(0o755)
    processes = docker_daemons.find_processes(closet.plan, closet.plan.node("rig3"))
    daemon = next(pid for pid, name in processes.items() if name == "dockerd")
    enter = ["nsenter", f"--target={daemon}", "--mount"]
    subprocess.run([*enter, "mount", "--bind", program, "/usr/bin/systemctl"], check=True)
    return folder


@pytest.fixture
def sleeper(head: HeadNode, tiny_image: str, systemctl: Path, monkeypatch: pytest.MonkeyPatch) -> Sleeper:
    """rig3, which has the image of the test in place of gpuhub's, and has not been told to sleep yet."""
    monkeypatch.setattr(probe_container, "BASE_IMAGE", tiny_image)
    for name in ("calls", "refuse"):
        (systemctl / name).unlink(missing_ok=True)
    return Sleeper(head.daemons, systemctl)


@pytest.mark.parametrize("action", ["suspend", "poweroff"])
async def test_machines_own_systemctl_is_asked(sleeper: Sleeper, action: str) -> None:
    """It must look for people who are logged in, and nothing of the container is left over."""
    await send_to_sleep(sleeper.daemons, "rig3", "suspend" if action == "suspend" else "poweroff")
    assert sleeper.read_calls() == [f"{action} --check-inhibitors=yes"]
    filters = {"label": [probe_container.LABEL_DOCTOR]}
    assert await sleeper.daemons.call("rig3", "containers", all=True, filters=filters) == []


async def test_refusal_is_passed_on(sleeper: Sleeper) -> None:
    """With systemd's own words."""
    (sleeper.folder / "refuse").touch()
    with pytest.raises(GpuhubError, match=r"node rig3: systemctl suspend: User mia is logged in on tty2\."):
        await send_to_sleep(sleeper.daemons, "rig3", "suspend")
