"""The systemd unit that starts an instance at boot."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.common.open_files import WANTED
from gpuhub.common.paths import Paths

_UNITS = Path("/etc/systemd/system")
#: Exists where systemd runs the machine; see sd_booted(3).
_BOOTED = Path("/run/systemd/system")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Images may have to be built at the first start.
_START_TIMEOUT = "1h"
#: Maximum wait for one command of systemctl, seconds.
_DEADLINE_S = 60

#: Runs a command of systemctl with these words.
Systemctl = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BootUnit:
    """The unit of one instance, started in gpuhub's own folder."""

    paths: Paths
    #: The folder with jupyterhub_config.py.
    source: Path
    #: cluster.toml of the instance.
    cluster_file: Path
    units: Path = _UNITS

    @property
    def name(self) -> str:
        """The unit's name, such as `gpuhub.service`."""
        return f"{self.paths.instance}.service"

    @property
    def file(self) -> Path:
        """The unit's file."""
        return self.units / self.name

    def build(self) -> str:
        """Return the unit's text.

        Its start is `gpuhub up`, which is safe while the instance runs. At its end systemd ends supervisord, which ends
        hub, broker and proxy; containers of users are on no unit and run on.
        """
        programs = Path(sys.executable).parent
        command = [
            *(str(programs / "gpuhub"), "up", "--instance", self.paths.instance),
            *("--cluster-file", str(self.cluster_file)),
        ]
        return f"""\
# Written by `gpuhub install`, which replaces it; settings of your own belong into {self.name}.d/*.conf.
[Unit]
Description=gpuhub, JupyterHub on shared GPU machines ({self.paths.instance})
Wants=network-online.target
After=network-online.target remote-fs.target docker.service time-sync.target
StartLimitIntervalSec=0

[Service]
Type=forking
PIDFile={self.paths.run}/supervisord.pid
WorkingDirectory={_escape(self.source)}
Environment={_quote(f"PATH={programs}:{_SYSTEM_PATH}")}
ExecStart={_escape(shlex.join(command)).replace("$", "$$")}
KillMode=mixed
TimeoutStartSec={_START_TIMEOUT}
TimeoutStopSec=45
Restart=on-failure
RestartSec=30
LimitNOFILE={WANTED}

[Install]
WantedBy=multi-user.target
"""

    def install(self, systemctl: Systemctl, booted: Path = _BOOTED) -> bool:
        """Write the unit and enable it; return whether the file changed.

        Raises:
            SetupError: systemd does not run this machine, or refuses the unit.
        """
        _require_systemd(booted, f"have {shlex.quote(str(Path(sys.executable).parent / 'gpuhub'))} up run at boot")
        text = self.build()
        is_changed = not self.file.exists() or self.file.read_text(encoding="utf-8") != text
        if is_changed:
            self.file.write_text(text, encoding="utf-8")
            self.file.chmod(0o644)
        systemctl(["daemon-reload"])
        systemctl(["enable", self.name])
        return is_changed

    def uninstall(self, systemctl: Systemctl, booted: Path = _BOOTED) -> bool:
        """Disable the unit and remove its file; return whether there was one. What runs continues.

        Raises:
            SetupError: systemd does not run this machine, or refuses.
        """
        _require_systemd(booted, f"remove {self.file} yourself, if it is there")
        if not self.file.exists():
            return False
        systemctl(["disable", self.name])
        self.file.unlink()
        systemctl(["daemon-reload"])
        return True


def run_systemctl(words: Sequence[str]) -> None:
    """Run a command of systemctl.

    Raises:
        SetupError: It fails, with its own message.
    """
    command = ["systemctl", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise SetupError(f"{shlex.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")


def _require_systemd(booted: Path, remedy: str) -> None:
    if not booted.is_dir():
        raise SetupError(f"systemd does not run this machine ({booted} is missing): {remedy}")


def _escape(text: object) -> str:
    """Escape what systemd would expand: `%` begins a specifier."""
    return str(text).replace("%", "%%")


def _quote(assignment: str) -> str:
    return '"' + _escape(assignment).replace("\\", "\\\\").replace('"', '\\"') + '"'
