"""`gpuhub node prepare` over real SSH; `apt-get`, `sudo`, `docker` and NVIDIA's programs are stand-ins that record calls."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuhub.cli.console import AdminConsole
from gpuhub.common.errors import GpuhubError, InvalidRequest
from gpuhub.common.paths import Paths
from gpuhub.ops.provision.node_preparation import PreparationRequest, prepare_nodes
from gpuhub.ops.provision.ssh_session import parse_target
from tests.support.closet.bare_machines import BareMachine, bare_machine
from tests.support.closet.ssh_machines import make_key, ssh_agent

pytestmark = [pytest.mark.root]

#: An instance that does not exist: no node's driver is known.
PATHS = Paths("ghbare")


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BareMachine]]:
    """Two bare machines, and an agent with the administrator's key."""
    monkeypatch.delenv("SUDO_USER", raising=False)
    make_key(tmp_path / "admin")
    with ExitStack() as stack:
        monkeypatch.setenv("SSH_AUTH_SOCK", stack.enter_context(ssh_agent(tmp_path / "admin")))
        yield [
            stack.enter_context(bare_machine(tmp_path / name, address, tmp_path / "admin"))
            for name, address in (("one", "127.0.0.11"), ("two", "127.0.0.12"))
        ]


class Terminal(io.StringIO):
    """Answers that a person types."""

    def isatty(self) -> bool:
        return True


def prepare(*urls: str, answers: io.StringIO | None = None, driver: str | None = None) -> str:
    """Return the output; the questions are skipped without `answers`."""
    output, targets = io.StringIO(), tuple(parse_target(url) for url in urls)
    request = PreparationRequest(targets=targets, driver=driver, yes=answers is None)
    try:
        prepare_nodes(request, PATHS, AdminConsole(output, answers))
    except GpuhubError as error:
        error.add_note(output.getvalue())
        raise
    return output.getvalue()


def test_bare_machines_are_prepared_once(machines: list[BareMachine]) -> None:
    one, two = machines
    text = prepare(one.url, two.url)
    for machine in machines:
        calls = machine.read_calls()
        installed = [call.rpartition("Timeout=300 ")[2] for call in calls if call.startswith("apt-get install")]
        assert installed == [
            "nvidia-driver nvidia-kernel-dkms nvidia-smi libcuda1 linux-headers-amd64",
            "docker.io apparmor",
            "chrony",
            "nfs-common",
            "curl",
            "nvidia-container-toolkit",
        ]
        assert all("--no-remove" in call for call in calls if call.startswith("apt-get install"))
        assert [call for call in calls if not call.startswith("apt-get")] == [
            "usermod -a -G docker -- me",
            "curl -fsSL --retry 3 -o /usr/share/keyrings/nvidia-container-toolkit-keyring.asc.new "
            "https://nvidia.github.io/libnvidia-container/gpgkey",
            "systemctl reload docker",
        ]
        assert "sudo -n sh -s" in machine.read("state/sudo")
        sources = machine.read("etc/apt/sources.list.d/debian.sources")
        assert "Components: main contrib non-free non-free-firmware\n" in sources
        assert machine.read("etc/apt/sources.list.d/debian.sources.save") == sources.replace(
            " contrib non-free non-free-firmware", ""
        )
        assert machine.read("etc/apt/sources.list.d/nvidia-container-toolkit.list") == (
            "deb [signed-by=/usr/share/keyrings/nvidia-container-toolkit-keyring.asc] "
            "https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH) /\n"
        )
        assert "BEGIN PGP" in machine.read("keyrings/nvidia-container-toolkit-keyring.asc")
        assert f"gpuhub node add {machine.url}" in text
    assert "GPUs     0000:01:00.0 (10de:2204)" in text
    assert "Secure Boot off" in text
    assert "127.0.0.11 | ✓ install chrony (from Debian)" in text
    assert "127.0.0.12 | ✓ install chrony (from Debian)" in text
    assert "! 127.0.0.11 prepared; the driver 535.261.03 is not loaded yet" in text

    before = [machine.read_calls() for machine in machines]
    again = prepare(one.url, two.url)
    assert [machine.read_calls() for machine in machines] == before
    assert again.count("There is nothing to do.") == 2
    assert "driver   535.261.03, not loaded (nvidia-driver)" in again
    assert "! 127.0.0.12 nothing to do; the driver 535.261.03 is not loaded yet" in again


def test_failed_machine_does_not_stop_the_others(machines: list[BareMachine]) -> None:
    one, two = machines
    one.miss_package("nfs-common")
    with pytest.raises(GpuhubError, match=r"not prepared: 127\.0\.0\.11, 127\.0\.0\.13") as failure:
        prepare(one.url, two.url, "ssh://me@127.0.0.13:9")
    text = failure.value.__notes__[0]
    assert "127.0.0.11 | ✗ on 127.0.0.11: E: Unable to locate package nfs-common" in text
    assert "✗ 127.0.0.13 no login:" in text
    assert "! 127.0.0.12 prepared;" in text
    assert f"node add {two.url}" in text
    assert f"node add {one.url}" not in text
    assert "nvidia-container-toolkit" not in one.read("state/packages")

    one.folder.joinpath("state/missing").unlink()
    before = len(one.read_calls())
    prepare(one.url)
    continued = [call.rpartition("Timeout=300 ")[2] for call in one.read_calls()[before:] if " install " in call]
    assert continued == ["nfs-common", "curl", "nvidia-container-toolkit"]


def test_machines_agree_on_a_driver_without_a_cluster(machines: list[BareMachine]) -> None:
    """The first machines of a cluster follow the one that has a driver; the others get another one only on request."""
    one, two = machines
    with (two.folder / "state/packages").open("a") as packages:
        packages.write("installed nvidia-driver 570.195.03-1\n")
    with pytest.raises(GpuhubError, match=r"not prepared: 127\.0\.0\.11") as failure:
        prepare(one.url, two.url)
    text = failure.value.__notes__[0]
    assert "driver 570 (the newest of these machines) is not in the package lists of Debian GNU/Linux 12" in text
    assert one.read_calls() == []

    text = prepare(one.url, two.url, driver="535")
    assert "it has driver 570.195.03, not 535 (--driver): installed drivers are not replaced" in text
    assert "installed nvidia-driver 535" in one.read("state/packages")


def test_step_without_an_effect_is_a_failure(machines: list[BareMachine]) -> None:
    """Each step is checked by the machine's state after it: here, Docker does not take the new runtime."""
    (machines[0].folder / "bin/usermod").unlink()
    (machines[0].folder / "bin/usermod").symlink_to("/bin/true")
    with pytest.raises(GpuhubError) as failure:
        prepare(machines[0].url)
    assert "the command succeeded and changed nothing: let me use Docker's socket" in failure.value.__notes__[0]


def test_nothing_changes_without_a_terminal(machines: list[BareMachine]) -> None:
    with pytest.raises(GpuhubError) as refusal:
        prepare(machines[0].url, answers=io.StringIO())
    assert "there is no terminal to confirm it at; --yes skips the question" in refusal.value.__notes__[0]
    assert machines[0].read_calls() == []


def test_nothing_changes_without_a_confirmation(machines: list[BareMachine]) -> None:
    """The host key is confirmed, the changes are not."""
    with pytest.raises(InvalidRequest, match=r"^nothing was changed\n") as refusal:
        prepare(machines[0].url, answers=Terminal("y\nn\n"))
    text = refusal.value.__notes__[0]
    assert "Is this a key of the machine" in text
    assert "+ install docker.io apparmor (from Debian)" in text
    assert text.endswith("Change 127.0.0.11 as shown? [y/N] ")
    assert machines[0].read_calls() == []
