"""The state of a machine on which Slurm is installed, parsed from the output of `slurm_state.sh`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuhub.common.errors import SetupError
from gpuhub.ops.provision.machine_state import build_state_script, parse_state_values
from gpuhub.ops.slurm.files import MARKER, SLURM_CONF

#: Slurm's configuration in packages of older distributions.
_OLD_SLURM_CONF = "/etc/slurm-llnl/slurm.conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledFile:
    """A file that is there."""

    mode: int
    owner: str
    #: Time of its last change, Unix seconds.
    changed_at: int
    sha256: str
    #: None for a secret.
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitState:
    """A service of systemd."""

    is_enabled: bool = False
    is_active: bool = False
    #: Time of its last start, Unix seconds.
    started_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmMachineState:
    """What a machine has of all that Slurm needs."""

    #: `root`, `yes` (without a password) or `no`.
    sudo: str = "no"
    #: `ID`, `VERSION_ID` and `PRETTY_NAME` of /etc/os-release.
    distribution: str = ""
    release: str = ""
    os: str = ""
    hostname: str = ""
    cpus: int = 0
    memory_kib: int = 0
    #: Numbers of the device files of its GPUs, in the order of the PCI bus; empty without the driver.
    minors: tuple[int, ...] = ()
    packages: frozenset[str] = frozenset()
    has_rest_user: bool = False
    files: Mapping[str, InstalledFile] = field(default_factory=dict)
    units: Mapping[str, UnitState] = field(default_factory=dict)

    @property
    def foreign_slurm_conf(self) -> str | None:
        """Return the path of a slurm.conf that gpuhub did not write; None if there is none."""
        for path in (str(SLURM_CONF), _OLD_SLURM_CONF):
            file = self.files.get(path)
            if file is not None and not (file.text or "").startswith(MARKER):
                return path
        return None


def read_state_script() -> str:
    """Return the script that prints a machine's state."""
    return build_state_script("gpuhub.ops.slurm", "slurm_state.sh")


def parse_slurm_state(text: str) -> SlurmMachineState:
    """Parse the output of `slurm_state.sh`.

    Raises:
        SetupError: The script did not run to its end, or wrote something else.
    """
    values = parse_state_values(text)
    try:
        return SlurmMachineState(
            sudo=values.last("sudo") or "no",
            distribution=values.last("distribution"),
            release=values.last("release"),
            os=values.last("os"),
            hostname=values.last("hostname"),
            cpus=int(values.last("cpus")),
            memory_kib=int(values.last("memory_kib")),
            minors=tuple(map(int, values.get("minor", ()))),
            packages=frozenset(values.get("package", ())),
            has_rest_user=values.last("rest_user") == "yes",
            files=dict(map(_parse_file, values.get("file", ()))),
            units=dict(map(_parse_unit, values.get("unit", ()))),
        )
    except (ValueError, binascii.Error) as error:
        raise SetupError(f"the machine's state has an unknown form: {error}") from None


def _parse_file(line: str) -> tuple[str, InstalledFile]:
    mode, owner, changed_at, sha256, content, path = line.split(" ", 5)
    text = None if content == "-" else base64.b64decode(content, validate=True).decode(errors="replace")
    return path, InstalledFile(mode=int(mode, 8), owner=owner, changed_at=int(changed_at), sha256=sha256, text=text)


def _parse_unit(line: str) -> tuple[str, UnitState]:
    name, enabled, active, since = line.split(" ")
    return name, UnitState(is_enabled=enabled == "enabled", is_active=active == "active", started_at=int(since))
