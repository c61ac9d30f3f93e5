"""A machine's management controller on loopback: OpenIPMI's simulator, whose machine is a file that says on or off."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.product import wait_for

#: Program → Debian package.
_PROGRAMS = {"ipmi_sim": "openipmi", "ipmitool": "ipmitool"}
#: ipmitool uses the usual port.
PORT = 623
USER, PASSWORD = "gpuhub", "xX-1795459261"
_LAN = """name "{name}"
set_working_mc 0x20
startlan 1
  addr {address} {port}
  priv_limit admin
  allowed_auths_admin md5
  guid a123456789abcdefa123456789abcdef
endlan
chassis_control "{program}"
user 2 true "{user}" "{password}" admin 10 md5
"""
_CONTROLLER = """mc_setbmc 0x20
mc_add 0x20 0 no-device-sdrs 0x23 9 8 0x9f 0x1291 0xf02
mc_enable 0x20
"""
#: `get power`, `set power 0|1` (hard), and `set shutdown 1`, which asks the machine's system to shut down.
_CHASSIS = """#!/bin/sh
cd {folder} || exit 1
case "$1 $2" in
"get power") echo "power:$(cat power)" ;;
*) echo "$1 $2 $3" >>calls; case $2 in power) echo "$3" >power ;; shutdown) echo 0 >power ;; esac ;;
esac
"""


@dataclass(frozen=True, slots=True)
class ManagedMachine:
    """A machine with a management controller."""

    address: str
    folder: Path

    @property
    def is_on(self) -> bool:
        """Return whether it is on."""
        return (self.folder / "power").read_text().strip() == "1"

    @property
    def calls(self) -> list[str]:
        """Return what its controller did with its power."""
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []


@contextmanager
def managed_machine(folder: Path, address: str) -> Iterator[ManagedMachine]:
    """Yield a machine that is off, whose controller listens at this address of loopback.

    Raises:
        RuntimeError: A program is missing; its Debian package is named.
    """
    missing = sorted(package for program, package in _PROGRAMS.items() if shutil.which(program) is None)
    if missing:
        raise RuntimeError(f"a management controller of one's own lacks: apt-get install {' '.join(missing)}")
    program = folder / "chassis"
    program.write_text(_CHASSIS.format(folder=folder))
    program.chmod(0o755)
    (folder / "power").write_text("0\n")
    lan = _LAN.format(name="gpuhub", address=address, port=PORT, program=program, user=USER, password=PASSWORD)
    (folder / "lan.conf").write_text(lan)
    (folder / "controller.emu").write_text(_CONTROLLER)
    (folder / "state").mkdir()
    command = ["ipmi_sim", "-n", "-c", "lan.conf", "-f", "controller.emu", "-s", "state"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_for(lambda: _listens(process, address), lambda: f"ipmi_sim listens:\n{(folder / 'log').read_text()}")
        yield ManagedMachine(address, folder)
    finally:
        process.kill()
        process.wait(10)


def _listens(process: subprocess.Popen[bytes], address: str) -> bool:
    assert process.poll() is None, "ipmi_sim has ended"
    shown = subprocess.run(["ss", "-lunH", f"src {address}:{PORT}"], check=True, capture_output=True, text=True)
    return bool(shown.stdout.strip())
