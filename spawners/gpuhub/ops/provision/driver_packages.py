"""The packages of NVIDIA's driver that Debian and Ubuntu have for a machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuhub.common.errors import SetupError
from gpuhub.ops.provision.machine_state import MachineState, parse_branch, parse_upstream_version

#: Debian's release → the branch of its package `nvidia-driver`, for machines whose package lists do not have it yet.
_DEBIAN_BRANCHES = {"12": "535", "13": "550"}
_UBUNTU_DRIVER = re.compile(r"nvidia-driver-(\d+)(-server)?(-open)?")
#: The first PCI device number of Blackwell GPUs (GB100 is 0x2901, the RTX 5090 0x2b85), which the driver's README lists
#: ("Supported NVIDIA GPU products"); they need this branch or a newer one, and the open kernel modules.
_BLACKWELL = 0x2900
_BLACKWELL_BRANCH = 570


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedDriver:
    """The branch of the driver that a machine should get."""

    #: Such as `570`.
    branch: str
    #: Who wants it, such as `--driver`.
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverPackages:
    """The packages to install, in the order in which people read them."""

    branch: str
    names: tuple[str, ...]
    #: The kernel modules are built on the machine (DKMS), so that the distribution did not sign them.
    is_built_there: bool


def choose_driver_packages(state: MachineState, wanted: WantedDriver | None) -> DriverPackages:
    """Return the packages of the wanted branch, or of the distribution's own choice without one.

    Raises:
        SetupError: The distribution has no driver that fits the GPUs, the kernel and the wanted branch.
    """
    if not state.kernel_flavour:
        raise SetupError(
            f"the kernel {state.kernel} is not one of the distribution's packages, so no driver package fits it: "
            "install the distribution's kernel (Debian: linux-image-amd64, Ubuntu: linux-image-generic), or the driver "
            "by hand"
        )
    is_open = any(gpu.device >= _BLACKWELL for gpu in state.gpus)
    chosen = (
        _choose_debian(state, is_open) if state.distribution == "debian" else _choose_ubuntu(state, wanted, is_open)
    )
    if is_open and int(chosen.branch) < _BLACKWELL_BRANCH:
        raise SetupError(
            f"a GPU here is of the Blackwell generation and needs driver {_BLACKWELL_BRANCH} or newer, and "
            f"{state.os} has {chosen.branch}: install Ubuntu 24.04 instead, or NVIDIA's own packages by hand"
        )
    if is_open and wanted is not None and int(wanted.branch) < _BLACKWELL_BRANCH:
        raise SetupError(
            f"a GPU here is of the Blackwell generation and needs driver {_BLACKWELL_BRANCH} or newer, not "
            f"{wanted.branch} ({wanted.source}): accept {chosen.branch} with --driver {chosen.branch}"
        )
    if wanted is not None and wanted.branch != chosen.branch:
        raise SetupError(
            f"driver {wanted.branch} ({wanted.source}) is not in the package lists of {state.os}, which have "
            f"{chosen.branch}: accept that with --driver {chosen.branch}"
        )
    return chosen


def _choose_debian(state: MachineState, is_open: bool) -> DriverPackages:
    branch = (
        parse_branch(parse_upstream_version(state.driver_candidate))
        if state.driver_candidate
        else _DEBIAN_BRANCHES[state.release]
    )
    module = "nvidia-open-kernel-dkms" if is_open else "nvidia-kernel-dkms"
    names = ("nvidia-driver", module, "nvidia-smi", "libcuda1", f"linux-headers-{state.kernel_flavour}")
    return DriverPackages(branch=branch, names=names, is_built_there=True)


def _choose_ubuntu(state: MachineState, wanted: WantedDriver | None, is_open: bool) -> DriverPackages:
    drivers = [match for name in state.available if (match := _UBUNTU_DRIVER.fullmatch(name))]
    least = _BLACKWELL_BRANCH if is_open else 0
    fitting = [match for match in drivers if bool(match[3]) == is_open and int(match[1]) >= least]
    if not fitting:
        name = f"nvidia-driver-NNN-server-open of branch {least} or newer" if is_open else "nvidia-driver-NNN-server"
        raise SetupError(
            f"the package lists of {state.os} have no {name}: there, enable the component `restricted`, run "
            "`sudo apt-get update`, and try again"
        )
    recommended = _UBUNTU_DRIVER.fullmatch(state.recommended)
    preferences = [wanted.branch if wanted else "", recommended[1] if recommended and not wanted else ""]
    # A branch for servers is supported for longer than one for desktops.
    driver = max(
        fitting, key=lambda match: (*(match[1] == branch for branch in preferences), bool(match[2]), int(match[1]))
    )
    modules = f"linux-modules-nvidia-{driver[0].removeprefix('nvidia-driver-')}-{state.kernel_flavour}"
    is_built_there = modules not in state.available
    kernel = f"linux-headers-{state.kernel_flavour}" if is_built_there else modules
    return DriverPackages(branch=driver[1], names=(driver[0], kernel), is_built_there=is_built_there)
