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

from gpuhub_closet.slurm.slurm_config import SlurmConfig
from tests.support.product import wait_for

DEADLINE_S = 60.0
#: The user of slurmrestd, which refuses to run as root or as Slurm's own user.
REST_USER = ("slurmrest", 61099)


@dataclass(slots=True)
class Daemons:
    """munged, slurmctld, a slurmd by each node's name, and on request mariadbd, slurmdbd and slurmrestd."""

    files: SlurmConfig
    #: slurmrestd's address; None without it.
    rest_url: str | None
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    #: Holds the mount namespace.
    _holder: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables by which daemons and commands find the site."""
        return {**os.environ, "SLURM_CONF": str(self.files.conf)}

    @property
    def database_socket(self) -> Path:
        """MariaDB's socket."""
        return self.files.folder / "database.socket"

    def open(self) -> None:
        """Make the namespace. The folder `etc` in the site's folder must exist: it replaces the machine's /etc there."""
        folder = self.files.folder
        # Not the two files alone: a mount on a file is lost when any process of this machine replaces the file.
        script = f"mount --bind {folder}/etc /etc && touch {folder}/mounted && exec sleep infinity"
        self._holder = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sh", "-c", script])
        wait((folder / "mounted").exists, "the site has its own users")

    def build_enter_command(self, folder: Path) -> tuple[str, ...]:
        """Return the words before a command that let it know the site's users, in this folder."""
        assert self._holder is not None
        return ("nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wdns={folder}")

    def start(self, name: str) -> None:
        """Start a daemon, the first time or after a `kill`; it may need a moment before it answers."""
        command, environment = self._command(name)
        become = [f"--setuid={REST_USER[1]}", f"--setgid={REST_USER[1]}"] if name == "slurmrestd" else []
        enter = [*self.build_enter_command(self.files.folder), *become]
        with (self.files.folder / f"{name}.out").open("ab") as output:
            self._running[name] = subprocess.Popen(
                [*enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment, **environment},
            )

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a daemon, `kill -9` by default, and wait until it is gone; its children may continue."""
        process = self._running.pop(name)
        process.send_signal(how)
        process.wait(DEADLINE_S)

    def check(self) -> bool:
        """Return True if every daemon runs that was started and not killed.

        Raises:
            RuntimeError: A daemon has ended; the message has the end of its log.
        """
        for name, process in self._running.items():
            if process.poll() is not None:
                said = (self.files.folder / f"{name}.out").read_text(errors="replace")
                raise RuntimeError(f"{name} has ended:\n{said[-2000:]}")
        return True

    def close(self) -> None:
        """End every process of the site by its id, including jobs, which outlive their slurmd."""
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
                # Files of a killed daemon must not prevent its start.
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
                # The plugin for accounts refuses a cluster that has none.
                kinds = "openapi/v0.0.38" + ("" if self.files.accounting is None else ",openapi/dbv0.0.38")
                return ["slurmrestd", "-a", "rest_auth/jwt", "-s", kinds, address], {"SLURM_JWT": "daemon"}
            case "slurmctld":
                return ["slurmctld", "-D"], {}
            case node:
                return ["slurmd", "-D", "-N", node], {}

    def _is_empty(self) -> bool:
        """Kill all other processes of the namespace, and return whether only the holder is left."""
        assert self._holder is not None
        ours = _mounts(self._holder.pid)
        everybody = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        others = [pid for pid in everybody if pid != self._holder.pid and _mounts(pid) == ours]
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not others


def _mounts(pid: int) -> int | None:
    """Return the mount namespace of a process; None for one that has ended or is inaccessible even to root."""
    try:
        return Path(f"/proc/{pid}/ns/mnt").stat().st_ino
    except OSError:
        return None


def wait(is_true: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds.

    Raises:
        TimeoutError: The condition did not hold in time.
    """
    end = time.monotonic() + deadline_s
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(0.05)


def wait_saved(ask: Callable[..., object], state: Path, job: int) -> None:
    """Wait until slurmctld has saved its present state of jobs to its folder; `ask` runs Slurm's commands.

    It saves up to 5 s after a change; a slurmctld that is killed before that forgets the change.
    """
    file = state / "job_state"
    # The first saved state may be older than the update.
    for count in range(2):
        before = file.stat().st_mtime_ns if file.exists() else 0
        ask("scontrol", "update", f"jobid={job}", f"comment=gpuhub-{count}")
        wait_for(lambda: file.exists() and file.stat().st_mtime_ns > before, "slurmctld has saved its state")  # noqa: B023
