"""Plans that make machines acceptable to `gpuhub node add`: from a machine's state to the missing steps.

`recorded/debian-12-state.txt` is what `machine_state.sh` wrote on a Debian 12 machine without a GPU, with another
mirror and less other repositories' sources. The states with GPUs, of Debian 13 and of Ubuntu are constructed from it and from the documented
formats of /sys, dpkg-query, apt-cache and /etc/os-release.
"""

from __future__ import annotations

import base64
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.ops.provision.apt_sources import add_components
from gpuhub.ops.provision.driver_packages import WantedDriver, choose_driver_packages
from gpuhub.ops.provision.machine_state import (
    AptSourceFile,
    MachineState,
    PciGpu,
    parse_machine_state,
    read_state_script,
)
from gpuhub.ops.provision.preparation_plan import PreparationPlan, build_plan, describe_state

RECORDED = (Path(__file__).parent / "recorded/debian-12-state.txt").read_text(encoding="utf-8")
RTX_3090 = PciGpu(address="0000:01:00.0", device=0x2204)
RTX_5090 = PciGpu(address="0000:01:00.0", device=0x2B85)
#: A new Debian 12 with a GPU, as its installer leaves it; constructed.
DEBIAN = replace(
    parse_machine_state(RECORDED),
    user="me",
    sudo="yes",
    groups=frozenset({"me", "sudo"}),
    kernel="6.1.0-41-amd64",
    gpus=(RTX_3090,),
    packages={
        "linux-image-6.1.0-41-amd64": "6.1.158-1",
        "linux-image-amd64": "6.1.158-1",
        "ca-certificates": "20230311",
        "systemd-timesyncd": "252.38-1~deb12u1",
    },
)
#: A new Ubuntu 24.04 with a GPU; constructed.
UBUNTU = MachineState(
    user="me",
    sudo="yes",
    groups=frozenset({"me", "sudo"}),
    distribution="ubuntu",
    release="24.04",
    codename="noble",
    os="Ubuntu 24.04.3 LTS",
    kernel="6.8.0-87-generic",
    architecture="x86_64",
    gpus=(RTX_3090,),
    packages={"linux-image-6.8.0-87-generic": "6.8.0-87.88", "linux-image-generic": "6.8.0-87.87", "curl": "8.5.0"},
    available=frozenset(
        {
            *("nvidia-driver-535-server", "nvidia-driver-570-server", "nvidia-driver-570-server-open"),
            *(
                "nvidia-driver-580-server",
                "nvidia-driver-580-server-open",
                "nvidia-driver-590",
                "nvidia-driver-590-open",
            ),
            *("linux-modules-nvidia-570-server-generic", "linux-modules-nvidia-580-server-generic"),
            "linux-modules-nvidia-580-server-open-generic",
        }
    ),
)
#: The Debian machine after its steps and a reboot; constructed.
PREPARED = replace(
    DEBIAN,
    groups=frozenset({"me", "sudo", "docker"}),
    loaded_driver="535.261.03",
    docker="20.10.24+dfsg1",
    runtimes=frozenset({"runc", "io.containerd.runc.v2", "nvidia"}),
    toolkit="1.18.0",
    packages={
        **DEBIAN.packages,
        "nvidia-driver": "535.261.03-1",
        "docker.io": "20.10.24+dfsg1-1+deb12u1+b6",
        "chrony": "4.3-2+deb12u1",
        "nfs-common": "1:2.6.2-4+deb12u1",
        "nvidia-container-toolkit": "1.18.0-1",
    },
)
ONE_LINE = AptSourceFile(
    path="/etc/apt/sources.list",
    text=(
        "# deb cdrom:[Debian]/ bookworm contrib main\n"
        "deb http://mirror.example/debian/ bookworm main non-free-firmware # the archive\n"
        "deb-src http://mirror.example/debian/ bookworm main non-free-firmware\n"
        "deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.lan/debian "
        "bookworm-updates main\n"
        "deb [signed-by=/usr/share/keyrings/other.gpg] https://other.example/debian bookworm main\n"
        "deb https://apt.example/debian bookworm-extra main\n"
    ),
)


def plan_for(state: MachineState, wanted: str | None = None) -> PreparationPlan:
    driver = None if wanted is None else WantedDriver(branch=wanted, source="--driver")
    return build_plan(state, driver, "x86_64")


def keys(plan: PreparationPlan) -> list[str]:
    return [step.key for step in plan.steps]


def packages(plan: PreparationPlan) -> dict[str, list[str]]:
    """Return the packages that each step installs."""
    return {
        step.key: step.commands.rpartition("Timeout=300 ")[2].split()
        for step in plan.steps
        if " install " in step.commands
    }


# -- the state ---------------------------------------------------------------------------------------------------------


def test_recorded_state_is_parsed() -> None:
    state = parse_machine_state(RECORDED)
    assert (state.distribution, state.release, state.codename) == ("debian", "12", "bookworm")
    assert (state.sudo, state.architecture, state.secure_boot) == ("root", "x86_64", None)
    assert (state.docker_package, state.clock_package) == ("docker.io", "systemd-timesyncd")
    assert (state.docker, state.toolkit, state.gpus, state.driver) == ("", None, (), "")
    assert state.kernel_flavour == ""
    [source] = state.sources
    assert source.path == "/etc/apt/sources.list.d/debian.sources"
    assert source.text.startswith("Types: deb\nURIs: http://mirror.example/debian\n")


def test_gpus_driver_and_secure_boot_are_parsed() -> None:
    """The lines for what the recorded machine does not have."""
    state = parse_machine_state(
        "gpu=0000:01:00.0 0x2204\ngpu=0000:41:00.0 0x2b85\nloaded_driver=535.261.03\nsecure_boot=1\ntoolkit=\n"
        "package=nvidia-driver 535.261.03-1\npackage=nvidia-driver-libs 535.261.03-1\n"
        "available=nvidia-driver-570-server\nend=\n"
    )
    assert [gpu.device for gpu in state.gpus] == [0x2204, 0x2B85]
    assert state.driver_package == ("nvidia-driver", "535.261.03-1")
    assert (state.secure_boot, state.toolkit, state.needs_reboot) == (True, "", False)
    assert replace(state, loaded_driver="").needs_reboot
    assert replace(state, loaded_driver="535.247.01").needs_reboot
    assert not replace(state, loaded_driver="", gpus=()).needs_reboot


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user=me\nsh: 12: unexpected", "to its end: sh: 12: unexpected"),
        ("", "it wrote nothing"),
        ("gpu=0000:01:00.0 nothing\nend=\n", "unknown form"),
        ("source=*** /etc/apt/sources.list\nend=\n", "unknown form"),
    ],
)
def test_other_output_is_refused(text: str, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        parse_machine_state(text)


@pytest.mark.process
def test_script_runs_to_its_end_here() -> None:
    """On the machine of the tests, whatever it is."""
    done = subprocess.run(["sh", "-s"], input=read_state_script(), capture_output=True, text=True, check=True)
    state = parse_machine_state(done.stdout)
    assert state.kernel
    assert done.stderr == ""


# -- apt's sources -----------------------------------------------------------------------------------------------------


def test_components_are_added_to_one_line_entries() -> None:
    lines = add_components(ONE_LINE, "bookworm").splitlines()
    before = ONE_LINE.text.splitlines()
    assert lines[1] == (
        "deb http://mirror.example/debian/ bookworm main non-free-firmware contrib non-free # the archive"
    )
    assert lines[3].endswith("bookworm-updates main contrib non-free non-free-firmware")
    unchanged = [0, 2, 4, 5]
    assert [lines[number] for number in unchanged] == [before[number] for number in unchanged]


def test_components_are_added_to_deb822_entries() -> None:
    [file] = DEBIAN.sources
    foreign = (
        "\nTypes: deb\nURIs: https://other.example/debian\nSuites: bookworm\nComponents: main\nSigned-By:\n -----\n"
    )
    disabled = "\nEnabled: no\nTypes: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\nComponents: main\n"
    text = add_components(replace(file, text=f"{file.text}{foreign}{disabled}"), "bookworm")
    assert text == f"{file.text.replace('main', 'main contrib non-free non-free-firmware')}{foreign}{disabled}"


@pytest.mark.parametrize("file", [ONE_LINE, *DEBIAN.sources], ids=lambda file: file.path)
def test_complete_sources_stay_as_they_are(file: AptSourceFile) -> None:
    text = add_components(file, "bookworm")
    assert add_components(replace(file, text=text), "bookworm") == text
    assert add_components(file, "trixie") == file.text


# -- plans -------------------------------------------------------------------------------------------------------------


def test_bare_debian_gets_everything() -> None:
    plan = plan_for(DEBIAN)
    assert keys(plan) == [
        *("lists", "sources /etc/apt/sources.list.d/debian.sources", "driver", "docker", "rights", "nfs"),
        *("download", "repository", "toolkit", "runtime"),
    ]
    assert packages(plan) == {
        "driver": ["nvidia-driver", "nvidia-kernel-dkms", "nvidia-smi", "libcuda1", "linux-headers-amd64"],
        "docker": ["docker.io", "apparmor"],
        "nfs": ["nfs-common"],
        "download": ["curl"],
        "toolkit": ["nvidia-container-toolkit"],
    }
    assert plan.problems == plan.notes == ()
    assert plan.needs_reboot
    sources = plan.steps[1].commands
    assert "cp -p /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list.d/debian.sources.save\n" in sources
    content = re.search(r"printf %s (\S+) ", sources)
    assert content is not None
    assert base64.b64decode(content[1]).decode().count("main contrib non-free non-free-firmware") == 2
    # `systemd-timesyncd` sets the clock, and chrony would replace it.
    assert not any("chrony" in step.commands for step in plan.steps)


def test_machine_without_a_clock_gets_chrony() -> None:
    state = replace(DEBIAN, packages={"linux-image-amd64": "6.1.158-1"})
    assert packages(plan_for(state))["clock"] == ["chrony"]


def test_newer_debian_has_dockers_command_in_a_package() -> None:
    state = replace(DEBIAN, release="13", codename="trixie", available=frozenset({"docker-cli"}))
    assert packages(plan_for(state))["docker"] == ["docker.io", "apparmor", "docker-cli"]
    assert "driver 550" in next(step.title for step in plan_for(state).steps if step.key == "driver")


def test_nothing_is_removed_and_no_machine_is_rebooted() -> None:
    for state in (DEBIAN, UBUNTU):
        for step in plan_for(state).steps:
            assert " install " not in step.commands or "--no-remove" in step.commands
            assert not re.search(
                r"\b(remove|purge|autoremove|reboot|restart docker)\b", step.commands.replace("--no-remove", "")
            )


def test_prepared_machine_needs_nothing() -> None:
    assert plan_for(PREPARED) == PreparationPlan()


def test_every_step_vanishes_from_the_plan_when_it_is_done() -> None:
    """A step is checked by the plan for the state after it: each part of the prepared state takes its step away."""
    done = replace(
        DEBIAN,
        gpus=PREPARED.gpus,
        packages=PREPARED.packages,
        groups=PREPARED.groups,
        runtimes=PREPARED.runtimes,
        toolkit=PREPARED.toolkit,
    )
    assert keys(plan_for(done)) == []
    assert plan_for(done).needs_reboot
    with_repository = replace(
        DEBIAN,
        sources=(
            *DEBIAN.sources,
            AptSourceFile(path="/x.list", text="deb https://nvidia.github.io/libnvidia-container/stable/deb/amd64 /\n"),
        ),
    )
    assert not {"repository", "download"} & set(keys(plan_for(with_repository)))


def test_installed_driver_is_not_replaced() -> None:
    plan = plan_for(PREPARED, "580")
    assert plan.steps == ()
    assert plan.notes == ("it has driver 535.261.03, not 580 (--driver): installed drivers are not replaced",)


def test_running_docker_of_another_origin_is_kept() -> None:
    state = replace(PREPARED, packages={**DEBIAN.packages, "docker-ce": "29.4.0", "nfs-common": "1"}, docker="29.4.0")
    assert keys(plan_for(state)) == []


def test_machine_without_sudo_is_refused() -> None:
    plan = plan_for(replace(DEBIAN, sudo="no"))
    assert plan.steps == ()
    assert plan.problems == (
        "me needs a password for sudo, or has none: log in as root, or allow sudo without a password until the machine is "
        "prepared",
    )


def test_root_needs_no_group() -> None:
    assert "rights" not in keys(plan_for(replace(DEBIAN, user="root", sudo="root")))


def test_secure_boot_and_a_module_built_there() -> None:
    """Debian builds the module on the machine; Canonical signs Ubuntu's, where there is one for the kernel."""
    [note] = plan_for(replace(DEBIAN, secure_boot=True)).notes
    assert "mokutil --import /var/lib/dkms/mok.pub" in note
    assert plan_for(replace(DEBIAN, secure_boot=False)).notes == ()
    assert plan_for(replace(UBUNTU, secure_boot=True)).notes == ()
    own_kernel = replace(UBUNTU, secure_boot=True, packages={"linux-image-lowlatency": "6.8.0"})
    [note] = plan_for(own_kernel).notes
    assert "mokutil --import /var/lib/shim-signed/mok/MOK.der" in note
    assert packages(plan_for(own_kernel))["driver"] == ["nvidia-driver-580-server", "linux-headers-lowlatency"]


def test_secure_boot_is_named_until_the_driver_is_loaded() -> None:
    refused = replace(PREPARED, loaded_driver="", secure_boot=True)
    assert "mokutil" in plan_for(refused).notes[0]
    signed = {**refused.packages, "linux-modules-nvidia-580-server-generic": "6.8.0-87.88"}
    assert plan_for(replace(refused, packages=signed)).notes == ()


def test_machine_without_a_gpu_gets_docker_alone() -> None:
    plan = plan_for(replace(DEBIAN, gpus=()))
    assert keys(plan) == ["lists", "docker", "rights", "nfs"]
    assert plan.notes == ("no NVIDIA GPU is on the PCI bus: neither driver nor toolkit will be installed",)
    assert not plan.needs_reboot


@pytest.mark.parametrize(
    ("distribution", "release"), [("fedora", "42"), ("debian", "11"), ("ubuntu", "25.10"), ("debian", "")]
)
def test_unknown_distribution_is_refused(distribution: str, release: str) -> None:
    plan = plan_for(replace(DEBIAN, distribution=distribution, release=release, os="Some Linux"))
    assert plan.steps == ()
    assert plan.problems[0].startswith(
        "Some Linux is not known (Debian 12 and 13; Ubuntu 22.04 and 24.04 are): install"
    )


def test_arm64_fits_an_arm64_head_node_only() -> None:
    state = replace(DEBIAN, architecture="aarch64", packages={"linux-image-arm64": "6.1.158-1"})
    assert plan_for(state).problems == (
        "its processor is aarch64, and the head node's x86_64: gpuhub's images are built for the head node's",
    )
    plan = build_plan(state, None, "aarch64")
    assert "linux-headers-arm64" in packages(plan)["driver"]
    # apt itself puts the architecture there.
    repository = next(step for step in plan.steps if step.key == "repository")
    assert "libnvidia-container/stable/deb/$(ARCH) /'" in repository.commands


# -- drivers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "wanted", "names"),
    [
        (UBUNTU, None, ("nvidia-driver-580-server", "linux-modules-nvidia-580-server-generic")),
        (UBUNTU, "570", ("nvidia-driver-570-server", "linux-modules-nvidia-570-server-generic")),
        (UBUNTU, "590", ("nvidia-driver-590", "linux-headers-generic")),
        (
            replace(UBUNTU, recommended="nvidia-driver-570"),
            None,
            ("nvidia-driver-570-server", "linux-modules-nvidia-570-server-generic"),
        ),
        (
            replace(UBUNTU, gpus=(RTX_3090, RTX_5090)),
            None,
            ("nvidia-driver-580-server-open", "linux-modules-nvidia-580-server-open-generic"),
        ),
        (
            replace(UBUNTU, packages={**UBUNTU.packages, "linux-image-generic-hwe-24.04": "6.14"}),
            "580",
            ("nvidia-driver-580-server", "linux-headers-generic-hwe-24.04"),
        ),
    ],
)
def test_ubuntus_driver(state: MachineState, wanted: str | None, names: tuple[str, ...]) -> None:
    driver = None if wanted is None else WantedDriver(branch=wanted, source="--driver")
    assert choose_driver_packages(state, driver).names == names


@pytest.mark.parametrize(
    ("state", "wanted", "message"),
    [
        (
            DEBIAN,
            "570",
            r"driver 570 \(--driver\) is not in the package lists of Debian .* accept that with --driver 535",
        ),
        (UBUNTU, "565", r"which have 580: accept that with --driver 580"),
        (replace(DEBIAN, gpus=(RTX_5090,)), None, "Blackwell generation and needs driver 570 or newer"),
        (
            replace(UBUNTU, gpus=(RTX_5090,), available=UBUNTU.available | {"nvidia-driver-535-server-open"}),
            "535",
            r"Blackwell generation and needs driver 570 or newer, not 535 \(--driver\): accept 580 with --driver 580",
        ),
        (
            replace(UBUNTU, gpus=(RTX_5090,), available=frozenset({"nvidia-driver-535-server-open"})),
            None,
            "have no nvidia-driver-NNN-server-open of branch 570 or newer: there, enable",
        ),
        (replace(UBUNTU, available=frozenset()), None, "no nvidia-driver-NNN-server: there, enable"),
        (replace(DEBIAN, packages={}), None, "the kernel 6.1.0-41-amd64 is not one of the distribution's packages"),
    ],
)
def test_driver_that_cannot_be_installed(state: MachineState, wanted: str | None, message: str) -> None:
    plan = plan_for(state, wanted)
    assert plan.steps == ()
    assert re.search(message, plan.problems[0])


def test_description_names_what_is_there() -> None:
    assert describe_state(replace(PREPARED, secure_boot=True)) == [
        "system   Debian GNU/Linux 12 (bookworm), kernel 6.1.0-41-amd64, x86_64, Secure Boot on",
        "GPUs     0000:01:00.0 (10de:2204)",
        "driver   535.261.03 (nvidia-driver)",
        "Docker   20.10.24+dfsg1, runtime nvidia",
        "toolkit  1.18.0",
        "clock    chrony",
        "NFS      nfs-common",
    ]
    text = "\n".join(describe_state(replace(DEBIAN, gpus=(), packages={"docker.io": "1"})))
    assert "GPUs     none of NVIDIA" in text
    assert "Docker   docker.io, does not answer" in text
    assert "clock    nothing sets it" in text
