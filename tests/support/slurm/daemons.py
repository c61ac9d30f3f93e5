"""The daemons of a Slurm site of the tests: started in a mount namespace with separate users, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpuhub_closet.slurm_config import SlurmConfig
from tests.support.product import wait_for

DEADLINE_S = 60.0
#: The user as whom slurmrestd runs: it refuses root, and Slurm's own user.
REST_USER = ("slurmrest", 61099)


@dataclass(slots=True)
class Daemons:
    """munged, slurmctld, a slurmd by each node's name, and where asked for mariadbd, slurmdbd and slurmrestd."""

    files: SlurmConfig
    #: Where slurmrestd listens; None without it.
    rest_url: str | None
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    #: Holds the mount namespace.
    _holder: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """With which daemons and commands find the site."""
        return {**os.environ, "SLURM_CONF": str(self.files.conf)}

    @property
    def database_socket(self) -> Path:
        """MariaDB's."""
        return self.files.folder / "database.socket"

    def open(self) -> None:
        """Make the namespace. The folder `etc` in the site's own must be there: it stands for the machine's /etc."""
        folder = self.files.folder
        # Not the two files alone: a mount on one is lost when anybody on this machine puts a new file in its place.
        script = f"mount --bind {folder}/etc /etc && touch {folder}/mounted && exec sleep infinity"
        self._holder = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sh", "-c", script])
        wait((folder / "mounted").exists, "the site has its own users")

    def start(self, name: str) -> None:
        """Start a daemon, the first time or after a `kill`; it may need a moment before it answers."""
        assert self._holder is not None
        command, environment = self._command(name)
        become = [f"--setuid={REST_USER[1]}", f"--setgid={REST_USER[1]}"] if name == "slurmrestd" else []
        enter = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wdns={self.files.folder}", *become]
        with (self.files.folder / f"{name}.out").open("ab") as output:
            self._running[name] = subprocess.Popen(
                [*enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment, **environment},
            )

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a daemon, `kill -9` by default, and wait until it is gone; what it started may live on."""
        process = self._running.pop(name)
        process.send_signal(how)
        process.wait(DEADLINE_S)

    def check(self) -> bool:
        """True while every daemon lives that was started and not killed.

        Raises:
            RuntimeError: with the last words of one that has ended by itself.
        """
        for name, process in self._running.items():
            if process.poll() is not None:
                said = (self.files.folder / f"{name}.out").read_text(errors="replace")
                raise RuntimeError(f"{name} has ended:\n{said[-2000:]}")
        return True

    def close(self) -> None:
        """End every process of the site, by its id: jobs too, which outlive their slurmd."""
        for process in reversed(self._running.values()):
            process.terminate()
        end = time.monotonic() + 10
        for process in reversed(self._running.values()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
        if self._holder is not None:
            wait(self._is_empty, "the site's processes are gone")
            self._holder.kill()
            self._holder.wait(5)
        for process in self._running.values():
            process.wait(5)

    def _command(self, name: str) -> tuple[list[str], dict[str, str]]:
        at = self.files.folder
        match name:
            case "munged":
                paths = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
                options = [f"--{option}={at}/munge.{end}" for option, end in paths.items()]
                # What a killed one left behind shall not stop it.
                return ["munged", "--foreground", "--force", f"--socket={self.files.munge_socket}", *options], {}
            case "mariadbd":
                options = ["--no-defaults", "--user=root", "--skip-networking", f"--datadir={at}/database"]
                options += [f"--socket={self.database_socket}", f"--pid-file={at}/mariadbd.pid"]
                return ["mariadbd", *options, "--innodb-buffer-pool-size=64M"], {}
            case "slurmdbd":
                return ["slurmdbd", "-D"], {"MYSQL_UNIX_PORT": str(self.database_socket)}
            case "slurmrestd":
                assert self.rest_url is not None
                address = self.rest_url.removeprefix("http://")
                # The one for accounts refuses a cluster that has none.
                kinds = "openapi/v0.0.38" + ("" if self.files.accounting is None else ",openapi/dbv0.0.38")
                return ["slurmrestd", "-a", "rest_auth/jwt", "-s", kinds, address], {"SLURM_JWT": "daemon"}
            case "slurmctld":
                return ["slurmctld", "-D"], {}
            case node:
                return ["slurmd", "-D", "-N", node], {}

    def _is_empty(self) -> bool:
        """Whether only the holder is left in the namespace; whatever else is there is killed."""
        assert self._holder is not None
        ours = _mounts(self._holder.pid)
        everybody = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        others = [pid for pid in everybody if pid != self._holder.pid and _mounts(pid) == ours]
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not others


def _mounts(pid: int) -> int | None:
    """Which mount namespace a process has; None for one that has ended, or that even root may not look at."""
    try:
        return Path(f"/proc/{pid}/ns/mnt").stat().st_ino
    except OSError:
        return None


def wait(is_true: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Ask until it is true.

    Raises:
        TimeoutError: saying what did not come.
    """
    end = time.monotonic() + deadline_s
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(0.05)


def wait_saved(ask: Callable[..., object], state: Path, job: int) -> None:
    """Until slurmctld has written what it knows by now of its jobs to its state's folder; `ask` runs Slurm's commands."""
    file = state / "job_state"
    # The first one to be seen may have been composed before.
    for count in range(2):
        before = file.stat().st_mtime_ns if file.exists() else 0
        ask("scontrol", "update", f"jobid={job}", f"comment=gpuhub-{count}")
        wait_for(lambda: file.exists() and file.stat().st_mtime_ns > before, "slurmctld has saved its state")  # noqa: B023
