"""The state of a machine before it becomes a node, parsed from the output of `machine_state.sh`."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

from gpuhub.common.errors import SetupError

#: Packages that bring a driver; others of the same prefix are parts of it.
_DRIVER_PACKAGE = re.compile(
    r"nvidia-(driver|headless)(-\d+)?(-server)?(-open)?|nvidia-tesla-(\d+-)?driver|nvidia-open(-\d+)?|cuda-drivers(-\d+)?"
)
_DOCKER_PACKAGES = ("docker.io", "docker-ce", "moby-engine")
_CLOCK_PACKAGES = ("chrony", "systemd-timesyncd", "ntpsec", "ntp", "openntpd")
#: Prefix of Ubuntu's packages with kernel modules that Canonical signed.
_SIGNED_MODULES = "linux-modules-nvidia-"
#: The distribution's package that follows its kernel, such as `linux-image-amd64` or `linux-image-generic-hwe-24.04`.
_KERNEL_PACKAGE = re.compile(r"linux-image-(?!unsigned-|extra-)([a-z][a-z0-9.-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AptSourceFile:
    """A file of apt's sources."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PciGpu:
    """An NVIDIA display controller on the PCI bus."""

    address: str
    #: NVIDIA's number of the chip.
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """What a machine has of all that a node needs; empty where the machine has nothing of the kind."""

    user: str = ""
    #: `root`, `yes` (without a password) or `no`.
    sudo: str = "no"
    groups: frozenset[str] = frozenset()
    #: `ID`, `VERSION_ID`, `VERSION_CODENAME` and `PRETTY_NAME` of /etc/os-release.
    distribution: str = ""
    release: str = ""
    codename: str = ""
    os: str = ""
    kernel: str = ""
    #: The kernel's name of the processor: `x86_64`, `aarch64`.
    architecture: str = ""
    gpus: tuple[PciGpu, ...] = ()
    #: Version of the driver that the kernel has loaded.
    loaded_driver: str = ""
    #: None on a machine without UEFI.
    secure_boot: bool | None = None
    #: Version of the Docker daemon that answers.
    docker: str = ""
    #: Names of the daemon's OCI runtimes.
    runtimes: frozenset[str] = frozenset()
    #: Version of NVIDIA's container toolkit; None where it is missing.
    toolkit: str | None = None
    #: Installed package → its version; only those that the script asks for.
    packages: Mapping[str, str] = field(default_factory=dict)
    #: Packages of drivers and of their kernel modules in the machine's package lists.
    available: frozenset[str] = frozenset()
    #: Version of `nvidia-driver` that apt would install.
    driver_candidate: str = ""
    #: The driver package that Ubuntu's `ubuntu-drivers` recommends.
    recommended: str = ""
    sources: tuple[AptSourceFile, ...] = ()

    @property
    def driver_package(self) -> tuple[str, str] | None:
        """Return name and version of the installed driver package."""
        return next(((name, self.packages[name]) for name in self.packages if _DRIVER_PACKAGE.fullmatch(name)), None)

    @property
    def driver(self) -> str:
        """Return the version of the driver: the loaded one, else the installed one."""
        package = self.driver_package
        return self.loaded_driver or ("" if package is None else parse_upstream_version(package[1]))

    @property
    def needs_reboot(self) -> bool:
        """The installed driver is not the one that the kernel has loaded."""
        package = self.driver_package
        return bool(self.gpus) and package is not None and parse_upstream_version(package[1]) != self.loaded_driver

    @property
    def has_signed_modules(self) -> bool:
        """The distribution signed the driver's kernel modules."""
        return any(name.startswith(_SIGNED_MODULES) for name in self.packages)

    @property
    def docker_package(self) -> str:
        return next((name for name in _DOCKER_PACKAGES if name in self.packages), "")

    @property
    def clock_package(self) -> str:
        return next((name for name in _CLOCK_PACKAGES if name in self.packages), "")

    @property
    def kernel_flavour(self) -> str:
        """Return the kernel's variant in its packages' names: `amd64`, `generic-hwe-24.04`; empty for other kernels."""
        flavours = [match[1] for name in self.packages if (match := _KERNEL_PACKAGE.fullmatch(name))]
        return max(flavours, key=len, default="")


def parse_upstream_version(version: str) -> str:
    """Return the upstream part of a package's version: `535.261.03` for `535.261.03-1`."""
    return version.rpartition(":")[2].split("-")[0].split("+")[0]


def parse_branch(version: str) -> str:
    """Return a driver's branch: `570` for `570.195.03`."""
    return version.partition(".")[0]


def read_state_script() -> str:
    """Return the script that prints a machine's state."""
    return build_state_script("gpuhub.ops.provision", "machine_state.sh")


def build_state_script(package: str, name: str) -> str:
    """Return `machine_basics.sh`, followed by a script of a package that uses its functions."""
    parts = (("gpuhub.ops.provision", "machine_basics.sh"), (package, name))
    return "".join(resources.files(folder).joinpath(file).read_text(encoding="utf-8") for folder, file in parts)


def parse_machine_state(text: str) -> MachineState:
    """Parse the output of `machine_state.sh`.

    Raises:
        SetupError: The script did not run to its end, or wrote something else.
    """
    values = parse_state_values(text)
    try:
        return MachineState(
            user=values.last("user"),
            sudo=values.last("sudo") or "no",
            groups=frozenset(values.last("groups").split()),
            distribution=values.last("distribution"),
            release=values.last("release"),
            codename=values.last("codename"),
            os=values.last("os"),
            kernel=values.last("kernel"),
            architecture=values.last("architecture"),
            gpus=tuple(_parse_gpu(line) for line in values.get("gpu", ())),
            loaded_driver=values.last("loaded_driver"),
            secure_boot={"0": False, "1": True}.get(values.last("secure_boot")),
            docker=values.last("docker"),
            runtimes=frozenset(values.last("runtimes").split()),
            toolkit=values["toolkit"][-1] if "toolkit" in values else None,
            packages={
                name: version for name, _, version in (line.partition(" ") for line in values.get("package", ()))
            },
            available=frozenset(values.get("available", ())),
            driver_candidate=values.last("driver_candidate"),
            recommended=values.last("recommended"),
            sources=tuple(_parse_source(line) for line in values.get("source", ())),
        )
    except (ValueError, binascii.Error) as error:
        raise SetupError(f"the machine's state has an unknown form: {error}") from None


class StateValues(dict[str, list[str]]):
    """The values of each key, in the order of their lines."""

    def last(self, key: str) -> str:
        """Return the last value of a key; empty for none."""
        return self.get(key, [""])[-1]


def parse_state_values(text: str) -> StateValues:
    """Parse lines KEY=VALUE to the values of each key.

    Raises:
        SetupError: The script did not run to its end, where it writes `end=`.
    """
    values = StateValues()
    for line in text.splitlines():
        key, sign, value = line.partition("=")
        if sign:
            values.setdefault(key, []).append(value.strip())
    if "end" not in values:
        last = text.strip().splitlines()[-1:] or ["it wrote nothing"]
        raise SetupError(f"the machine's state could not be read to its end: {last[0][:200]}")
    return values


def _parse_gpu(line: str) -> PciGpu:
    address, _, device = line.partition(" ")
    return PciGpu(address=address, device=int(device, 16))


def _parse_source(line: str) -> AptSourceFile:
    content, _, path = line.partition(" ")
    return AptSourceFile(path=path, text=base64.b64decode(content, validate=True).decode(errors="replace"))
