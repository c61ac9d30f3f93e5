"""The plan that makes a machine acceptable to `gpuhub node add`: from its state to the steps that are still missing.

A machine that has everything gets a plan without steps. A plan adds packages, components of apt's sources, NVIDIA's
repository, a runtime of Docker and a group of the user; it removes nothing and replaces no driver and no Docker.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from gpuhub.common.errors import SetupError
from gpuhub.ops.provision.apt_sources import DRIVER_COMPONENTS, add_components
from gpuhub.ops.provision.driver_packages import DriverPackages, WantedDriver, choose_driver_packages
from gpuhub.ops.provision.machine_state import MachineState, parse_branch

#: The distributions whose packages are known: `ID` → `VERSION_ID`s.
SUPPORTED_RELEASES = {"debian": ("12", "13"), "ubuntu": ("22.04", "24.04")}
#: NVIDIA's repository of the container toolkit, as its installation guide has it since version 1.14.
TOOLKIT_REPOSITORY = "https://nvidia.github.io/libnvidia-container"
_TOOLKIT_KEYRING = "/usr/share/keyrings/nvidia-container-toolkit-keyring.asc"
_TOOLKIT_LIST = "/etc/apt/sources.list.d/nvidia-container-toolkit.list"
#: Command that installs packages: nothing is removed, no changed configuration file is replaced, no service restarts
#: without need, and another apt that runs is waited for.
INSTALL_COMMAND = (
    "DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get install -q -y --no-remove --no-install-recommends "
    "-o Dpkg::Options::=--force-confold -o DPkg::Lock::Timeout=300"
)
UPDATE_COMMAND = "apt-get update -q -o DPkg::Lock::Timeout=300"
_CONFIGURE_RUNTIME = """\
nvidia-ctk runtime configure --runtime=docker
# A reload reads the runtimes again and leaves containers alone.
if [ -d /run/systemd/system ]; then systemctl reload docker; else kill -HUP "$(cat /var/run/docker.pid)"; fi
for _ in 1 2 3 4 5 6 7 8 9 10; do
    docker info --format '{{range $name, $_ := .Runtimes}}{{$name}} {{end}}' | grep -qw nvidia && return
    sleep 1
done
echo "Docker does not list the runtime nvidia after a reload: restart it, which may stop its containers" >&2
exit 1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationStep:
    """One change of a machine."""

    #: Name of the step, equal in every plan, so that a later plan shows whether the step is still missing.
    key: str
    #: The change as the administrator reads it: `install chrony (from Debian)`.
    title: str
    #: Commands for root's POSIX shell.
    commands: str
    #: Whether a machine's state shows that the step was done.
    is_visible: bool = True

    def build_script(self) -> str:
        """Return a script for `sh -s` whose programs cannot read the rest of the script as their input."""
        return f"set -eu\napply() {{\n{self.commands}\n}}\napply </dev/null\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationPlan:
    """What is missing on a machine."""

    steps: tuple[PreparationStep, ...] = ()
    #: Why nothing can be done there, with the remedies; without any the steps can run.
    problems: tuple[str, ...] = ()
    #: What the administrator should know.
    notes: tuple[str, ...] = ()
    #: The machine must be started again before it can be a node: now, or after the steps.
    needs_reboot: bool = False


def build_plan(state: MachineState, wanted: WantedDriver | None, head_architecture: str) -> PreparationPlan:
    """Return the plan for a machine in this state.

    Args:
        wanted: The branch of the driver; None for the distribution's own choice.
        head_architecture: The kernel's name of the head node's processor, for which images are built.
    """
    problems = list(_find_problems(state, head_architecture))
    driver: DriverPackages | None = None
    if not problems and state.gpus and not state.driver:
        try:
            driver = choose_driver_packages(state, wanted)
        except SetupError as error:
            problems.append(str(error))
    if problems:
        return PreparationPlan(problems=tuple(problems), notes=tuple(_find_notes(state, wanted, None)))
    steps = [
        *_add_sources(state, driver),
        *_add_driver(state, driver),
        *_add_docker(state),
        *_add_services(state),
        *_add_toolkit(state),
    ]
    if any(step.commands.startswith(INSTALL_COMMAND) for step in steps):
        lists = PreparationStep(
            key="lists", title="read the package lists again", commands=UPDATE_COMMAND, is_visible=False
        )
        steps.insert(0, lists)
    return PreparationPlan(
        steps=tuple(steps),
        notes=tuple(_find_notes(state, wanted, driver)),
        needs_reboot=driver is not None or state.needs_reboot,
    )


def describe_state(state: MachineState) -> list[str]:
    """Return what the machine has, one line each."""
    gpus = ", ".join(f"{gpu.address} (10de:{gpu.device:04x})" for gpu in state.gpus)
    package = state.driver_package
    driver = "none" if not state.driver else state.driver if state.loaded_driver else f"{state.driver}, not loaded"
    boot = {None: "", True: ", Secure Boot on", False: ", Secure Boot off"}[state.secure_boot]
    docker = state.docker or (f"{state.docker_package}, does not answer" if state.docker_package else "none")
    return [
        f"system   {state.os or 'unknown'}, kernel {state.kernel}, {state.architecture}{boot}",
        f"GPUs     {gpus or 'none of NVIDIA'}",
        f"driver   {driver}{f' ({package[0]})' if package else ''}",
        f"Docker   {docker}{', runtime nvidia' if 'nvidia' in state.runtimes else ''}",
        f"toolkit  {'none' if state.toolkit is None else state.toolkit or 'installed'}",
        f"clock    {state.clock_package or 'nothing sets it'}",
        f"NFS      {'nfs-common' if 'nfs-common' in state.packages else 'no client'}",
    ]


def _find_problems(state: MachineState, head_architecture: str) -> Iterator[str]:
    if state.release not in SUPPORTED_RELEASES.get(state.distribution, ()):
        known = "; ".join(f"{name.capitalize()} {' and '.join(all_)}" for name, all_ in SUPPORTED_RELEASES.items())
        yield (
            f"{state.os or 'this system'} is not known ({known} are): install NVIDIA's driver, Docker Engine, NVIDIA's "
            "container toolkit and chrony by hand, then `gpuhub node add` checks them"
        )
    if state.architecture != head_architecture:
        yield (
            f"its processor is {state.architecture}, and the head node's {head_architecture}: gpuhub's images are "
            "built for the head node's"
        )
    if state.sudo == "no":
        yield (
            f"{state.user} needs a password for sudo, or has none: log in as root, or allow sudo without a password "
            "until the machine is prepared"
        )


def _find_notes(state: MachineState, wanted: WantedDriver | None, driver: DriverPackages | None) -> Iterator[str]:
    if not state.gpus:
        yield "no NVIDIA GPU is on the PCI bus: neither driver nor toolkit will be installed"
    is_unsigned = state.needs_reboot and not state.has_signed_modules if driver is None else driver.is_built_there
    if is_unsigned and state.secure_boot:
        key = "/var/lib/dkms/mok.pub" if state.distribution == "debian" else "/var/lib/shim-signed/mok/MOK.der"
        yield (
            "Secure Boot is on, and the driver's kernel modules are built there, unsigned by the distribution: before "
            f"the reboot, `sudo mokutil --import {key}`, and confirm the key at the machine's screen while it starts, "
            "or turn Secure Boot off"
        )
    if state.driver and wanted is not None and parse_branch(state.driver) != wanted.branch:
        yield f"it has driver {state.driver}, not {wanted.branch} ({wanted.source}): installed drivers are not replaced"
    if state.docker_package and not state.docker:
        yield f"Docker ({state.docker_package}) is installed and does not answer: see `systemctl status docker` there"


def _add_sources(state: MachineState, driver: DriverPackages | None) -> Iterator[PreparationStep]:
    if driver is None or state.distribution != "debian" or state.driver_candidate:
        return
    for file in state.sources:
        text = add_components(file, state.codename)
        if text != file.text:
            path = shlex.quote(file.path)
            content = base64.b64encode(text.encode()).decode()
            yield PreparationStep(
                key=f"sources {file.path}",
                title=f"add {' '.join(DRIVER_COMPONENTS)} to {file.path} (the previous file: {file.path}.save)",
                commands=f"cp -p {path} {path}.save\nprintf %s {content} | base64 -d >{path}\n{UPDATE_COMMAND}",
            )


def _add_driver(state: MachineState, driver: DriverPackages | None) -> Iterator[PreparationStep]:
    if driver is not None:
        yield _install("driver", driver.names, f"{_name(state)}, driver {driver.branch}")


def _add_docker(state: MachineState) -> Iterator[PreparationStep]:
    if not state.docker and not state.docker_package:
        # Since Debian 13 the command `docker` is a package of its own.
        packages = ("docker.io", "apparmor", "docker-cli")
        yield _install("docker", packages if "docker-cli" in state.available else packages[:2], _name(state))
    if state.sudo != "root" and "docker" not in state.groups:
        yield PreparationStep(
            key="rights",
            title=f"let {state.user} use Docker's socket (group docker), which is as good as root",
            commands=f"usermod -a -G docker -- {shlex.quote(state.user)}",
        )


def _add_services(state: MachineState) -> Iterator[PreparationStep]:
    if not state.clock_package:
        yield _install("clock", ("chrony",), _name(state))
    if "nfs-common" not in state.packages:
        yield _install("nfs", ("nfs-common",), _name(state))


def _add_toolkit(state: MachineState) -> Iterator[PreparationStep]:
    if not state.gpus:
        return
    if state.toolkit is None:
        if not any(TOOLKIT_REPOSITORY in file.text for file in state.sources):
            tools = tuple(name for name in ("ca-certificates", "curl") if name not in state.packages)
            if tools:
                yield _install("download", tools, _name(state))
            yield PreparationStep(
                key="repository",
                title=f"add NVIDIA's repository {TOOLKIT_REPOSITORY} and its key ({_TOOLKIT_LIST}, {_TOOLKIT_KEYRING})",
                commands=_build_repository_commands(),
            )
        yield _install("toolkit", ("nvidia-container-toolkit",), "NVIDIA's repository")
    if "nvidia" not in state.runtimes:
        yield PreparationStep(
            key="runtime",
            title="`nvidia-ctk runtime configure --runtime=docker`, then reload Docker (containers continue)",
            commands=_CONFIGURE_RUNTIME,
        )


def _build_repository_commands() -> str:
    line = f"deb [signed-by={_TOOLKIT_KEYRING}] {TOOLKIT_REPOSITORY}/stable/deb/$(ARCH) /"
    return (
        f"curl -fsSL --retry 3 -o {_TOOLKIT_KEYRING}.new {TOOLKIT_REPOSITORY}/gpgkey\n"
        f"grep -q 'BEGIN PGP PUBLIC KEY BLOCK' {_TOOLKIT_KEYRING}.new\n"
        f"chmod 644 {_TOOLKIT_KEYRING}.new\n"
        f"mv {_TOOLKIT_KEYRING}.new {_TOOLKIT_KEYRING}\n"
        f"printf '%s\\n' {shlex.quote(line)} >{_TOOLKIT_LIST}\n"
        f"{UPDATE_COMMAND}"
    )


def _install(key: str, packages: tuple[str, ...], source: str) -> PreparationStep:
    names = " ".join(packages)
    return PreparationStep(key=key, title=f"install {names} (from {source})", commands=f"{INSTALL_COMMAND} {names}")


def _name(state: MachineState) -> str:
    return state.distribution.capitalize()
